//! GGUF files as model directories: the contents of `config.json` and `tokenizer.json` from a file's
//! metadata.
//!
//! The conversion undoes that of llama.cpp (`convert_hf_to_gguf.py`); what the file does not hold, such as
//! the layers of SmolLM3 without rotary embedding, is what llama.cpp itself assumes.

mod config;
mod metadata;
mod pre_tokenizer;
mod rope;
mod sentence_piece;
mod tokenizer;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use hone_core::files::at;
use hone_core::gguf::GgufFile;

use super::values::{Config, refuse};
use crate::error::EngineError;
use metadata::Metadata;
use vocabulary::GgufVocabulary;

/// What a model directory would contain.
pub(super) struct GgufModel {
    /// `config.json`, as transformers 4 writes it.
    pub config: Config,
    /// Tokens that end a completion.
    pub stop_ids: Vec<u32>,
    pub chat_template: String,
    /// `bos_token`, `eos_token` and so on.
    pub special_tokens: BTreeMap<String, String>,
}

/// Whether a path has the extension of GGUF files.
pub(super) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The GGUF file that a path stands for: the file itself, or the only one in a directory without
/// safetensors files.
pub(super) fn find(path: &Path) -> Result<Option<PathBuf>, EngineError> {
    if path.is_file() && is_gguf(path) {
        return Ok(Some(path.to_owned()));
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(at(path))? {
        let file = entry.map_err(at(path))?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            return Ok(None);
        }
        if is_gguf(&file) {
            found.push(file);
        }
    }
    if found.len() > 1 {
        return Err(refuse(format!(
            "{} holds {} GGUF files; name the one to be served",
            path.display(),
            found.len()
        )));
    }
    Ok(found.pop())
}

/// Reads a file's metadata.
///
/// # Errors
/// If the file cannot be read, its model is of a family that is not supported, or it has no tokenizer
/// or chat template.
pub(super) fn read(path: &Path) -> Result<GgufModel, EngineError> {
    let file = GgufFile::open(path)?;
    let metadata = Metadata::new(&file);
    if metadata.whole("split.count")?.is_some_and(|count| count > 1) {
        let path = path.display();
        return Err(refuse(format!("{path} is a part of a model; merge its parts into one file")));
    }
    let config = config::from_metadata(&metadata)?;
    let tokens = GgufVocabulary::read(&metadata)?;
    Ok(GgufModel {
        config,
        stop_ids: tokens.stop_ids(&metadata)?,
        chat_template: metadata.required_text("tokenizer.chat_template")?.to_owned(),
        special_tokens: tokens.special(&metadata)?,
    })
}

/// The text of the `tokenizer.json` that a file stands for.
///
/// # Errors
/// If the file cannot be read or its tokenizer is of a kind that is not supported.
pub(super) fn tokenizer_json(path: &Path) -> Result<String, EngineError> {
    let file = GgufFile::open(path)?;
    let metadata = Metadata::new(&file);
    Ok(tokenizer::tokenizer_json(&metadata)?.to_string())
}

#[cfg(test)]
mod tests;
