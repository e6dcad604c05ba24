//! Adapter directories as the Python library PEFT reads and writes them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::{Value, json};

use hone_core::files::{at, sync_dir, write_synced};

use super::config::{LoraConfig, LoraInit};
use super::weights::LoraWeights;
use super::{Modules, Patterns};
use crate::gguf::decimal;
use crate::weights::safetensors_bytes;
use crate::{ModelError, ModelSpec, Result};

/// The adapter's settings.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The adapter's tensors.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// The adapter's tensors as a pickle, written by old versions of PEFT.
const PICKLE_FILE: &str = "adapter_model.bin";

/// PEFT options that must be off: with them, the adapter is not just `scale * B A` on linear layers of
/// an unchanged model.
const UNSUPPORTED: [&str; 15] = [
    "use_dora",
    "fan_in_fan_out",
    "bias",
    "modules_to_save",
    "trainable_token_indices",
    "lora_bias",
    "megatron_config",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Initializations that subtract the initial adapter from the base's weights.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Writes and syncs `adapter_config.json` and `adapter_model.safetensors` into `dir`, which is created
/// if it does not exist.
///
/// # Errors
/// If a file cannot be written.
pub fn write(
    dir: &Path,
    lora: &LoraWeights,
    config: &LoraConfig,
    base_model_name: &str,
) -> Result<()> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    write_synced(&dir.join(WEIGHTS_FILE), &safetensors_bytes(&lora.tensors()?)?)?;
    // PEFT declares alpha as an integer.
    let alpha = config.alpha;
    let whole = alpha.fract() == 0.0 && alpha.abs() < 1e9;
    let mut file = json!({
        "alpha_pattern": config.alpha_pattern,
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "exclude_modules": config.exclude_modules,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": match config.init_weights {
            LoraInit::Kaiming => json!(true),
            LoraInit::Gaussian => json!("gaussian"),
        },
        "layers_to_transform": config.layers_to_transform,
        "lora_alpha": if whole { json!(alpha as i64) } else { json!(alpha) },
        "lora_dropout": decimal(config.dropout),
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": config.rank_pattern,
        "target_modules": targets(lora, config),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": config.use_rslora,
    });
    // Empty lists are not written.
    file.as_object_mut().into_iter().for_each(|file| file.retain(|_, value| *value != json!([])));
    write_synced(&dir.join(CONFIG_FILE), format!("{file:#}\n").as_bytes())?;
    Ok(sync_dir(dir)?)
}

/// The target modules for PEFT. "all-linear" becomes a list of names: PEFT does not allow
/// `layers_to_transform` with it, and for some models it includes other modules.
fn targets(lora: &LoraWeights, config: &LoraConfig) -> Modules {
    if config.target_modules != Modules::AllLinear {
        return config.target_modules.clone();
    }
    let last = |module: &String| module.rsplit('.').next().unwrap_or(module).to_owned();
    let mut names: Vec<String> = lora.module_scales().keys().map(last).collect();
    names.sort_unstable();
    names.dedup();
    Modules::Names(names)
}

/// Reads an adapter directory for a model: its settings and its tensors, converted to `dtype`.
///
/// # Errors
/// If a file is missing or damaged, the adapter uses an unsupported option, or it does not fit the
/// model.
pub fn read(
    dir: &Path,
    spec: &ModelSpec,
    dtype: DType,
    device: &Device,
) -> Result<(LoraConfig, LoraWeights)> {
    let config = read_config(dir)?;
    let lora = LoraWeights::from_tensors(spec, &config, read_tensors(dir, device)?, dtype, device)
        .map_err(|e| ModelError::adapter(dir, e))?;
    Ok((config, lora))
}

/// The adapter's tensors in their stored types.
pub(crate) fn read_tensors(dir: &Path, device: &Device) -> Result<BTreeMap<String, Tensor>> {
    let wrong = |reason: String| ModelError::adapter(dir, reason);
    let path = dir.join(WEIGHTS_FILE);
    if !path.exists() && dir.join(PICKLE_FILE).exists() {
        return Err(wrong(format!(
            "{PICKLE_FILE} is a pickle, which can run code when it is read; save the adapter again \
             with `safe_serialization=True` for {WEIGHTS_FILE}"
        )));
    }
    let tensors = candle_core::safetensors::load(&path, device)
        .map_err(|e| wrong(format!("{WEIGHTS_FILE}: {e}")))?;
    for (name, tensor) in &tensors {
        if !matches!(tensor.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            return Err(wrong(format!("`{name}` is of type {:?}, not a float", tensor.dtype())));
        }
    }
    Ok(tensors.into_iter().collect())
}

/// The part of `adapter_config.json` that determines the adapter's modules, ranks and scales.
#[derive(Deserialize)]
struct ConfigIn {
    r: usize,
    lora_alpha: f64,
    target_modules: Modules,
    lora_dropout: Option<f32>,
    use_rslora: Option<bool>,
    exclude_modules: Option<Modules>,
    layers_to_transform: Option<OneOrMany>,
    rank_pattern: Option<Patterns<usize>>,
    alpha_pattern: Option<Patterns<f64>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(usize),
    Many(Vec<usize>),
}

pub(crate) fn read_config(dir: &Path) -> Result<LoraConfig> {
    let wrong = |reason: String| ModelError::adapter(dir, format!("{CONFIG_FILE}: {reason}"));
    let text = fs::read_to_string(dir.join(CONFIG_FILE)).map_err(|e| wrong(e.to_string()))?;
    let damaged = |e: serde_json::Error| wrong(e.to_string());
    let value: Value = serde_json::from_str(&text).map_err(damaged)?;
    if value["peft_type"] != "LORA" {
        return Err(wrong(format!("`peft_type` is {}, but must be \"LORA\"", value["peft_type"])));
    }
    for key in UNSUPPORTED {
        if !is_off(&value[key]) {
            return Err(wrong(format!("`{key}` is {}, which is not supported", value[key])));
        }
    }
    let start = value["init_lora_weights"].as_str().unwrap_or("").to_lowercase();
    if CHANGES_BASE.iter().any(|name| start.starts_with(name)) {
        return Err(wrong(format!(
            "`init_lora_weights` is \"{start}\", which changes the base's weights; convert the \
             adapter with PEFT's `path_initial_model_for_weight_conversion`"
        )));
    }
    let pattern = &value["layers_pattern"];
    if !is_off(pattern) && *pattern != "layers" && *pattern != json!(["layers"]) {
        return Err(wrong(format!("`layers_pattern` is {pattern}, which is not supported")));
    }
    let read: ConfigIn = serde_json::from_value(value).map_err(damaged)?;
    let ranks = read.rank_pattern.unwrap_or_default();
    if read.r == 0 || ranks.values().any(|r| *r == 0) {
        return Err(wrong("a rank is 0, but must be a whole number above 0".to_owned()));
    }
    Ok(LoraConfig {
        r: read.r,
        alpha: read.lora_alpha,
        use_rslora: read.use_rslora.unwrap_or(false),
        dropout: read.lora_dropout.unwrap_or(0.0),
        target_modules: read.target_modules,
        exclude_modules: read.exclude_modules.unwrap_or(Modules::Names(Vec::new())),
        layers_to_transform: match read.layers_to_transform {
            None => Vec::new(),
            Some(OneOrMany::One(layer)) => vec![layer],
            Some(OneOrMany::Many(layers)) => layers,
        },
        rank_pattern: ranks,
        alpha_pattern: read.alpha_pattern.unwrap_or_default(),
        ..LoraConfig::default()
    })
}

/// Whether the value of an option means that it is not used.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
pub(crate) mod tests;
