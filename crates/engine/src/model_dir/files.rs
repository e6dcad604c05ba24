//! The files of a Hugging Face directory, read one by one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::refuse;
use crate::EngineError;

/// At most this much of a value is shown in an error.
const SHOWN: usize = 60;

/// A value for a sentence, cut where it is long.
pub(super) fn show(value: &Value) -> String {
    match value {
        Value::Null => "missing".to_owned(),
        value => {
            let text = value.to_string();
            match text.char_indices().nth(SHOWN) {
                Some((at, _)) => format!("{}…", text.get(..at).unwrap_or_default()),
                None => text,
            }
        }
    }
}

/// Reads a text file.
pub(super) fn read(path: &Path) -> Result<String, EngineError> {
    fs::read_to_string(path).map_err(|e| refuse(format!("{}: {e}", path.display())))
}

/// Reads a JSON file.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, EngineError> {
    serde_json::from_str(&read(path)?)
        .map_err(|e| refuse(format!("{} is not what it should be: {e}", path.display())))
}

/// Reads a JSON file that holds an object.
pub(super) fn object(path: &Path) -> Result<Map<String, Value>, EngineError> {
    read_json(path)
}

/// Every string-valued `*_token` of `tokenizer_config.json`, in either of its two spellings.
pub(super) fn special_tokens(config: &Map<String, Value>) -> BTreeMap<String, String> {
    let text = |value: &Value| {
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        text.map(str::to_owned)
    };
    config
        .iter()
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| Some((key.clone(), text(value)?)))
        .collect()
}

/// One id or several, as `eos_token_id` has it.
fn ids(file: &str, value: Option<&Value>) -> Result<Vec<u32>, EngineError> {
    let one = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            refuse(format!("{file}: eos_token_id holds {}, not a token id", show(value)))
        })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// The part of `tokenizer.json` that lists special tokens; the vocabulary is skipped.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

/// Tokens that end a completion: of `generation_config.json`, then `config.json`, then the
/// tokenizer's `eos_token`, each once.
pub(super) fn stop_ids(
    dir: &Path,
    config: &Map<String, Value>,
    special: &BTreeMap<String, String>,
) -> Result<Vec<u32>, EngineError> {
    let generation = dir.join("generation_config.json");
    let mut found = Vec::new();
    if generation.is_file() {
        found = ids("generation_config.json", object(&generation)?.get("eos_token_id"))?;
    }
    found.extend(ids("config.json", config.get("eos_token_id"))?);
    if let Some(eos) = special.get("eos_token") {
        let tokens: AddedTokens = read_json(&dir.join("tokenizer.json"))?;
        found.extend(tokens.added_tokens.iter().filter(|t| t.content == *eos).map(|t| t.id));
    }
    let mut unique = Vec::new();
    let vocab = config.get("vocab_size").and_then(Value::as_u64).unwrap_or(0);
    for id in found {
        if u64::from(id) >= vocab {
            return Err(refuse(format!(
                "eos_token_id {id} is outside the vocabulary of {vocab} tokens"
            )));
        }
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    if unique.is_empty() {
        return Err(refuse(format!(
            "{} names no token that ends a completion: eos_token_id is in neither \
             generation_config.json nor config.json, nor an eos_token in tokenizer_config.json",
            dir.display()
        )));
    }
    Ok(unique)
}

/// `chat_template.jinja`, else the one in `tokenizer_config.json`, else `chat_template.json`.
pub(super) fn chat_template(
    dir: &Path,
    tokenizer_config: &Map<String, Value>,
) -> Result<String, EngineError> {
    let jinja = dir.join("chat_template.jinja");
    if jinja.is_file() {
        return read(&jinja);
    }
    if let Some(text) = template_text(tokenizer_config.get("chat_template")) {
        return Ok(text);
    }
    let json = dir.join("chat_template.json");
    if json.is_file()
        && let Some(text) = template_text(object(&json)?.get("chat_template"))
    {
        return Ok(text);
    }
    Err(refuse(format!(
        "{} has no chat template: there is no chat_template.jinja, nor chat_template in \
         tokenizer_config.json or chat_template.json",
        dir.display()
    )))
}

/// A template is a string, or a list of named ones of which `default` is taken.
fn template_text(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let named = list.iter().find(|entry| entry.get("name") == Some(&"default".into()));
            named?.get("template")?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The safetensors files of the model: the one, or those the index names. Never an adapter's.
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
    let mut names: Vec<&String> = index.weight_map.values().collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| shard(dir, name)).collect()
}

/// One shard; its name comes from a file that strangers write, so it must stay in the directory.
fn shard(dir: &Path, name: &str) -> Result<PathBuf, EngineError> {
    let plain = Path::new(name).file_name().is_some_and(|file| file == name);
    if !plain || !name.ends_with(".safetensors") {
        return Err(refuse(format!(
            "model.safetensors.index.json: weight_map names {name:?}, which is not a safetensors \
             file of this directory"
        )));
    }
    let path = dir.join(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(refuse(format!("{} has no {name}, which its index names", dir.display())))
    }
}
