//! What the examples that train a small model from a seed share.
//!
//! `vocabulary` makes a byte-level BPE tokenizer, `training` trains a Qwen2 decoder on sequences of which
//! only some tokens are learned, and `directory` writes both as a Hugging Face directory.

pub mod directory;
pub mod training;
pub mod vocabulary;

/// The end of a text, which pads batches.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// The beginning of a message in ChatML.
pub const START: &str = "<|im_start|>";
/// The end of a message in ChatML, and of a completion.
pub const END: &str = "<|im_end|>";

/// Prints progress.
#[expect(clippy::print_stderr, reason = "progress of a command-line tool")]
pub fn say(line: &str) {
    eprintln!("{line}");
}
