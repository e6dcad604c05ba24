//! `config.json` from the metadata and the tensors of a GGUF file.
//!
//! The conversion undoes that of llama.cpp (`convert_hf_to_gguf.py`); what the file does not hold, such as
//! the layers of SmolLM3 without rotary embedding, is what llama.cpp itself assumes.

use serde_json::{Value, json};

use super::file::{GgufFile, decimal};
use crate::Result;

/// llama.cpp's names of architectures, which are those of transformers' `model_type`.
const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "gemma2", "phi3", "smollm3"];

/// Layers of the one Gemma 2 whose attention scores are scaled by its hidden size (27B).
const GEMMA2_27B_LAYERS: u64 = 46;

/// The contents of `config.json`, as transformers 4 writes them.
pub(crate) fn config_json(file: &GgufFile) -> Result<Value> {
    let arch = file.required("general.architecture", GgufFile::text)?;
    if !ARCHITECTURES.contains(&arch) {
        let known = ARCHITECTURES.join(", ");
        let reason = format!("general.architecture is {arch:?}; supported is one of {known}");
        return Err(file.refuse(&reason));
    }
    let has_tensor = |name: &str| file.tensors().contains_key(name);
    let mlp_bias = has_tensor("blk.0.ffn_down.bias");
    if mlp_bias && !matches!(arch, "llama" | "smollm3") {
        let reason = format!("blk.0.ffn_down.bias is a bias that {arch:?} does not have");
        return Err(file.refuse(&reason));
    }
    let key = |name: &str| format!("{arch}.{name}");
    let whole = |name: &str| file.required(&key(name), GgufFile::whole);
    let (hidden, heads) = (whole("embedding_length")?, whole("attention.head_count")?.max(1));
    let head_dim = file.whole(&key("attention.key_length"))?.unwrap_or(hidden / heads);
    let embedding = file.tensors().get("token_embd.weight");
    let vocab = embedding.and_then(|tensor| tensor.shape.first()).copied();
    let vocab = vocab.ok_or_else(|| file.refuse("there is no tensor token_embd.weight"))?;
    let layers = whole("block_count")?;
    let biased = has_tensor("blk.0.attn_q.bias");
    // llama.cpp has one architecture for both, and only Mistral has such heads; it has no biases.
    let is_mistral = arch == "llama" && head_dim != hidden / heads && !biased;
    let rotary = file.whole(&key("rope.dimension_count"))?.unwrap_or(head_dim);
    let theta = file.number(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let scaling = rope_scaling(file, arch, theta, head_dim)?;
    let mut config = json!({
        "model_type": if is_mistral { "mistral" } else { arch },
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole(&key("attention.head_count_kv"))?.unwrap_or(heads),
        "max_position_embeddings": whole("context_length")?,
        "rms_norm_eps":
            file.required(&key("attention.layer_norm_rms_epsilon"), GgufFile::number)?,
        "rope_theta": theta,
        "tie_word_embeddings": !has_tensor("output.weight"),
        "sliding_window": null,
        "head_dim": head_dim,
        "attention_bias": biased && arch != "qwen2",
        "mlp_bias": mlp_bias,
        "partial_rotary_factor": rotary as f64 / head_dim as f64,
        "rope_scaling": scaling,
    });
    match arch {
        "gemma2" => {
            let score = if layers == GEMMA2_27B_LAYERS { hidden / heads } else { head_dim };
            config["query_pre_attn_scalar"] = json!(score);
            config["hidden_activation"] = json!("gelu_pytorch_tanh");
            for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
                config[name] = json!(file.number(&key(name))?);
            }
            config["sliding_window"] = json!(file.whole("gemma2.attention.sliding_window")?);
        }
        "phi3" => {
            let window = file.whole("phi3.attention.sliding_window")?.filter(|n| *n > 0);
            config["sliding_window"] = json!(window);
        }
        _ => {}
    }
    if config["rope_scaling"]["rope_type"] == "longrope" {
        let original = file.whole(&key("rope.scaling.original_context_length"))?;
        config["original_max_position_embeddings"] = json!(original);
    }
    Ok(config)
}

// Rotary scaling from the metadata and the tensors of a GGUF file.

/// The divisors of Llama 3's scaling in all published models: low and high frequencies are those whose
/// wavelength is above or below the original context divided by these.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;

/// Largest relative difference between a stored factor and the one of recovered parameters.
const TOLERANCE: f64 = 1e-4;

/// The `rope_scaling` of a file; `null` if it does not scale positions.
fn rope_scaling(file: &GgufFile, arch: &str, theta: f64, head_dim: u64) -> Result<Value> {
    let key = |name: &str| format!("{arch}.rope.scaling.{name}");
    if let Some(short) = file.vector("rope_factors_short.weight")? {
        let long = file.vector("rope_factors_long.weight")?.unwrap_or_default();
        let decimals = |factors: Vec<f32>| factors.into_iter().map(decimal).collect::<Vec<_>>();
        return Ok(json!({
            "rope_type": "longrope",
            "short_factor": decimals(short),
            "long_factor": decimals(long),
        }));
    }
    if let Some(factors) = file.vector("rope_freqs.weight")? {
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(Value::Null);
        }
        return llama3(&factors, theta, head_dim as f64).ok_or_else(|| {
            file.refuse("rope_freqs.weight has factors of another scaling than Llama 3's")
        });
    }
    Ok(match file.text(&key("type"))? {
        None | Some("none") => Value::Null,
        Some(kind) => json!({ "rope_type": kind, "factor": file.number(&key("factor"))? }),
    })
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
mod tests {
    use super::*;

    #[test]
    fn parameters_of_llama_3_are_recovered_from_its_factors() {
        // Llama 3.1 and 3.2.
        for (factor, original) in [(8.0, 8192_u64), (32.0, 8192)] {
            let wavelength = |i: usize| std::f64::consts::TAU * 500_000_f64.powf(i as f64 / 32.0);
            let factor_of = |i| llama3_factor(wavelength(i), factor, original as f64) as f32;
            let factors: Vec<f32> = (0..32).map(factor_of).collect();
            let found = llama3(&factors, 500_000.0, 64.0).unwrap();
            assert_eq!(found["factor"], factor);
            assert_eq!(found["original_max_position_embeddings"], original);
        }
        assert_eq!(llama3(&[1.0, 2.0, 1.0, 3.0], 10_000.0, 8.0), None);
    }
}
