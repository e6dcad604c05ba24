//! Reads a PEFT directory and hands it to mistral.rs's loader.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use mistralrs_quant::{
    LoraAdapter, LoraConfig, ShardedSafeTensors, clear_applied_loras, push_applied_lora,
};
use serde::Deserialize;
use serde_json::Value;

use hone_engine::EngineError;
use hone_model::adapter::{LoraConfig as Settings, ModuleMatcher, ModuleScale, Patterns};

/// What PEFT puts before the model's own names.
const PREFIX: &str = "base_model.model.";

/// The part of `adapter_config.json` that changes what is computed.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    rank_pattern: Patterns<usize>,
    #[serde(default)]
    alpha_pattern: Patterns<f64>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl PeftConfig {
    /// Whether every module has the same rank and is scaled by `alpha / r`.
    fn is_plain(&self) -> bool {
        !self.use_rslora && self.rank_pattern.0.is_empty() && self.alpha_pattern.0.is_empty()
    }

    fn rules(&self) -> Result<ModuleMatcher, String> {
        let settings = Settings {
            r: self.r,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
            rank_pattern: self.rank_pattern.clone(),
            alpha_pattern: self.alpha_pattern.clone(),
            ..Settings::default()
        };
        ModuleMatcher::new(&settings).map_err(|(key, reason)| format!("{key}: {reason}"))
    }
}

/// A LoRA read from a PEFT directory: `W + alpha / rank * B A` for each of its modules.
pub(crate) struct Adapter {
    rank: usize,
    alpha: f64,
    /// F32, by PEFT's names: `lora_A` `[r, in]`, `lora_B` `[out, r]`.
    tensors: HashMap<String, Tensor>,
    /// Modules by the model's names.
    modules: BTreeSet<String>,
}

fn refuse(dir: &Path, reason: &str) -> EngineError {
    EngineError::Model(format!("adapter {}: {reason}", dir.display()))
}

impl Adapter {
    /// Reads `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// [`EngineError::Model`] naming what is missing or what would be merged wrongly.
    pub(crate) fn read(dir: &Path) -> Result<Self, EngineError> {
        let text = std::fs::read_to_string(dir.join("adapter_config.json"));
        let text = text.map_err(|e| refuse(dir, &format!("adapter_config.json: {e}")))?;
        let config: PeftConfig = serde_json::from_str(&text)
            .map_err(|e| refuse(dir, &format!("adapter_config.json: {e}")))?;
        check(&config).map_err(|reason| refuse(dir, &reason))?;
        let mut tensors =
            candle_core::safetensors::load(dir.join("adapter_model.safetensors"), &Device::Cpu)
                .and_then(|tensors| {
                    let f32 =
                        |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(DType::F32)?));
                    tensors.into_iter().map(f32).collect::<candle_core::Result<HashMap<_, _>>>()
                })
                .map_err(|e| refuse(dir, &format!("adapter_model.safetensors: {e}")))?;
        let modules = modules(&tensors).map_err(|reason| refuse(dir, &reason))?;
        let (mut rank, mut alpha) = (config.r, config.lora_alpha);
        if !config.is_plain() {
            let rules = config.rules().map_err(|reason| refuse(dir, &reason))?;
            rank = even_out(&mut tensors, &modules, &rules)
                .map_err(|e| refuse(dir, &format!("adapter_model.safetensors: {e}")))?;
            alpha = rank as f64;
        }
        Ok(Self { rank, alpha, tensors, modules })
    }

    /// Merges this adapter into whatever the current thread loads until the result is dropped.
    pub(super) fn apply(&self) -> Applied {
        let taken = Arc::new(Mutex::new(HashSet::new()));
        let backend = Counted { tensors: self.tensors.clone(), taken: Arc::clone(&taken) };
        let config = LoraConfig {
            rank: self.rank,
            alpha: self.alpha,
            target_modules: self.modules.iter().map(|module| pattern(module)).collect(),
        };
        let weights = ShardedSafeTensors::wrap(Box::new(backend), DType::F32, Device::Cpu);
        // Adapters of an earlier load on this thread would be merged on top.
        clear_applied_loras();
        push_applied_lora(LoraAdapter { config, weights });
        Applied { all: self.tensors.keys().cloned().collect(), taken }
    }
}

/// Everything in the configuration that asks for another formula than ours must be off.
fn check(config: &PeftConfig) -> Result<(), String> {
    if config.peft_type != "LORA" {
        return Err(format!("peft_type is {:?}; \"LORA\" was expected", config.peft_type));
    }
    if config.r == 0 {
        return Err("r is 0; at least 1 was expected".to_owned());
    }
    for key in [
        "use_dora",
        "fan_in_fan_out",
        "bias",
        "modules_to_save",
        "lora_bias",
        "layer_replication",
        "trainable_token_indices",
    ] {
        let off = match config.rest.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::String(text)) => text == "none",
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        if !off {
            let value = config.rest.get(key).unwrap_or(&Value::Null);
            return Err(format!("{key} is {value}, which cannot be merged"));
        }
    }
    Ok(())
}

/// What matches a module's full name, which the loader takes as an unanchored regular expression.
///
/// Modules that differ in their layer's number alone have the same, because the loader compiles all
/// patterns anew for every module that it loads. So those of layers without an adapter match too:
/// [`Counted`] has zeros for them.
fn pattern(module: &str) -> String {
    let part = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "[0-9]+".to_owned(),
        false => regex::escape(part),
    };
    format!("^{}$", module.split('.').map(part).collect::<Vec<_>>().join(r"\."))
}

/// The modules that the tensors' names mean, each with both its tensors. Strange names are told
/// before missing ones, and both in the order of names.
fn modules(tensors: &HashMap<String, Tensor>) -> Result<BTreeSet<String>, String> {
    let names: BTreeSet<&String> = tensors.keys().collect();
    let mut modules = BTreeSet::new();
    for name in &names {
        let module = name.strip_prefix(PREFIX).and_then(|rest| {
            rest.strip_suffix(".lora_A.weight").or_else(|| rest.strip_suffix(".lora_B.weight"))
        });
        let module = module.ok_or_else(|| format!("{name:?} is not the name of a LoRA tensor"))?;
        modules.insert(module.to_owned());
    }
    for module in &modules {
        let [a, b] = ["lora_A", "lora_B"].map(|half| format!("{PREFIX}{module}.{half}.weight"));
        for (one, other) in [(&a, &b), (&b, &a)] {
            if !names.contains(other) {
                return Err(format!("there is {one:?} but no {other:?}"));
            }
        }
    }
    if modules.is_empty() { Err("there is no tensor in it".to_owned()) } else { Ok(modules) }
}

/// Gives all modules one rank and the scale 1, as the loader has only one of each: A gets rows and B
/// columns of zeros, and B is multiplied by its scale. Returns the rank.
fn even_out(
    tensors: &mut HashMap<String, Tensor>,
    modules: &BTreeSet<String>,
    rules: &ModuleMatcher,
) -> candle_core::Result<usize> {
    let rank = modules.iter().map(|module| rules.scale(module).r).max().unwrap_or(1);
    for module in modules {
        let ModuleScale { r, scale } = rules.scale(module);
        for (half, side, factor) in [("lora_A", 0_usize, 1.0), ("lora_B", 1, scale)] {
            let name = format!("{PREFIX}{module}.{half}.weight");
            let Some(tensor) = tensors.get(&name) else { continue };
            if tensor.dim(side)? != r {
                candle_core::bail!("{name:?} has shape {:?} for rank {r}", tensor.dims());
            }
            let padded = (tensor * factor)?.pad_with_zeros(side, 0, rank - r)?;
            tensors.insert(name, padded);
        }
    }
    Ok(rank)
}

/// While this lives, the thread's loads merge an adapter.
pub(super) struct Applied {
    all: BTreeSet<String>,
    taken: Arc<Mutex<HashSet<String>>>,
}

impl Applied {
    /// Fails if a tensor was not merged: its module does not exist in the model, and the loader
    /// ignores such a one silently.
    pub(super) fn check_consumed(self) -> Result<(), EngineError> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match self.all.iter().find(|name| !taken.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(EngineError::Model(format!(
                "the adapter's tensor {name:?} belongs to no module of the model"
            ))),
        }
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        clear_applied_loras();
    }
}

/// Tensors by name, zeros where there is none, that remembers which were asked for.
struct Counted {
    tensors: HashMap<String, Tensor>,
    taken: Arc<Mutex<HashSet<String>>>,
}

impl SimpleBackend for Counted {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if !self.contains_tensor(name) {
            return Tensor::zeros(shape, dtype, device);
        }
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            candle_core::bail!(
                "adapter tensor {name:?} has shape {:?}; the model needs {shape:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let Some(tensor) = self.tensors.get(name) else {
            candle_core::bail!("the adapter has no tensor {name:?}");
        };
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        tensor.to_device(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_its_module_in_every_layer_and_nothing_else() {
        let pattern = pattern("model.layers.3.mlp.up_proj");
        assert_eq!(pattern, super::pattern("model.layers.12.mlp.up_proj"));
        let regex = regex::Regex::new(&format!("{pattern}|^lm_head$")).unwrap();
        for name in ["model.layers.3.mlp.up_proj", "model.layers.10.mlp.up_proj", "lm_head"] {
            assert!(regex.is_match(name), "{name}");
        }
        for name in [
            "model.layers.3.mlp.up_proj.more",
            "a.model.layers.3.mlp.up_proj",
            "model.layers.x.mlp.up_proj",
            "model.layers.3.mlp_up_proj",
        ] {
            assert!(!regex.is_match(name), "{name}");
        }
    }
}
