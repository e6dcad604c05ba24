//! Trains the embedded model from a seed:
//!
//! ```text
//! cargo run --release --example pretrain_embedded [DIRECTORY]
//! ```
//!
//! It writes a Hugging Face directory (`models/embedded` by default): a Qwen2 decoder that adds small
//! numbers, trained with Hone's differentiable decoder, and its byte-level BPE tokenizer.
//!
//! Processors round differently, so weights from another machine differ slightly from the committed
//! ones. `tests/demo/embedded_model.rs` checks the properties of both.
//!
//! The model must leave something to learn. It first learns to add, and then its task with controlled
//! errors (`lessons::NOISE`): plain answers without tags, forgotten carries, remarks around the answer.
//! Some of these become the most probable answers, so that training must change what the model believes
//! and not only how sure it is. Pairs of operands that the demo holds out are never used.

use std::path::PathBuf;

use anyhow::Result;
use candle_core::DType;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

#[path = "pretrain_embedded/lessons.rs"]
mod lessons;
mod pretrain;

use lessons::{Lesson, Opening, conversation, corpus};
use pretrain::directory::Shape;
use pretrain::training::Sequence;
use pretrain::vocabulary::{completion, encode};
use pretrain::{END, START};

const STEPS: usize = 4800;
const BATCH: usize = 32;
const TAGS: [&str; 4] = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];

/// ChatML.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).map_or_else(|| "models/embedded".into(), PathBuf::from);
    let shape = Shape { layers: 2, template: CHAT_TEMPLATE, dtype: DType::F32 };
    pretrain::create(&dir, &shape, (corpus(), &TAGS), STEPS, |tokenizer, done, rng| {
        batch(tokenizer, Lesson::at(done), rng)
    })
}

fn batch(tokenizer: &Tokenizer, lesson: Lesson, rng: &mut ChaCha8Rng) -> Result<Vec<Sequence>> {
    // One opening for the whole batch, which keeps padding short.
    let opening = match rng.random::<f64>() {
        x if x < 0.8 || lesson == Lesson::Sums => Opening::Nothing,
        x if x < 0.9 => Opening::System,
        _ => Opening::Exchange,
    };
    let mut sequences = Vec::with_capacity(BATCH);
    for _ in 0..BATCH {
        let (prompt, answer) = conversation(lesson, opening, rng);
        let mut sequence = Sequence::default();
        sequence.read(encode(tokenizer, &prompt)?);
        sequence.learn(completion(tokenizer, &answer)?);
        sequences.push(sequence);
    }
    Ok(sequences)
}
