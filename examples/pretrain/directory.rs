//! The directory of a model.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Var};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::training::INITIAL_DEVIATION;
use super::vocabulary::id_of;
use super::{END, END_OF_TEXT, say};

/// What distinguishes one model from another.
pub struct Shape {
    /// Number of decoder layers.
    pub layers: usize,
    /// The chat template.
    pub template: &'static str,
    /// The type of stored weights.
    pub dtype: DType,
}

/// The model's `config.json`: a small Qwen2 decoder.
///
/// # Errors
///
/// The tokenizer lacks a special token.
pub fn config(tokenizer: &Tokenizer, shape: &Shape) -> Result<Value> {
    Ok(json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": tokenizer.get_vocab_size(true),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": INITIAL_DEVIATION,
        "use_cache": true,
        "use_sliding_window": false,
        "sliding_window": null,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": false,
        "torch_dtype": if shape.dtype == DType::F32 { "float32" } else { "bfloat16" },
        "bos_token_id": null,
        "eos_token_id": id_of(tokenizer, END)?,
        "pad_token_id": id_of(tokenizer, END_OF_TEXT)?,
    }))
}

/// Writes everything.
///
/// # Errors
///
/// A file that cannot be written, with its path.
pub fn write(
    dir: &Path,
    tokenizer: &Tokenizer,
    config: &Value,
    shape: &Shape,
    weights: &BTreeMap<String, Var>,
) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let (pad, end) = (id_of(tokenizer, END_OF_TEXT)?, id_of(tokenizer, END)?);
    write_json(&dir.join("config.json"), config)?;
    write_json(
        &dir.join("generation_config.json"),
        &json!({ "do_sample": true, "eos_token_id": [end, pad], "pad_token_id": pad }),
    )?;
    write_json(
        &dir.join("tokenizer_config.json"),
        &json!({
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": config["max_position_embeddings"],
            "add_prefix_space": false,
            "clean_up_tokenization_spaces": false,
            "bos_token": null,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "unk_token": null,
            "chat_template": shape.template,
        }),
    )?;
    tokenizer.save(dir.join("tokenizer.json"), true).map_err(|e| anyhow!("tokenizer: {e}"))?;
    let stored = |(name, var): (&String, &Var)| Ok((name.clone(), var.to_dtype(shape.dtype)?));
    let tensors = weights.iter().map(stored).collect::<Result<Vec<_>>>()?;
    let weights_path = dir.join("model.safetensors");
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &weights_path)?;
    say(&format!("written to {}", dir.display()));
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
