//! What the examples that train a small model from a seed share.
//!
//! `vocabulary` makes a byte-level BPE tokenizer, `training` trains a Qwen2 decoder on sequences of which
//! only some tokens are learned, and `directory` writes both as a Hugging Face directory.

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use hone_model::ModelSpec;

use directory::Shape;
use training::Sequence;

pub mod directory;
pub mod training;
pub mod vocabulary;

const SEED: u64 = 1;

/// The end of a text, which pads batches.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// The beginning of a message in ChatML.
pub const START: &str = "<|im_start|>";
/// The end of a message in ChatML, and of a completion.
pub const END: &str = "<|im_end|>";

/// Trains a model of a shape for some steps and writes it. The tokenizer has the words of `corpus`, and each of
/// `tags` as one token. `batch` returns the sequences of a step, for the share of the steps that are done.
///
/// # Errors
///
/// A failure of `batch` or of a library, or a file that cannot be written.
pub fn create(
    dir: &Path,
    shape: &Shape,
    (corpus, tags): (Vec<String>, &[&str]),
    steps: usize,
    batch: impl Fn(&Tokenizer, f64, &mut ChaCha8Rng) -> Result<Vec<Sequence>>,
) -> Result<()> {
    let tokenizer = vocabulary::build(corpus, tags)?;
    let config = directory::config(&tokenizer, shape)?;
    let spec = ModelSpec::from_config(&config)?;
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let weights = training::initial_weights(&spec, &mut rng, &Device::Cpu)?;
    let parameters: usize = weights.values().map(|var| var.elem_count()).sum();
    say(&format!("{} tokens, {parameters} parameters", spec.vocab_size));

    let padding = vocabulary::id_of(&tokenizer, END)?;
    training::train(spec, &weights, steps, padding, |done| batch(&tokenizer, done, &mut rng))?;
    directory::write(dir, &tokenizer, &config, shape, &weights)
}

/// Prints progress.
#[expect(clippy::print_stderr, reason = "progress of a command-line tool")]
pub fn say(line: &str) {
    eprintln!("{line}");
}
