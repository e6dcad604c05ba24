//! The embedded model suits the demo: greedy answers are right, sampled ones earn half of the reward.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{D, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tokenizers::Tokenizer;

use hone::demo::task::{
    MAX_TOKENS, OPERANDS, PHRASING_COUNT, Question, QuestionSplit, Questions, REWARD_MAX, score,
};
use hone_model::adapter::BaseDtype;
use hone_model::transformer::Segments;
use hone_model::{Model, ModelSpec};

struct Embedded {
    model: Model,
    tokenizer: Tokenizer,
    end: u32,
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/embedded")
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(directory().join(name)).unwrap()).unwrap()
}

impl Embedded {
    fn load() -> Self {
        let dir = directory();
        let spec = ModelSpec::from_config(&json("config.json")).unwrap();
        let model =
            Model::load(spec, &[dir.join("model.safetensors")], BaseDtype::Float32, &Device::Cpu)
                .unwrap();
        let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        Self { model, tokenizer, end }
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    fn prompt(&self, question: &Question) -> Vec<u32> {
        let text = question.text();
        self.encode(&format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))
    }

    /// Final hidden states of sequences padded on the right, `[batch * len, hidden]`, and `len`.
    fn hidden(&self, sequences: &[Vec<u32>]) -> (Tensor, usize) {
        let len = sequences.iter().map(Vec::len).max().unwrap();
        let mut ids = Vec::with_capacity(sequences.len() * len);
        for sequence in sequences {
            ids.extend(sequence);
            ids.extend(std::iter::repeat_n(self.end, len - sequence.len()));
        }
        let ids = Tensor::new(ids, &Device::Cpu).unwrap();
        let segments = Arc::new(Segments::batch(sequences.len(), len));
        (self.model.hidden(&ids, &segments, None, None).unwrap(), len)
    }

    /// Logits after the chosen positions `(sequence, position)`, `[n, vocab]`.
    fn logits(&self, sequences: &[Vec<u32>], chosen: &[(usize, usize)]) -> Tensor {
        let (hidden, len) = self.hidden(sequences);
        let rows: Vec<u32> = chosen.iter().map(|(s, t)| (s * len + t) as u32).collect();
        let rows = Tensor::new(rows, &Device::Cpu).unwrap();
        self.model.logits(&hidden.index_select(&rows, 0).unwrap()).unwrap()
    }

    /// Whether greedy decoding gives exactly the ideal completion, that is, whether each of its tokens is
    /// the most probable one given those before it.
    fn greedy_is_ideal(&self, questions: &[Question]) -> Vec<bool> {
        let prompts: Vec<_> = questions.iter().map(|q| self.prompt(q)).collect();
        let mut sequences = Vec::new();
        let (mut chosen, mut wanted) = (Vec::new(), Vec::new());
        for (index, (question, prompt)) in questions.iter().zip(&prompts).enumerate() {
            let mut completion = self.encode(&question.ideal());
            completion.push(self.end);
            for (offset, id) in completion.iter().enumerate() {
                chosen.push((index, prompt.len() + offset - 1));
                wanted.push(*id);
            }
            sequences.push([&prompt[..], &completion].concat());
        }
        let best = self.logits(&sequences, &chosen).argmax(D::Minus1).unwrap();
        let mut ideal = vec![true; questions.len()];
        for ((best, wanted), (index, _)) in
            best.to_vec1::<u32>().unwrap().iter().zip(&wanted).zip(&chosen)
        {
            ideal[*index] &= best == wanted;
        }
        ideal
    }

    /// One completion of each question at temperature 1.
    fn sample(&self, questions: &[Question], rng: &mut ChaCha8Rng) -> Vec<String> {
        let prompts: Vec<_> = questions.iter().map(|q| self.prompt(q)).collect();
        let mut sequences = prompts.clone();
        let mut running: Vec<usize> = (0..questions.len()).collect();
        for _ in 0..MAX_TOKENS {
            let batch: Vec<_> = running.iter().map(|i| sequences[*i].clone()).collect();
            let last: Vec<_> = batch.iter().enumerate().map(|(i, s)| (i, s.len() - 1)).collect();
            let logits = self.logits(&batch, &last).to_vec2::<f32>().unwrap();
            for (index, logits) in running.iter().zip(&logits) {
                sequences[*index].push(draw(logits, rng));
            }
            running.retain(|index| sequences[*index].last() != Some(&self.end));
            if running.is_empty() {
                break;
            }
        }
        let completions = sequences.iter().zip(&prompts).map(|(s, p)| &s[p.len()..]);
        completions.map(|ids| self.tokenizer.decode(ids, true).unwrap()).collect()
    }
}

/// An index with probability `softmax(logits)`.
fn draw(logits: &[f32], rng: &mut ChaCha8Rng) -> u32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = logits.iter().map(|l| f64::from(l - max).exp()).collect();
    let mut point = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        point -= weight;
        if point < 0.0 {
            return index as u32;
        }
    }
    logits.len() as u32 - 1
}

#[test]
fn greedy_answers_are_right_and_well_formed() {
    let embedded = Embedded::load();
    let questions: Vec<_> = (0..OPERANDS)
        .flat_map(|a| (0..OPERANDS).map(move |b| (a, b)))
        .enumerate()
        .map(|(i, (a, b))| Question { a, b, phrasing: (i * 7 + i / 11) % PHRASING_COUNT })
        .collect();
    let ideal: Vec<bool> =
        questions.chunks(250).flat_map(|chunk| embedded.greedy_is_ideal(chunk)).collect();
    let share = |of: &dyn Fn(&Question) -> bool| {
        let chosen = || questions.iter().zip(&ideal).filter(|(q, _)| of(q));
        chosen().filter(|(_, ideal)| **ideal).count() as f64 / chosen().count() as f64
    };
    let (all, held_out) = (share(&|_| true), share(&Question::is_held_out));
    println!("greedy ideal: {all:.4} of all additions, {held_out:.4} of those held out");
    assert!(all >= 0.95 && held_out >= 0.95);
}

#[test]
fn sampled_answers_earn_about_half_of_the_reward() {
    let embedded = Embedded::load();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let questions: Vec<_> = Questions::new(7, QuestionSplit::HeldOut).take(384).collect();
    let texts: Vec<_> =
        questions.chunks(128).flat_map(|chunk| embedded.sample(chunk, &mut rng)).collect();
    let scores: Vec<_> =
        questions.iter().zip(&texts).map(|(q, text)| score(text, q.answer())).collect();
    let mean =
        |of: &dyn Fn(usize) -> f64| (0..scores.len()).map(of).sum::<f64>() / scores.len() as f64;
    let reward = mean(&|i| scores[i].reward()) / REWARD_MAX;
    println!(
        "sampled: {reward:.3} of the reward; numeric {:.3}, format {:.3}, thumbs up {:.3}",
        mean(&|i| scores[i].numeric),
        mean(&|i| scores[i].format),
        mean(&|i| f64::from(u8::from(scores[i].thumbs_up()))),
    );
    assert!((0.35..=0.60).contains(&reward));
}

#[test]
fn the_model_is_small_and_encodes_any_text() {
    let embedded = Embedded::load();
    let weights = std::fs::read(directory().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let parameters: usize = tensors.iter().map(|(_, t)| t.shape().iter().product::<usize>()).sum();
    assert!(parameters < 2_000_000, "{parameters} parameters");
    assert_eq!(
        json("config.json")["vocab_size"],
        embedded.tokenizer.get_vocab_size(true),
        "one logit per token"
    );

    for text in ["What is 12 + 7?", "héllo 漢字 🎉\r\n\t x  ", "\u{1}\u{7f} <answer>5</answer>"]
    {
        let ids = embedded.encode(text);
        assert_eq!(embedded.tokenizer.decode(&ids, true).unwrap(), text);
    }
    assert_eq!(embedded.encode("123").len(), 3, "each digit is a token");
    assert_eq!(embedded.encode("<answer></answer>").len(), 2, "tags are single tokens");
}
