//! `config.json` from the metadata of a GGUF file.

use serde_json::{Value, json};

use super::super::values::Config;
use super::metadata::Metadata;
use super::rope;
use crate::error::EngineError;

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
pub(super) fn from_metadata(metadata: &Metadata<'_>) -> Result<Config, EngineError> {
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
    rope::add_scaling(metadata, arch, head_dim, &mut config)?;
    Ok(config)
}

fn object(value: Value) -> Config {
    if let Value::Object(object) = value { object } else { Config::new() }
}
