//! GGUF files as model directories: the contents of `config.json` and `tokenizer.json` from a file's
//! metadata.
//!
//! The conversion undoes that of llama.cpp (`convert_hf_to_gguf.py`); what the file does not hold, such as
//! the layers of SmolLM3 without rotary embedding, is what llama.cpp itself assumes.

mod metadata;
mod tokenizer;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use hone_core::files::at;
use hone_core::gguf::GgufFile;

use super::values::{Config, get, refuse};
use crate::error::EngineError;
use metadata::{Metadata, decimal};
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
    let config = config_from_metadata(&metadata)?;
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

// `config.json` from the metadata of a GGUF file.

/// llama.cpp's name of an architecture, and transformers' names.
const ARCHITECTURES: [(&str, &str, &str); 6] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
    ("gemma2", "gemma2", "Gemma2ForCausalLM"),
    ("phi3", "phi3", "Phi3ForCausalLM"),
    ("smollm3", "smollm3", "SmolLM3ForCausalLM"),
];

/// Layers of the one Gemma 2 whose attention scores are scaled by its hidden size (27B).
const GEMMA2_27B_LAYERS: u64 = 46;

/// The contents of `config.json`, as transformers 4 writes them.
///
/// # Errors
/// If a key is missing or wrong, or the architecture is not supported.
fn config_from_metadata(metadata: &Metadata<'_>) -> Result<Config, EngineError> {
    let name = metadata.required_text("general.architecture")?;
    let Some((arch, model_type, class)) = ARCHITECTURES.iter().find(|known| known.0 == name) else {
        let known = ARCHITECTURES.map(|known| known.0).join(", ");
        let reason = format!("general.architecture is {name:?}; supported is one of {known}");
        return Err(metadata.refuse(&reason));
    };
    let key = |name: &str| format!("{arch}.{name}");
    let whole = |name: &str| metadata.required_whole(&key(name));
    let (hidden, heads) = (whole("embedding_length")?, whole("attention.head_count")?.max(1));
    let head_dim = metadata.whole(&key("attention.key_length"))?.unwrap_or(hidden / heads);
    let embedding = metadata.file.tensors().get("token_embd.weight");
    let vocab = embedding.and_then(|tensor| tensor.shape.first()).copied();
    let vocab = vocab.ok_or_else(|| metadata.refuse("there is no tensor token_embd.weight"))?;
    let layers = whole("block_count")?;
    let tied = !metadata.has_tensor("output.weight");
    let (mut model_type, mut class) = (*model_type, *class);
    if *arch == "llama" && head_dim != hidden / heads {
        // llama.cpp has one architecture for both, and only Mistral has such heads.
        (model_type, class) = ("mistral", "MistralForCausalLM");
    }
    let mut config = object(json!({
        "architectures": [class],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(&key("attention.head_count_kv"))?.unwrap_or(heads),
        "max_position_embeddings": whole("context_length")?,
        "rms_norm_eps": metadata.required_number(&key("attention.layer_norm_rms_epsilon"))?,
        "rope_theta": metadata.number(&key("rope.freq_base"))?.unwrap_or(10_000.0),
        "tie_word_embeddings": tied,
        "sliding_window": null,
    }));
    let mut put = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
    if head_dim != hidden / heads || matches!(*arch, "qwen3" | "gemma2") {
        put("head_dim", json!(head_dim));
    }
    if metadata.has_tensor("blk.0.attn_q.bias") && *arch != "qwen2" {
        put("attention_bias", json!(true));
    }
    if metadata.has_tensor("blk.0.ffn_down.bias") {
        put("mlp_bias", json!(true));
    }
    match *arch {
        "gemma2" => {
            let score = if layers == GEMMA2_27B_LAYERS { hidden / heads } else { head_dim };
            put("query_pre_attn_scalar", json!(score));
            put("hidden_activation", json!("gelu_pytorch_tanh"));
            for (own, key) in [
                ("attn_logit_softcapping", "gemma2.attn_logit_softcapping"),
                ("final_logit_softcapping", "gemma2.final_logit_softcapping"),
            ] {
                put(own, json!(metadata.number(key)?));
            }
            put("sliding_window", json!(metadata.whole("gemma2.attention.sliding_window")?));
        }
        "phi3" => {
            let window = metadata.whole("phi3.attention.sliding_window")?.filter(|n| *n > 0);
            put("sliding_window", json!(window));
        }
        _ => {}
    }
    let rotary = metadata.whole(&key("rope.dimension_count"))?.unwrap_or(head_dim);
    if rotary != head_dim {
        put("partial_rotary_factor", json!(rotary as f64 / head_dim as f64));
    }
    add_scaling(metadata, arch, head_dim, &mut config)?;
    Ok(config)
}

fn object(value: Value) -> Config {
    if let Value::Object(object) = value { object } else { Config::new() }
}

// Rotary scaling from the metadata and the tensors of a GGUF file.

/// The divisors of Llama 3's scaling in all published models: low and high frequencies are those whose
/// wavelength is above or below the original context divided by these.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;

/// Largest relative difference between a stored factor and the one of recovered parameters.
const TOLERANCE: f64 = 1e-4;

/// Adds `rope_scaling` to `config` if the file scales positions.
///
/// # Errors
/// If a value is wrong, or the factors are not those of a scaling that `config.json` can state.
fn add_scaling(
    metadata: &Metadata<'_>,
    arch: &str,
    head_dim: u64,
    config: &mut Config,
) -> Result<(), EngineError> {
    let key = |name: &str| format!("{arch}.rope.scaling.{name}");
    let original = metadata.whole(&key("original_context_length"))?;
    let mut put = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
    if let Some(short) = metadata.vector("rope_factors_short.weight")? {
        let long = metadata.vector("rope_factors_long.weight")?.unwrap_or_default();
        let decimals = |factors: Vec<f32>| factors.into_iter().map(decimal).collect::<Vec<_>>();
        put(
            "rope_scaling",
            json!({
                "rope_type": "longrope",
                "short_factor": decimals(short),
                "long_factor": decimals(long),
            }),
        );
        if let Some(original) = original {
            put("original_max_position_embeddings", json!(original));
        }
        return Ok(());
    }
    if let Some(factors) = metadata.vector("rope_freqs.weight")? {
        let theta = get(config, "rope_theta").as_f64().unwrap_or(10_000.0);
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(());
        }
        let found = llama3(&factors, theta, head_dim as f64).ok_or_else(|| {
            metadata.refuse("rope_freqs.weight has factors of another scaling than Llama 3's")
        })?;
        config.insert("rope_scaling".to_owned(), found);
        return Ok(());
    }
    match metadata.text(&key("type"))? {
        None | Some("none") => {}
        Some(kind) => {
            let factor = metadata.number(&key("factor"))?;
            put("rope_scaling", json!({ "rope_type": kind, "factor": factor }));
        }
    }
    Ok(())
}

/// The factor of the frequency with this wavelength, in tokens.
fn llama3_factor(wavelength: f64, factor: f64, original: f64) -> f64 {
    if wavelength < original / HIGH {
        1.0
    } else if wavelength > original / LOW {
        factor
    } else {
        let smooth = (original / wavelength - LOW) / (HIGH - LOW);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

/// The `rope_scaling` whose factors these are. The file has no other trace of it: the largest factor is
/// that of low frequencies, and the original context is the power of two that gives all the others.
fn llama3(factors: &[f32], theta: f64, head_dim: f64) -> Option<Value> {
    let largest = decimal(factors.iter().copied().fold(1.0, f32::max));
    let fits = |original: f64| {
        factors.iter().enumerate().all(|(i, stored)| {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head_dim);
            let expected = llama3_factor(wavelength, largest, original);
            (f64::from(*stored) - expected).abs() <= TOLERANCE * expected
        })
    };
    let original = (4..24).map(|power| 1_u64 << power).find(|original| fits(*original as f64))?;
    Some(json!({
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }))
}

#[cfg(test)]
mod tests;
