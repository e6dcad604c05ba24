//! Reads a Hugging Face model directory, refuses models that cannot be served with one sentence, and
//! writes the directory that mistral.rs accepts.
//!
//! The module does not depend on mistral.rs. The trainer uses it, too.

mod config_json;
mod family;
mod files;
mod normalize;
mod values;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use family::EngineFamily;
use serde_json::Value;
use values::refuse;

use crate::error::EngineError;

/// A Hugging Face directory that was read and can be served.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// The directory.
    pub path: PathBuf,
    /// The model's name: that of the directory, unless the caller changes it.
    pub name: String,
    /// The parsed `config.json` with the architecture's defaults. The `rope_parameters` of
    /// transformers 5 are rewritten as the `rope_theta`, `partial_rotary_factor` and `rope_scaling`
    /// of earlier versions.
    pub config: Value,
    /// Tokens that end a completion.
    pub stop_ids: Vec<u32>,
    /// The text of the chat template.
    pub chat_template: String,
    /// The safetensors files, in order.
    pub weights: Vec<PathBuf>,
    /// `bos_token`, `eos_token` and so on, which are variables in chat templates.
    pub special_tokens: BTreeMap<String, String>,
}

impl ModelDir {
    /// Reads a directory that Hugging Face tools wrote.
    ///
    /// # Errors
    /// [`EngineError::Model`] with one sentence that names the file, the key and the value that
    /// cannot be served, or [`EngineError::Component`] for a file that cannot be read.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        if !path.is_dir() {
            return Err(refuse(format!("{} is not a directory", path.display())));
        }
        let mut config = files::object(&path.join("config.json"))?;
        let family = EngineFamily::of(&config)?;
        config_json::unify_rope(&mut config)?;
        family.fill_defaults(&mut config);
        config_json::check(&config)?;
        family.check(&config)?;
        if !path.join("tokenizer.json").is_file() {
            return Err(refuse(format!("{} has no tokenizer.json", path.display())));
        }
        let tokenizer_config = files::optional_object(&path.join("tokenizer_config.json"))?;
        let special_tokens = files::special_tokens(&tokenizer_config);
        Ok(Self {
            path: path.to_path_buf(),
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            stop_ids: files::stop_ids(path, &config, &special_tokens)?,
            chat_template: files::chat_template(path, &tokenizer_config)?,
            weights: files::weights(path)?,
            config: Value::Object(config),
            special_tokens,
        })
    }

    /// Context length in tokens, prompt and completion together. It ends where mistral.rs would no
    /// longer compute what transformers computes, for example at a sliding window.
    pub fn context(&self) -> usize {
        let context = |config| Some(EngineFamily::of(config).ok()?.context(config) as usize);
        self.config.as_object().and_then(context).unwrap_or(0)
    }

    /// Logits per position.
    pub fn vocab(&self) -> usize {
        self.config.get("vocab_size").and_then(Value::as_u64).map_or(0, |n| n as usize)
    }
}

#[cfg(test)]
mod tests;
