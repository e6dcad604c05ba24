//! Reads a Hugging Face model directory or a GGUF file, refuses models that cannot be served with one
//! sentence, and writes the directory that mistral.rs accepts.
//!
//! The module does not depend on mistral.rs. The trainer uses it, too.

mod config_json;
mod family;
mod files;
mod gguf;
mod normalize;
mod values;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use family::EngineFamily;
use gguf::GgufModel;
use serde_json::Value;
use values::{Config, refuse};

use crate::error::EngineError;

/// A Hugging Face directory or a GGUF file that was read and can be served.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// The directory, or the GGUF file.
    pub path: PathBuf,
    /// The model's name: that of the directory or the file, unless the caller changes it.
    pub name: String,
    /// The parsed `config.json`, or its equivalent from a GGUF file, with the architecture's defaults. The `rope_parameters` of
    /// transformers 5 are rewritten as the `rope_theta`, `partial_rotary_factor` and `rope_scaling`
    /// of earlier versions.
    pub config: Value,
    /// Tokens that end a completion.
    pub stop_ids: Vec<u32>,
    /// The text of the chat template.
    pub chat_template: String,
    /// The safetensors files, in order, or the GGUF file.
    pub weights: Vec<PathBuf>,
    /// `bos_token`, `eos_token` and so on, which are variables in chat templates.
    pub special_tokens: BTreeMap<String, String>,
}

impl ModelDir {
    /// Reads a directory that Hugging Face tools wrote, or a GGUF file. A directory that holds one GGUF
    /// file and no safetensors files stands for that file.
    ///
    /// # Errors
    /// [`EngineError::Model`] with one sentence that names the file, the key and the value that
    /// cannot be served, or [`EngineError::Component`] for a file that cannot be read.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        if let Some(file) = gguf::find(path)? {
            return Self::open_gguf(&file);
        }
        if !path.is_dir() {
            return Err(refuse(format!("{} is not a directory or a GGUF file", path.display())));
        }
        let config = checked(files::object(&path.join("config.json"))?)?;
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

    fn open_gguf(path: &Path) -> Result<Self, EngineError> {
        let GgufModel { config, stop_ids, chat_template, special_tokens } = gguf::read(path)?;
        Ok(Self {
            path: path.to_path_buf(),
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            config: Value::Object(checked(config)?),
            stop_ids,
            chat_template,
            weights: vec![path.to_path_buf()],
            special_tokens,
        })
    }

    /// Whether the model is a GGUF file. Hone's native engine can serve it, mistral.rs cannot: its
    /// policy versions are merged safetensors files.
    pub fn is_gguf(&self) -> bool {
        self.weights.iter().any(|file| gguf::is_gguf(file))
    }

    /// The text of `config.json`, or its equivalent from a GGUF file.
    ///
    /// # Errors
    /// [`EngineError::Component`] if the file cannot be read.
    pub fn config_json(&self) -> Result<String, EngineError> {
        if self.is_gguf() {
            return Ok(self.config.to_string());
        }
        files::read(&self.path.join("config.json"))
    }

    /// The file that the tokenizer is read from.
    pub fn tokenizer_file(&self) -> PathBuf {
        if self.is_gguf() { self.path.clone() } else { self.path.join("tokenizer.json") }
    }

    /// The text of `tokenizer.json`, or its equivalent from a GGUF file.
    ///
    /// # Errors
    /// If the file cannot be read, or a GGUF file has a tokenizer of a kind that is not supported.
    pub fn tokenizer_json(&self) -> Result<String, EngineError> {
        let file = self.tokenizer_file();
        if self.is_gguf() { gguf::tokenizer_json(&file) } else { files::read(&file) }
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

/// A configuration with its family's defaults.
///
/// # Errors
/// If a value cannot be served.
fn checked(mut config: Config) -> Result<Config, EngineError> {
    let family = EngineFamily::of(&config)?;
    config_json::unify_rope(&mut config)?;
    family.fill_defaults(&mut config);
    config_json::check(&config)?;
    family.check(&config)?;
    Ok(config)
}

#[cfg(test)]
mod tests;
