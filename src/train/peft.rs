//! Adapter directories as the Python library PEFT reads and writes them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use serde_json::{Value, json};

use super::error::{LearnError, Result};
use super::files::{at, safetensors_bytes, sync_dir, write_synced};
use super::lora::Lora;
use super::model::ModelSpec;
use crate::config::{LinearKind, LoraConfig};

/// The adapter's settings.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The adapter's tensors.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Options of PEFT that change what an adapter computes, with the only value we compute.
const REFUSED: [(&str, Value); 6] = [
    ("use_dora", Value::Bool(false)),
    ("use_rslora", Value::Bool(false)),
    ("fan_in_fan_out", Value::Bool(false)),
    ("modules_to_save", Value::Null),
    ("layers_to_transform", Value::Null),
    ("exclude_modules", Value::Null),
];

/// Writes `adapter_config.json` and `adapter_model.safetensors` into `dir` (made if need be) and
/// waits until they are on disk.
///
/// # Errors
/// If a file cannot be written.
pub fn write(dir: &Path, lora: &Lora, config: &LoraConfig, base_model_name: &str) -> Result<()> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    write_synced(&dir.join(WEIGHTS_FILE), &safetensors_bytes(&lora.tensors()?)?)?;
    let config = adapter_config(config, &lora.linears(), base_model_name);
    write_synced(&dir.join(CONFIG_FILE), format!("{config:#}\n").as_bytes())?;
    sync_dir(dir)
}

fn adapter_config(config: &LoraConfig, linears: &[LinearKind], base_model_name: &str) -> Value {
    // The layers themselves: `target_modules` may name the parts of a fused one.
    let mut modules: Vec<_> = linears.iter().map(|kind| kind.as_str()).collect();
    modules.sort_unstable();
    // PEFT declares alpha as an integer; write one where it is one.
    let alpha = if config.alpha.fract() == 0.0 && config.alpha.abs() < 1e9 {
        json!(config.alpha as i64)
    } else {
        json!(config.alpha)
    };
    json!({
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": config.r,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    })
}

/// Reads an adapter directory for a model: its settings and its tensors.
///
/// # Errors
/// If a file is missing or damaged, the adapter uses an option we do not compute, or it does not fit
/// the model.
pub fn read(
    dir: &Path,
    spec: &ModelSpec,
    dtype: DType,
    device: &Device,
) -> Result<(LoraConfig, Lora)> {
    let wrong = |reason: String| LearnError::Adapter { path: dir.to_owned(), reason };
    let text = fs::read(dir.join(CONFIG_FILE)).map_err(|e| wrong(format!("{CONFIG_FILE}: {e}")))?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|e| wrong(format!("{CONFIG_FILE}: {e}")))?;
    let config = parse_config(&value).map_err(wrong)?;
    let path = dir.join(WEIGHTS_FILE);
    let tensors: BTreeMap<_, _> = candle_core::safetensors::load(&path, device)
        .map_err(|e| wrong(format!("{WEIGHTS_FILE}: {e}")))?
        .into_iter()
        .collect();
    let lora = Lora::from_tensors(spec, &config, tensors, dtype, device)
        .map_err(|e| wrong(e.to_string()))?;
    Ok((config, lora))
}

fn parse_config(value: &Value) -> std::result::Result<LoraConfig, String> {
    if value["peft_type"] != "LORA" {
        return Err(format!("`peft_type` is {}, but must be \"LORA\"", value["peft_type"]));
    }
    for (key, only) in &REFUSED {
        let found = &value[key];
        if !found.is_null() && found != only {
            return Err(format!("`{key}` is {found}, which is not supported"));
        }
    }
    for key in ["rank_pattern", "alpha_pattern"] {
        if value[key].as_object().is_some_and(|map| !map.is_empty()) {
            return Err(format!("`{key}` is {}, which is not supported", value[key]));
        }
    }
    if !value["bias"].is_null() && value["bias"] != "none" {
        return Err(format!("`bias` is {}, which is not supported", value["bias"]));
    }
    let r = value["r"]
        .as_u64()
        .and_then(|r| usize::try_from(r).ok())
        .filter(|r| *r > 0)
        .ok_or_else(|| format!("`r` is {}, but must be a whole number above 0", value["r"]))?;
    let alpha = value["lora_alpha"]
        .as_f64()
        .filter(|alpha| alpha.is_finite())
        .ok_or_else(|| format!("`lora_alpha` is {}, but must be a number", value["lora_alpha"]))?;
    let target_modules = parse_modules(&value["target_modules"])?;
    let dropout = value["lora_dropout"].as_f64().unwrap_or(0.0) as f32;
    Ok(LoraConfig { r, alpha, dropout, target_modules })
}

fn parse_modules(value: &Value) -> std::result::Result<Vec<LinearKind>, String> {
    if value == "all-linear" {
        return Ok(LinearKind::ALL.to_vec());
    }
    let names = value
        .as_array()
        .ok_or_else(|| format!("`target_modules` is {value}, but must be a list of names"))?;
    let mut kinds = Vec::new();
    for name in names {
        let kind =
            LinearKind::EVERY.into_iter().find(|kind| name == kind.as_str()).ok_or_else(|| {
                format!("`target_modules` names {name}, which cannot carry an adapter")
            })?;
        kinds.push(kind);
    }
    kinds.sort_unstable();
    Ok(kinds)
}
