//! Reads the files of a Hugging Face directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use hone_core::files::at;

use super::values::{Config, get, refuse, show};
use crate::error::EngineError;

/// Reads a text file.
pub(super) fn read(path: &Path) -> Result<String, EngineError> {
    Ok(fs::read_to_string(path).map_err(at(path))?)
}

/// Reads a JSON file.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, EngineError> {
    serde_json::from_str(&read(path)?).map_err(|e| EngineError::component(path.display(), e))
}

/// Reads a JSON file that contains an object.
pub(super) fn object(path: &Path) -> Result<Config, EngineError> {
    read_json(path)
}

/// Reads a JSON file that contains an object. A missing file is an empty object.
pub(super) fn optional_object(path: &Path) -> Result<Config, EngineError> {
    if path.is_file() { object(path) } else { Ok(Config::new()) }
}

/// Every `*_token` of `tokenizer_config.json` that is a string or an object with a `content`.
pub(super) fn special_tokens(config: &Config) -> BTreeMap<String, String> {
    let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
    let text = |value: &Value| value.get("content").unwrap_or(value).as_str().map(str::to_owned);
    tokens.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
}

/// The `eos_token_id` of a file: missing, one id, or a list.
fn eos_token_ids(file: &str, config: &Config) -> Result<Vec<u32>, EngineError> {
    let id = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            refuse(format!("{file}: eos_token_id is {}, not a token id", show(value)))
        })
    };
    match get(config, "eos_token_id") {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// The added tokens of `tokenizer.json`; the vocabulary is skipped.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

/// Tokens that end a completion, without duplicates: those of `generation_config.json`, then those
/// of `config.json`, then the tokenizer's `eos_token`.
pub(super) fn stop_ids(
    dir: &Path,
    config: &Config,
    special: &BTreeMap<String, String>,
) -> Result<Vec<u32>, EngineError> {
    let file = "generation_config.json";
    let mut found = eos_token_ids(file, &optional_object(&dir.join(file))?)?;
    found.extend(eos_token_ids("config.json", config)?);
    if let Some(eos) = special.get("eos_token") {
        let tokens: AddedTokens = read_json(&dir.join("tokenizer.json"))?;
        found.extend(tokens.added_tokens.iter().filter(|t| t.content == *eos).map(|t| t.id));
    }
    let vocab = get(config, "vocab_size").as_u64().unwrap_or(0);
    if let Some(id) = found.iter().find(|id| u64::from(**id) >= vocab) {
        let reason = format!("eos_token_id {id} is outside the vocabulary of {vocab} tokens");
        return Err(refuse(reason));
    }
    let mut seen = BTreeSet::new();
    found.retain(|id| seen.insert(*id));
    if found.is_empty() {
        return Err(refuse(format!(
            "{} names no token that ends a completion: there is no eos_token_id in \
             generation_config.json or config.json, and no eos_token in tokenizer_config.json",
            dir.display()
        )));
    }
    Ok(found)
}

/// The chat template of `chat_template.jinja`, else `tokenizer_config.json`, else
/// `chat_template.json`.
pub(super) fn chat_template(dir: &Path, tokenizer_config: &Config) -> Result<String, EngineError> {
    let jinja = dir.join("chat_template.jinja");
    if jinja.is_file() {
        return read(&jinja);
    }
    let mut text = template_text(tokenizer_config);
    if text.is_none() {
        text = template_text(&optional_object(&dir.join("chat_template.json"))?);
    }
    text.ok_or_else(|| {
        refuse(format!(
            "{} has no chat template: there is no chat_template.jinja, and no chat_template in \
             tokenizer_config.json or chat_template.json",
            dir.display()
        ))
    })
}

/// The `chat_template` of a file: a string, or a list of named templates of which `default` is used.
fn template_text(config: &Config) -> Option<String> {
    let text = match config.get("chat_template")? {
        Value::Array(list) => {
            list.iter().find(|entry| entry["name"] == "default")?.get("template")?
        }
        text => text,
    };
    text.as_str().map(str::to_owned)
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The safetensors files of the model: the single one, or those in the index. Adapters are ignored.
pub(super) fn weights(dir: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let single = dir.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = dir.join("model.safetensors.index.json");
    if !index.is_file() {
        return Err(refuse(format!(
            "{} has neither model.safetensors nor model.safetensors.index.json; other formats \
             must be converted to safetensors first",
            dir.display()
        )));
    }
    let index: Index = read_json(&index)?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    names.iter().map(|name| shard(dir, name)).collect()
}

/// The path of a shard. Its name is untrusted, so it must not leave the directory.
fn shard(dir: &Path, name: &str) -> Result<PathBuf, EngineError> {
    let is_file_name = Path::new(name).file_name().is_some_and(|file| file == name);
    if !is_file_name || !name.ends_with(".safetensors") {
        return Err(refuse(format!(
            "model.safetensors.index.json: weight_map names {name:?}, which is not a safetensors \
             file of this directory"
        )));
    }
    let path = dir.join(name);
    if !path.is_file() {
        return Err(refuse(format!("{} has no {name}, which its index names", dir.display())));
    }
    Ok(path)
}
