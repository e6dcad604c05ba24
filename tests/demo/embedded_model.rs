//! The embedded model suits the demo: it can add, and yet its most probable answers are often wrong.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may fail loudly, and print shares"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use serde_json::Value;
use tokenizers::Tokenizer;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role, SamplingParams};
use hone_demo::task::{
    MAX_TOKENS, Question, QuestionKind, QuestionSplit, Questions, REWARD_MAX, score,
};
use hone_engine::{Codec, Engine, GenerateRequest, ModelDir, Priority};
use hone_model::adapter::BaseDtype;
use hone_model::{Model, ModelSpec};
use hone_sampler::{BatchedEngine, SamplerConfig};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/embedded")
}

async fn complete(questions: &[Question], temperature: f32) -> Vec<String> {
    let dir = ModelDir::open(&directory()).unwrap();
    let spec = ModelSpec::from_config(&dir.config).unwrap();
    let base = Model::load(spec, &dir.weights, BaseDtype::Float32, &Device::Cpu).unwrap();
    let codec = Arc::new(Codec::load(&dir).unwrap());
    let config = SamplerConfig {
        name: dir.name.clone(),
        context: dir.context(),
        slots: 64,
        queue: questions.len(),
        serves_clients: true,
        ..SamplerConfig::default()
    };
    let metrics = Arc::new(Metrics::new().unwrap());
    let engine = BatchedEngine::start(&base, codec, config, Arc::new(|| false), metrics).unwrap();
    let completions = questions.iter().zip(0..).map(|(question, seed)| {
        let messages = [Message::new(Role::User, question.text())];
        let params =
            SamplingParams { seed, temperature, max_tokens: MAX_TOKENS, ..Default::default() };
        let prompt = engine.codec().prompt(&messages).unwrap();
        let request = GenerateRequest::new(prompt, params, Priority::Live);
        let engine = &engine;
        async move { engine.generate(request).await.unwrap().collect().await.unwrap().text }
    });
    futures::future::join_all(completions).await
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

fn last_number(text: &str) -> Option<u32> {
    text.rsplit(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty())?.parse().ok()
}

async fn shares(kind: QuestionKind, temperature: f32) -> Shares {
    let questions: Vec<_> = Questions::new(7, QuestionSplit::HeldOut(kind)).take(384).collect();
    let texts = complete(&questions, temperature).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn greedy_answers_are_often_wrong_and_sampled_ones_sometimes_perfect() {
    for kind in [QuestionKind::Asked, QuestionKind::Larger] {
        let greedy = shares(kind, 0.0).await;
        assert!((0.2..=0.6).contains(&greedy.reward));
        assert!((0.3..=0.7).contains(&greedy.well_formed));
        assert!(greedy.knows_others >= 0.9, "it can add");
        assert!((0.1..=0.6).contains(&greedy.knows_carries), "it misses most carries");
        let sampled = shares(kind, 1.0).await;
        assert!((0.2..=0.6).contains(&sampled.reward));
        assert!(sampled.thumbs_up >= 0.1, "learning needs examples to reinforce");
    }
}

#[test]
fn the_model_is_small_and_encodes_any_text() {
    let tokenizer = Tokenizer::from_file(directory().join("tokenizer.json")).unwrap();
    let encode = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let weights = std::fs::read(directory().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let parameters: usize = tensors.iter().map(|(_, t)| t.shape().iter().product::<usize>()).sum();
    assert!(parameters < 2_000_000, "{parameters} parameters");
    let config = std::fs::read_to_string(directory().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["vocab_size"], tokenizer.get_vocab_size(true), "one logit per token");

    for text in ["What is 12 + 7?", "héllo 漢字 🎉\r\n\t x  ", "\u{1}\u{7f} <answer>5</answer>"]
    {
        let ids = encode(text);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
    assert_eq!(encode("123").len(), 3, "each digit is a token");
    assert_eq!(encode("<answer></answer>").len(), 2, "tags are single tokens");
}
