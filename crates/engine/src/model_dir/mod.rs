//! Reads a Hugging Face model directory or a GGUF file, refuses models that cannot be served with one
//! sentence, and writes the directory that mistral.rs accepts.
//!
//! The module does not depend on mistral.rs. The trainer uses it, too.

mod family;
mod gguf;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use hone_core::digest::{Digest, hex};
use hone_core::files::{FileError, at, remove_any, sync_dir, sync_parent, write_synced};

use crate::error::EngineError;
use family::EngineFamily;
use gguf::GgufModel;
use values::{Config, get, refuse, refuse_value, show};

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
        let config = checked(object(&path.join("config.json"))?)?;
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
            weights: weights(path)?,
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
        read(&self.path.join("config.json"))
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
        if self.is_gguf() { gguf::tokenizer_json(&file) } else { read(&file) }
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
    unify_rope(&mut config)?;
    family.fill_defaults(&mut config);
    check_config(&config)?;
    family.check(&config)?;
    Ok(config)
}

// Unifies and checks the values of `config.json` that all families share.

/// Rewrites rotary parameters into the form of transformers 4: `rope_theta` and
/// `partial_rotary_factor` at the top level, and a `rope_scaling` with a `rope_type` only if
/// positions are scaled. Transformers 5 writes all of them into `rope_parameters`.
fn unify_rope(config: &mut Config) -> Result<(), EngineError> {
    let mut scaling = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let mut rope = match config.remove(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Object(rope)) => rope,
            Some(value) => return Err(refuse_value(key, &value, "an object was expected")),
        };
        if rope.values().any(Value::is_object) {
            let expected = "only one set of rotary parameters for all layers can be served";
            return Err(refuse_value(key, &Value::Object(rope), expected));
        }
        for name in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = rope.remove(name) {
                config.insert(name.to_owned(), value);
            }
        }
        let (old, new) = (rope.remove("type"), rope.remove("rope_type"));
        if let Some(kind) = new.or(old)
            && kind != "default"
            && scaling.is_none()
        {
            rope.insert("rope_type".to_owned(), kind);
            scaling = Some(Value::Object(rope));
        }
    }
    if let Some(scaling) = scaling {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    Ok(())
}

/// Checks types and ranges, after defaults are filled in.
fn check_config(config: &Config) -> Result<(), EngineError> {
    let refuse = |key: &str, expected: &str| refuse_value(key, get(config, key), expected);
    let positive = |key: &str| {
        let number = get(config, key).as_u64().filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        number.ok_or_else(|| refuse(key, "a positive whole number was expected"))
    };
    for key in ["vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"] {
        positive(key)?;
    }
    let (hidden, heads) = (positive("hidden_size")?, positive("num_attention_heads")?);
    let head_dim = get(config, "head_dim");
    if !head_dim.is_null() && !head_dim.as_u64().is_some_and(|n| n > 0 && n.is_multiple_of(2)) {
        return Err(refuse("head_dim", "an even whole number was expected"));
    }
    if head_dim.is_null() && hidden % (2 * heads) != 0 {
        let expected = format!("it must divide hidden_size {hidden} into even parts");
        return Err(refuse("num_attention_heads", &expected));
    }
    if heads % positive("num_key_value_heads")? != 0 {
        let expected = format!("it must divide num_attention_heads {heads}");
        return Err(refuse("num_key_value_heads", &expected));
    }
    for key in ["rope_theta", "rms_norm_eps"] {
        if !get(config, key).as_f64().is_some_and(|x| x.is_finite() && x > 0.0) {
            return Err(refuse(key, "a positive number was expected"));
        }
    }
    if !get(config, "tie_word_embeddings").is_boolean() {
        return Err(refuse("tie_word_embeddings", "true or false was expected"));
    }
    Ok(())
}

// Reads the files of a Hugging Face directory.

/// Reads a text file.
fn read(path: &Path) -> Result<String, EngineError> {
    Ok(fs::read_to_string(path).map_err(at(path))?)
}

/// Reads a JSON file.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, EngineError> {
    serde_json::from_str(&read(path)?).map_err(|e| EngineError::component(path.display(), e))
}

/// Reads a JSON file that contains an object.
fn object(path: &Path) -> Result<Config, EngineError> {
    read_json(path)
}

/// Reads a JSON file that contains an object. A missing file is an empty object.
fn optional_object(path: &Path) -> Result<Config, EngineError> {
    if path.is_file() { object(path) } else { Ok(Config::new()) }
}

/// Every `*_token` of `tokenizer_config.json` that is a string or an object with a `content`.
fn special_tokens(config: &Config) -> BTreeMap<String, String> {
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
fn stop_ids(
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
fn chat_template(dir: &Path, tokenizer_config: &Config) -> Result<String, EngineError> {
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
fn weights(dir: &Path) -> Result<Vec<PathBuf>, EngineError> {
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

// Writes the directory that mistral.rs accepts.
//
// mistralrs-core 0.8.1 needs one, because
//
// - it reads `rope_theta` at the top level only, and other keys in forms of its own (`family.rs`);
// - it applies a `sliding_window` even if `use_sliding_window` is false;
// - it reads end-of-sequence ids from `generation_config.json` only;
// - its key-value cache grows by 512 positions and fails above `max_position_embeddings`;
// - a chat template enables its parsers of thinking tags. Hone renders templates itself.

impl ModelDir {
    /// Writes a directory below `cache_dir` that mistral.rs loads, unless it exists, and returns
    /// its path. It contains a `config.json` with all keys at the top level, the tokenizer, the
    /// stop tokens, and links to the weights (copies if the file system has no links).
    ///
    /// # Errors
    /// [`EngineError::Component`] if a file cannot be read or written, or [`EngineError::Model`] for a
    /// GGUF file, which mistral.rs cannot serve with adapters.
    pub fn write_normalized(&self, cache_dir: &Path) -> Result<PathBuf, EngineError> {
        if self.is_gguf() {
            let path = self.path.display();
            let reason =
                "mistral.rs cannot serve it with adapters: set engine.backend = \"native\"";
            return Err(refuse(format!("{path} is a GGUF file; {reason}")));
        }
        let texts = texts(self)?;
        let target = cache_dir.join(directory_name(self, &texts)?);
        if target.is_dir() {
            return Ok(target);
        }
        // Several processes may write the same directory, so each has its own temporary one.
        let name = format!(".normalize-{}", uuid::Uuid::now_v7().simple());
        let temporary = cache_dir.join(name);
        fs::create_dir_all(&temporary).map_err(at(&temporary))?;
        for (name, text) in &texts {
            write_synced(&temporary.join(name), text.as_bytes())?;
        }
        for source in &self.weights {
            let name = source.file_name().unwrap_or_default();
            link(source, &temporary.join(name)).map_err(at(source))?;
        }
        sync_dir(&temporary)?;
        match fs::rename(&temporary, &target) {
            Ok(()) => sync_parent(&target)?,
            // Another process was faster. A directory of the same name has the same content.
            Err(_) if target.is_dir() => remove_any(&temporary)?,
            Err(error) => return Err(at(&target)(error).into()),
        }
        Ok(target)
    }
}

/// The small files: name and text.
fn texts(model: &ModelDir) -> Result<Vec<(&'static str, String)>, EngineError> {
    let config = match model.config.as_object() {
        Some(config) => EngineFamily::of(config)?.for_engine(config),
        None => return Err(refuse("config.json is not an object".to_owned())),
    };
    let tokenizer = model.tokenizer_json()?;
    Ok(vec![
        ("config.json", Value::Object(config).to_string()),
        ("generation_config.json", json!({ "eos_token_id": model.stop_ids }).to_string()),
        ("tokenizer_config.json", json!({ "chat_template": "" }).to_string()),
        ("tokenizer.json", lean_tokenizer(tokenizer)),
    ])
}

/// Removes everything from a `tokenizer.json` except its tokens. Text that is not a tokenizer is
/// returned unchanged.
///
/// Hone encodes prompts itself. mistral.rs would parse the tokenizer, compile its expressions and
/// index its merges once per replica and policy version.
fn lean_tokenizer(text: String) -> String {
    let Ok(mut tokenizer) = serde_json::from_str::<Value>(&text) else { return text };
    let Some(parts) = tokenizer.as_object_mut() else { return text };
    for part in ["normalizer", "pre_tokenizer", "post_processor"] {
        parts.insert(part.to_owned(), Value::Null);
    }
    if let Some(merges) = parts.get_mut("model").and_then(|model| model.get_mut("merges")) {
        *merges = json!([]);
    }
    tokenizer.to_string()
}

/// The model's name and a digest of everything from which the directory is made.
fn directory_name(model: &ModelDir, texts: &[(&'static str, String)]) -> Result<String, FileError> {
    let mut digest = Digest::new();
    for (name, text) in texts {
        digest = digest.bytes(name).bytes(text);
    }
    for path in &model.weights {
        let describe = || {
            let real = path.canonicalize()?;
            let meta = fs::metadata(&real)?;
            io::Result::Ok(format!("{real:?} {} {:?}", meta.len(), meta.modified()?))
        };
        digest = digest.bytes(describe().map_err(at(path))?);
    }
    let name = model.path.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!("{name}-{}", hex(&digest.prefix::<8>())))
}

/// Makes a symbolic link, else a hard link, else a copy.
fn link(source: &Path, target: &Path) -> io::Result<()> {
    let real = source.canonicalize()?;
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(&real, target);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(&real, target);
    linked.or_else(|_| fs::hard_link(&real, target)).or_else(|_| {
        fs::copy(&real, target)?;
        File::open(target)?.sync_all()
    })
}

#[cfg(test)]
mod tests;
