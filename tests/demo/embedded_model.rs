//! The embedded model suits the demo: it can add, and yet its most probable answers are often wrong.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may fail loudly, and print shares"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tokenizers::Tokenizer;

use hone_demo::task::{
    MAX_TOKENS, Question, QuestionKind, QuestionSplit, Questions, REWARD_MAX, score,
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

    /// One completion of each question: at temperature 1 with `rng`, else greedy.
    fn complete(&self, questions: &[Question], mut rng: Option<&mut ChaCha8Rng>) -> Vec<String> {
        let prompts: Vec<_> = questions.iter().map(|q| self.prompt(q)).collect();
        let mut sequences = prompts.clone();
        let mut running: Vec<usize> = (0..questions.len()).collect();
        for _ in 0..MAX_TOKENS {
            let batch: Vec<_> = running.iter().map(|i| sequences[*i].clone()).collect();
            let last: Vec<_> = batch.iter().enumerate().map(|(i, s)| (i, s.len() - 1)).collect();
            let logits = self.logits(&batch, &last).to_vec2::<f32>().unwrap();
            for (index, logits) in running.iter().zip(&logits) {
                sequences[*index].push(match &mut rng {
                    Some(rng) => draw(logits, rng),
                    None => best(logits),
                });
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

fn best(logits: &[f32]) -> u32 {
    let highest = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    highest.map(|(id, _)| id as u32).unwrap()
}

/// Shares over held-out questions.
#[derive(Debug)]
struct Shares {
    reward: f64,
    well_formed: f64,
    thumbs_up: f64,
    /// The number is right, in any format, among questions whose ones carry.
    knows_carries: f64,
    /// The same among the other questions.
    knows_others: f64,
}

/// The last number in a text.
fn last_number(text: &str) -> Option<u32> {
    text.rsplit(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty())?.parse().ok()
}

fn shares(kind: QuestionKind, mut rng: Option<ChaCha8Rng>) -> Shares {
    let embedded = Embedded::load();
    let questions: Vec<_> = Questions::new(7, QuestionSplit::HeldOut(kind)).take(384).collect();
    let texts: Vec<_> =
        questions.chunks(128).flat_map(|chunk| embedded.complete(chunk, rng.as_mut())).collect();
    let answered: Vec<_> = questions.iter().zip(&texts).collect();
    let mean = |of: &dyn Fn(&Question, &str) -> f64, among: &dyn Fn(&Question) -> bool| {
        let values: Vec<f64> =
            answered.iter().filter(|(q, _)| among(q)).map(|(q, text)| of(q, text)).collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let all = |_: &Question| true;
    let share = |holds: bool| f64::from(u8::from(holds));
    let knows = |q: &Question, text: &str| share(last_number(text) == Some(q.answer()));
    let shares = Shares {
        reward: mean(&|q, text| score(text, q.answer()).reward() / REWARD_MAX, &all),
        well_formed: mean(&|q, text| score(text, q.answer()).format, &all),
        thumbs_up: mean(&|q, text| share(score(text, q.answer()).thumbs_up()), &all),
        knows_carries: mean(&knows, &Question::carries),
        knows_others: mean(&knows, &|q| !q.carries()),
    };
    println!("{kind:?}: {shares:?}");
    shares
}

#[test]
fn greedy_answers_are_often_wrong_or_ill_formed() {
    for kind in [QuestionKind::Asked, QuestionKind::Larger] {
        let greedy = shares(kind, None);
        assert!((0.2..=0.6).contains(&greedy.reward));
        assert!((0.3..=0.7).contains(&greedy.well_formed));
        assert!(greedy.knows_others >= 0.9, "it can add");
        assert!((0.1..=0.6).contains(&greedy.knows_carries), "it misses most carries");
    }
}

#[test]
fn sampled_answers_are_sometimes_perfect() {
    for kind in [QuestionKind::Asked, QuestionKind::Larger] {
        let sampled = shares(kind, Some(ChaCha8Rng::seed_from_u64(7)));
        assert!((0.2..=0.6).contains(&sampled.reward));
        assert!(sampled.thumbs_up >= 0.1, "learning needs examples to reinforce");
    }
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
