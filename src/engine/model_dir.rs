//! Reads a Hugging Face model directory as tools write it today, says in one sentence what cannot
//! be served, and writes the directory that mistral.rs accepts.
//!
//! Nothing here knows mistral.rs; the trainer reads its configuration and weights from here too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::EngineError;

mod files;
mod hub;
mod normalise;

use files::{object, show};

/// `architectures` that can be served and trained.
pub const SUPPORTED: &[&str] = &["Qwen2ForCausalLM"];

/// A Hugging Face directory that has been read and found servable.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// Where it is.
    pub path: PathBuf,
    /// The parsed `config.json`, transformers 5's `rope_parameters` folded to the top level and
    /// the architecture's defaults filled in.
    pub config: Value,
    /// Tokens that end a completion, from `generation_config.json` and `config.json`.
    pub stop_ids: Vec<u32>,
    /// The chat template's text.
    pub chat_template: String,
    /// Safetensors files, in order.
    pub weights: Vec<PathBuf>,
    /// `bos_token`, `eos_token` and their like, as chat templates may name them.
    pub special_tokens: BTreeMap<String, String>,
}

impl ModelDir {
    /// Reads a directory as Hugging Face tools write it.
    ///
    /// # Errors
    /// [`EngineError::Model`] with one sentence naming the file, the key and the value that cannot
    /// be served.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        if !path.is_dir() {
            return Err(refuse(format!("{} is not a directory", path.display())));
        }
        let mut config = object(&path.join("config.json"))?;
        check_architecture(&config)?;
        fold_rope(&mut config)?;
        fill_defaults(&mut config);
        check_values(&config)?;
        if !path.join("tokenizer.json").is_file() {
            return Err(refuse(format!("{} has no tokenizer.json", path.display())));
        }
        let tokenizer_config = path.join("tokenizer_config.json");
        let tokenizer_config =
            if tokenizer_config.is_file() { object(&tokenizer_config)? } else { Map::new() };
        let special_tokens = files::special_tokens(&tokenizer_config);
        let stop_ids = files::stop_ids(path, &config, &special_tokens)?;
        let chat_template = files::chat_template(path, &tokenizer_config)?;
        let weights = files::weights(path)?;
        Ok(Self {
            path: path.to_path_buf(),
            config: Value::Object(config),
            stop_ids,
            chat_template,
            weights,
            special_tokens,
        })
    }

    /// Turns what a user names into a directory: an existing path as it is, a hub id such as
    /// `Qwen/Qwen2.5-0.5B-Instruct` by fetching its files into `cache` (or finding them there).
    /// Blocks while it downloads.
    ///
    /// # Errors
    /// [`EngineError::Model`] if there is neither such a directory nor such a repository, or if
    /// the hub cannot be reached.
    pub fn resolve(model: &str, cache: &Path) -> Result<PathBuf, EngineError> {
        hub::resolve(model, cache)
    }

    /// Writes, once, a directory below `cache_dir` that mistral.rs loads: `config.json` with
    /// everything at the top level, the tokenizer, the stop tokens, and links to the weights
    /// (copies where the file system has no links). Returns its path.
    ///
    /// # Errors
    /// [`EngineError::Model`] if a file cannot be read or written.
    pub fn normalised(&self, cache_dir: &Path) -> Result<PathBuf, EngineError> {
        normalise::write(self, cache_dir)
    }

    /// Context length in tokens, prompt and completion together.
    pub fn context(&self) -> usize {
        self.integer("max_position_embeddings")
    }

    /// Logits per position.
    pub fn vocab(&self) -> usize {
        self.integer("vocab_size")
    }

    /// A positive whole number of `config.json`; [`Self::open`] has checked those it needs.
    fn integer(&self, key: &str) -> usize {
        self.config.get(key).and_then(Value::as_u64).map_or(0, |n| n as usize)
    }
}

/// A model that cannot be served, and why.
fn refuse(reason: String) -> EngineError {
    EngineError::Model(reason)
}

fn refuse_value(key: &str, value: &Value, wanted: &str) -> EngineError {
    refuse(format!("config.json: {key} is {}; {wanted}", show(value)))
}

fn check_architecture(config: &Map<String, Value>) -> Result<(), EngineError> {
    let value = config.get("architectures").unwrap_or(&Value::Null);
    let names: Vec<&str> =
        value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    match names.as_slice() {
        [name] if SUPPORTED.contains(name) => {}
        _ => {
            return Err(refuse_value(
                "architectures",
                value,
                &format!("supported is one of {}", SUPPORTED.join(", ")),
            ));
        }
    }
    match config.get("quantization_config") {
        None | Some(Value::Null) => Ok(()),
        Some(value) => Err(refuse_value(
            "quantization_config",
            value,
            "only unquantised weights can be trained on",
        )),
    }
}

/// transformers 5 writes `rope_parameters: {rope_type, rope_theta}`, earlier versions
/// `rope_theta` and `rope_scaling`. Afterwards there is a top-level `rope_theta` and no more.
fn fold_rope(config: &mut Map<String, Value>) -> Result<(), EngineError> {
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = config.remove(key) else { continue };
        let Value::Object(rope) = &value else {
            if value.is_null() {
                continue;
            }
            return Err(refuse_value(key, &value, "an object was expected"));
        };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        if kind.is_some_and(|kind| kind != "default") {
            return Err(refuse_value(
                &format!("{key}.rope_type"),
                kind.unwrap_or(&Value::Null),
                "only plain rotary embeddings (\"default\") can be served",
            ));
        }
        if let Some(theta) = rope.get("rope_theta") {
            config.insert("rope_theta".to_owned(), theta.clone());
        }
        if let Some(share) = rope.get("partial_rotary_factor") {
            config.insert("partial_rotary_factor".to_owned(), share.clone());
        }
    }
    match config.remove("partial_rotary_factor") {
        Some(share) if share.as_f64() != Some(1.0) && !share.is_null() => {
            Err(refuse_value("partial_rotary_factor", &share, "only 1.0 can be served"))
        }
        _ => Ok(()),
    }
}

/// Defaults of transformers' `Qwen2Config`, for files that leave them out.
fn fill_defaults(config: &mut Map<String, Value>) {
    let heads = config.get("num_attention_heads").cloned().unwrap_or(Value::Null);
    for (key, value) in [
        ("rope_theta", json!(10_000.0)),
        ("rms_norm_eps", json!(1e-6)),
        ("hidden_act", json!("silu")),
        ("max_position_embeddings", json!(32_768)),
        ("num_key_value_heads", heads),
        ("tie_word_embeddings", json!(false)),
        ("use_sliding_window", json!(false)),
    ] {
        let slot = config.entry(key).or_insert(Value::Null);
        if slot.is_null() {
            *slot = value;
        }
    }
}

fn check_values(config: &Map<String, Value>) -> Result<(), EngineError> {
    let get = |key: &str| config.get(key).unwrap_or(&Value::Null);
    let whole = |key: &str| {
        get(key)
            .as_u64()
            .filter(|n| (1..=u64::from(u32::MAX)).contains(n))
            .ok_or_else(|| refuse_value(key, get(key), "a positive whole number was expected"))
    };
    for key in ["vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"] {
        whole(key)?;
    }
    let (hidden, heads) = (whole("hidden_size")?, whole("num_attention_heads")?);
    if hidden % (2 * heads) != 0 {
        let wanted = format!("it must divide hidden_size {hidden} into even parts");
        return Err(refuse_value("num_attention_heads", get("num_attention_heads"), &wanted));
    }
    if heads % whole("num_key_value_heads")? != 0 {
        let wanted = format!("it must divide num_attention_heads {heads}");
        return Err(refuse_value("num_key_value_heads", get("num_key_value_heads"), &wanted));
    }
    if !get("head_dim").is_null() && get("head_dim").as_u64() != Some(hidden / heads) {
        let wanted = format!("hidden_size / num_attention_heads = {} was expected", hidden / heads);
        return Err(refuse_value("head_dim", get("head_dim"), &wanted));
    }
    for key in ["rope_theta", "rms_norm_eps"] {
        if !get(key).as_f64().is_some_and(|x| x.is_finite() && x > 0.0) {
            return Err(refuse_value(key, get(key), "a positive number was expected"));
        }
    }
    if get("hidden_act") != "silu" {
        return Err(refuse_value("hidden_act", get("hidden_act"), "only \"silu\" can be served"));
    }
    if !get("tie_word_embeddings").is_boolean() {
        return Err(refuse_value(
            "tie_word_embeddings",
            get("tie_word_embeddings"),
            "true or false was expected",
        ));
    }
    check_attention(config)
}

/// Sliding windows are served by neither the engine nor the trainer.
fn check_attention(config: &Map<String, Value>) -> Result<(), EngineError> {
    let sliding = config.get("use_sliding_window").unwrap_or(&Value::Null);
    if *sliding != Value::Bool(false) {
        return Err(refuse_value("use_sliding_window", sliding, "only false can be served"));
    }
    let layers = config.get("layer_types").and_then(Value::as_array);
    match layers.into_iter().flatten().find(|kind| *kind != "full_attention") {
        Some(kind) => {
            Err(refuse_value("layer_types", kind, "only \"full_attention\" can be served"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
