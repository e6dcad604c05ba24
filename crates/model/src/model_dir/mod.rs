//! Reads a Hugging Face model directory or a GGUF file, and refuses models that Hone cannot compute with one
//! sentence.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use hone_core::files::at;
use hone_core::text::shortened;

use crate::gguf::{self, GgufFile, GgufVocabulary, is_gguf};
use crate::{ModelError, ModelSpec, Result};

/// Longest excerpt of a value in an error, in characters.
const MAX_SHOWN: usize = 60;

/// A Hugging Face directory or a GGUF file that was read and can be used.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// The directory, or the GGUF file.
    pub path: PathBuf,
    /// The model's name: that of the directory or the file, unless the caller changes it.
    pub name: String,
    /// The parsed `config.json`, or its equivalent from a GGUF file, of which [`ModelSpec::from_config`] makes a
    /// specification.
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
    /// One sentence that names the file, and the key and the value that cannot be used.
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(file) = find_gguf(path)? {
            return Self::open_gguf(&file);
        }
        if !path.is_dir() {
            return Err(refuse(format!("{} is not a directory or a GGUF file", path.display())));
        }
        let config = object(&path.join("config.json"))?;
        ModelSpec::context(&config)?;
        if !path.join("tokenizer.json").is_file() {
            return Err(refuse(format!("{} has no tokenizer.json", path.display())));
        }
        let tokenizer_config = optional_object(&path.join("tokenizer_config.json"))?;
        let special_tokens = special_tokens(&tokenizer_config);
        Ok(Self {
            path: path.to_path_buf(),
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            stop_ids: stop_ids(path, &config, &special_tokens)?,
            chat_template: chat_template(path, &tokenizer_config)?,
            weights: weight_files(path)?,
            config,
            special_tokens,
        })
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        if file.whole("split.count")?.is_some_and(|count| count > 1) {
            return Err(refuse(format!(
                "{} is a part of a model; merge its parts into one file",
                path.display()
            )));
        }
        let config = gguf::config_json(&file)?;
        ModelSpec::context(&config)?;
        let tokens = GgufVocabulary::read(&file)?;
        Ok(Self {
            path: path.to_path_buf(),
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            config,
            stop_ids: tokens.stop_ids()?,
            chat_template: file.required("tokenizer.chat_template", GgufFile::text)?.to_owned(),
            weights: vec![path.to_path_buf()],
            special_tokens: tokens.special()?,
        })
    }

    /// Whether the model is a GGUF file. Hone's native engine can serve it, mistral.rs cannot: its
    /// policy versions are merged safetensors files.
    pub fn is_gguf(&self) -> bool {
        self.weights.iter().any(|file| is_gguf(file))
    }

    /// The text of `config.json`, or its equivalent from a GGUF file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn config_json(&self) -> Result<String> {
        if self.is_gguf() {
            Ok(self.config.to_string())
        } else {
            read(&self.path.join("config.json"))
        }
    }

    /// The file that the tokenizer is read from.
    pub fn tokenizer_file(&self) -> PathBuf {
        if self.is_gguf() { self.path.clone() } else { self.path.join("tokenizer.json") }
    }

    /// The text of `tokenizer.json`, or its equivalent from a GGUF file.
    ///
    /// # Errors
    /// If the file cannot be read, or a GGUF file has a tokenizer of a kind that is not supported.
    pub fn tokenizer_json(&self) -> Result<String> {
        let path = self.tokenizer_file();
        if self.is_gguf() {
            Ok(gguf::tokenizer_json(&GgufFile::open(&path)?)?.to_string())
        } else {
            read(&path)
        }
    }

    /// Context length in tokens, prompt and completion together, for Hone's own computation.
    pub fn context(&self) -> usize {
        ModelSpec::context(&self.config).unwrap_or(0)
    }

    /// Logits per position.
    pub fn vocab(&self) -> usize {
        self.config.get("vocab_size").and_then(Value::as_u64).map_or(0, |n| n as usize)
    }
}

/// The GGUF file that a path stands for: the file itself, or the only one in a directory without
/// safetensors files.
fn find_gguf(path: &Path) -> Result<Option<PathBuf>> {
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
        let (path, count) = (path.display(), found.len());
        return Err(refuse(format!("{path} holds {count} GGUF files; name the one to be served")));
    }
    Ok(found.pop())
}

// Reads the files of a Hugging Face directory.

fn refuse(reason: String) -> ModelError {
    ModelError::Unsupported(reason)
}

fn read(path: &Path) -> Result<String> {
    Ok(fs::read_to_string(path).map_err(at(path))?)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    Ok(serde_json::from_str(&read(path)?).map_err(|error| at(path)(error.into()))?)
}

/// Reads a JSON file that contains an object.
fn object(path: &Path) -> Result<Value> {
    read_json(path).map(Value::Object)
}

/// Reads a JSON file that contains an object. A missing file is an empty object.
fn optional_object(path: &Path) -> Result<Value> {
    if path.is_file() { object(path) } else { Ok(Value::Object(Map::new())) }
}

/// Every `*_token` of `tokenizer_config.json` that is a string or an object with a `content`.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let tokens = config.as_object().into_iter().flatten();
    let tokens = tokens.filter(|(key, _)| key.ends_with("_token"));
    let text = |value: &Value| value.get("content").unwrap_or(value).as_str().map(str::to_owned);
    tokens.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
}

/// The `eos_token_id` of a file: missing, one id, or a list.
fn eos_token_ids(file: &str, config: &Value) -> Result<Vec<u32>> {
    let id = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            let text = value.to_string();
            let shown = shortened(&text, MAX_SHOWN);
            refuse(format!("{file}: eos_token_id is {shown}, not a token id"))
        })
    };
    match &config["eos_token_id"] {
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
fn stop_ids(dir: &Path, config: &Value, special: &BTreeMap<String, String>) -> Result<Vec<u32>> {
    let file = "generation_config.json";
    let mut found = eos_token_ids(file, &optional_object(&dir.join(file))?)?;
    found.extend(eos_token_ids("config.json", config)?);
    if let Some(eos) = special.get("eos_token") {
        let tokens: AddedTokens = read_json(&dir.join("tokenizer.json"))?;
        found.extend(tokens.added_tokens.iter().filter(|t| t.content == *eos).map(|t| t.id));
    }
    let vocab = config["vocab_size"].as_u64().unwrap_or(0);
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
fn chat_template(dir: &Path, tokenizer_config: &Value) -> Result<String> {
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
fn template_text(config: &Value) -> Option<String> {
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
pub(crate) fn weight_files(dir: &Path) -> Result<Vec<PathBuf>> {
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
fn shard(dir: &Path, name: &str) -> Result<PathBuf> {
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

#[cfg(test)]
mod tests;
