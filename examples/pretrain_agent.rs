//! Trains the model of the agent that learns (`examples/agent.py`) from a seed:
//!
//! ```text
//! cargo run --release --example pretrain_agent [DIRECTORY]
//! ```
//!
//! It writes a Hugging Face directory (`models/agent` by default): a small Qwen2 decoder that calls functions
//! in Hermes' format, and its tokenizer. Like the model of the demo, it first learns the task, and then to make
//! mistakes: it guesses instead of asking a function, asks for the wrong item, and stops half-way. What it does
//! right it does often enough that rewards can find it.
//!
//! Processors round differently, so weights from another machine differ slightly from the committed ones.

use std::path::PathBuf;

use anyhow::Result;
use candle_core::DType;
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

#[path = "pretrain_agent/episodes.rs"]
mod episodes;
mod pretrain;

use episodes::{Turn, conversation, corpus};
use pretrain::directory::Shape;
use pretrain::training::Sequence;
use pretrain::vocabulary::{completion, encode};
use pretrain::{END, START};

const STEPS: usize = 800;
const BATCH: usize = 16;
/// The share of the steps after which conversations have errors.
const ERRORS_FROM: f64 = 0.75;
const TAGS: [&str; 4] = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"];

/// ChatML with the names of the functions, and calls as in Qwen's template.
const CHAT_TEMPLATE: &str = r#"{% if tools %}{{ '<|im_start|>system\nFunctions:' }}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{% if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first else '' }}{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).map_or_else(|| "models/agent".into(), PathBuf::from);
    let shape = Shape { layers: 3, template: CHAT_TEMPLATE, dtype: DType::BF16 };
    pretrain::create(&dir, &shape, (corpus(), &TAGS), STEPS, |tokenizer, done, rng| {
        (0..BATCH).map(|_| sequence(tokenizer, done >= ERRORS_FROM, rng)).collect()
    })
}

/// A conversation's tokens; the model learns its own messages.
fn sequence(tokenizer: &Tokenizer, erring: bool, rng: &mut ChaCha8Rng) -> Result<Sequence> {
    let mut sequence = Sequence::default();
    for turn in conversation(erring, rng) {
        match turn {
            Turn::Read(role, text) => {
                sequence.read(encode(tokenizer, &format!("{START}{role}\n{text}{END}\n"))?);
            }
            Turn::Written(text) => {
                sequence.read(encode(tokenizer, &format!("{START}assistant\n"))?);
                sequence.learn(completion(tokenizer, &text)?);
                sequence.read(encode(tokenizer, "\n")?);
            }
        }
    }
    Ok(sequence)
}
