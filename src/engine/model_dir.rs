//! Reads and normalises a Hugging Face model directory.
// STUB: signatures only; the engine's author replaces every body.

use std::path::{Path, PathBuf};

use super::EngineError;

/// A Hugging Face directory that has been read and found servable.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// Where it is.
    pub path: PathBuf,
    /// The parsed `config.json`, transformers 5's `rope_parameters` folded to the top level.
    pub config: serde_json::Value,
    /// Tokens that end a completion, from `generation_config.json` and `config.json`.
    pub stop_ids: Vec<u32>,
    /// The chat template's text.
    pub chat_template: String,
    /// Safetensors files, in order.
    pub weights: Vec<PathBuf>,
}

#[expect(unused_variables, reason = "stub")]
impl ModelDir {
    /// Reads a directory as Hugging Face tools write it.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        Err(EngineError::Model("stub".to_owned()))
    }
}
