//! Reads a Hugging Face model directory as tools write it today, says in one sentence what cannot
//! be served, and writes the directory that mistral.rs accepts.
//!
//! Nothing here knows mistral.rs; the trainer reads its configuration and weights from here too.

mod family;
mod files;
mod hub;
mod normalise;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use family::{EngineFamily, FAMILIES};
use files::{object, show};
use serde_json::{Map, Value};

use super::EngineError;

/// A Hugging Face directory that has been read and found servable.
#[derive(Clone, Debug)]
pub struct ModelDir {
    /// Where it is.
    pub path: PathBuf,
    /// What the model is called; the directory's name unless somebody says otherwise.
    pub name: String,
    /// The parsed `config.json`, transformers 5's `rope_parameters` folded into the `rope_theta`,
    /// `partial_rotary_factor` and `rope_scaling` of earlier versions, and the architecture's
    /// defaults filled in.
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
        let family = family(&config)?;
        fold_rope(&mut config)?;
        family.fill_defaults(&mut config);
        check_values(&config)?;
        family.check(&config)?;
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
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
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

    /// Context length in tokens, prompt and completion together: as far as what is served equals
    /// what the model computes elsewhere (a sliding window ends it, for one).
    pub fn context(&self) -> usize {
        let config = self.config.as_object();
        config.and_then(|c| Some(family(c).ok()?.context(c) as usize)).unwrap_or(0)
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

/// The family that `architectures` names.
fn family(config: &Map<String, Value>) -> Result<EngineFamily, EngineError> {
    let value = config.get("architectures").unwrap_or(&Value::Null);
    let names: Vec<&str> =
        value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let found = match names.as_slice() {
        [name] => EngineFamily::of(name),
        _ => None,
    };
    let Some(family) = found else {
        let wanted =
            format!("supported is one of {}", FAMILIES.map(|family| family.class).join(", "));
        return Err(refuse_value("architectures", value, &wanted));
    };
    match config.get("quantization_config") {
        None | Some(Value::Null) => Ok(family),
        Some(value) => Err(refuse_value(
            "quantization_config",
            value,
            "only unquantised weights can be trained on",
        )),
    }
}

/// transformers 5 writes everything into `rope_parameters`, earlier versions `rope_theta`,
/// `partial_rotary_factor` and `rope_scaling` beside each other. Afterwards it is as in the earlier
/// ones, and there is a `rope_scaling` with a `rope_type` only where something is scaled.
fn fold_rope(config: &mut Map<String, Value>) -> Result<(), EngineError> {
    let mut scaling = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let mut rope = match config.remove(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Object(rope)) => rope,
            Some(value) => return Err(refuse_value(key, &value, "an object was expected")),
        };
        if rope.values().any(Value::is_object) {
            let wanted = "only one set of rotary parameters for all layers can be served";
            return Err(refuse_value(key, &Value::Object(rope), wanted));
        }
        for name in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = rope.remove(name) {
                config.insert(name.to_owned(), value);
            }
        }
        let (old, new) = (rope.remove("type"), rope.remove("rope_type"));
        match new.or(old) {
            Some(kind) if kind != "default" && scaling.is_none() => {
                rope.insert("rope_type".to_owned(), kind);
                scaling = Some(Value::Object(rope));
            }
            _ => {}
        }
    }
    if let Some(scaling) = scaling {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    Ok(())
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
    let head_dim = get("head_dim");
    if !head_dim.is_null() && !head_dim.as_u64().is_some_and(|n| n > 0 && n.is_multiple_of(2)) {
        return Err(refuse_value("head_dim", head_dim, "an even whole number was expected"));
    }
    if head_dim.is_null() && hidden % (2 * heads) != 0 {
        let wanted = format!("it must divide hidden_size {hidden} into even parts");
        return Err(refuse_value("num_attention_heads", get("num_attention_heads"), &wanted));
    }
    if heads % whole("num_key_value_heads")? != 0 {
        let wanted = format!("it must divide num_attention_heads {heads}");
        return Err(refuse_value("num_key_value_heads", get("num_key_value_heads"), &wanted));
    }
    for key in ["rope_theta", "rms_norm_eps"] {
        if !get(key).as_f64().is_some_and(|x| x.is_finite() && x > 0.0) {
            return Err(refuse_value(key, get(key), "a positive number was expected"));
        }
    }
    if !get("tie_word_embeddings").is_boolean() {
        return Err(refuse_value(
            "tie_word_embeddings",
            get("tie_word_embeddings"),
            "true or false was expected",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
