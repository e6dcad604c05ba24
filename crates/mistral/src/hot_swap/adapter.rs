//! Reads a PEFT directory and merges it with mistral.rs's loader.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use mistralrs_quant::{
    LoraAdapter, LoraConfig, ShardedSafeTensors, clear_applied_loras, push_applied_lora,
};
use serde::Deserialize;
use serde_json::Value;

use hone_engine::EngineError;
use hone_model::adapter::{self, ModuleMatcher, ModuleScale, Patterns};

/// The prefix that PEFT adds to the model's tensor names.
const PREFIX: &str = "base_model.model.";

/// The part of `adapter_config.json` that affects the merged weights.
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
    /// Refuses settings under which a module is not `W + scale B A`.
    fn check(&self) -> anyhow::Result<()> {
        let peft_type = &self.peft_type;
        ensure!(peft_type == "LORA", "peft_type is {peft_type:?}; \"LORA\" was expected");
        ensure!(self.r > 0, "r is 0; at least 1 was expected");
        for key in [
            "use_dora",
            "fan_in_fan_out",
            "bias",
            "modules_to_save",
            "lora_bias",
            "layer_replication",
            "trainable_token_indices",
        ] {
            let value = self.rest.get(key).unwrap_or(&Value::Null);
            let off = match value {
                Value::Null | Value::Bool(false) => true,
                Value::String(text) => text == "none",
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Bool(true) | Value::Number(_) => false,
            };
            ensure!(off, "{key} is {value}, which cannot be merged");
        }
        Ok(())
    }

    /// Whether every module has the same rank and is scaled by `alpha / r`.
    fn is_uniform(&self) -> bool {
        !self.use_rslora && self.rank_pattern.0.is_empty() && self.alpha_pattern.0.is_empty()
    }

    fn rules(self) -> anyhow::Result<ModuleMatcher> {
        let config = adapter::LoraConfig {
            r: self.r,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
            rank_pattern: self.rank_pattern,
            alpha_pattern: self.alpha_pattern,
            ..adapter::LoraConfig::default()
        };
        ModuleMatcher::new(&config).map_err(|(key, reason)| anyhow::anyhow!("{key}: {reason}"))
    }
}

/// A LoRA adapter from a PEFT directory: `W + alpha / rank * B A` for each of its modules.
pub(crate) struct Adapter {
    rank: usize,
    alpha: f64,
    /// F32, by PEFT's names: `lora_A` `[r, in]`, `lora_B` `[out, r]`.
    tensors: HashMap<String, Tensor>,
    /// The adapted modules, by the model's names.
    modules: BTreeSet<String>,
}

impl Adapter {
    /// Reads `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// [`EngineError::Model`] if a file cannot be read, or if the adapter cannot be merged exactly.
    pub(crate) fn read(dir: &Path) -> Result<Self, EngineError> {
        let refuse = |e| EngineError::Model(format!("adapter {}: {e:#}", dir.display()));
        Self::read_files(dir).map_err(refuse)
    }

    fn read_files(dir: &Path) -> anyhow::Result<Self> {
        let (config_file, weights_file) = ("adapter_config.json", "adapter_model.safetensors");
        let text = std::fs::read_to_string(dir.join(config_file)).context(config_file)?;
        let config: PeftConfig = serde_json::from_str(&text).context(config_file)?;
        config.check()?;
        let mut tensors = candle_core::safetensors::load(dir.join(weights_file), &Device::Cpu)
            .context(weights_file)?;
        for tensor in tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F32).context(weights_file)?;
        }
        let modules = modules(&tensors)?;
        let (mut rank, mut alpha) = (config.r, config.lora_alpha);
        if !config.is_uniform() {
            rank = unify(&mut tensors, &modules, &config.rules()?).context(weights_file)?;
            alpha = rank as f64;
        }
        Ok(Self { rank, alpha, tensors, modules })
    }

    /// Merges this adapter into all models that the current thread loads, until the guard is dropped.
    pub(super) fn apply(&self) -> MergeGuard {
        let used = Arc::new(Mutex::new(HashSet::new()));
        let backend = TrackedTensors { tensors: self.tensors.clone(), used: Arc::clone(&used) };
        let config = LoraConfig {
            rank: self.rank,
            alpha: self.alpha,
            target_modules: self.modules.iter().map(|module| pattern(module)).collect(),
        };
        let weights = ShardedSafeTensors::wrap(Box::new(backend), DType::F32, Device::Cpu);
        // Adapters of an earlier load on this thread would be merged too.
        clear_applied_loras();
        push_applied_lora(LoraAdapter { config, weights });
        MergeGuard { names: self.tensors.keys().cloned().collect(), used }
    }
}

/// An anchored regular expression for a module's full name. The loader does not anchor it.
///
/// The loader compiles all expressions again for every module. So modules that differ only in the
/// layer's number share one expression, which matches every layer. For layers without an adapter,
/// [`TrackedTensors`] returns zeros.
fn pattern(module: &str) -> String {
    let part = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "[0-9]+".to_owned(),
        false => regex::escape(part),
    };
    format!("^{}$", module.split('.').map(part).collect::<Vec<_>>().join(r"\."))
}

/// The modules that the tensors belong to. Each must have both its tensors.
fn modules(tensors: &HashMap<String, Tensor>) -> anyhow::Result<BTreeSet<String>> {
    let names: BTreeSet<&String> = tensors.keys().collect();
    let mut modules = BTreeSet::new();
    for name in &names {
        let module = name.strip_prefix(PREFIX).and_then(|rest| {
            rest.strip_suffix(".lora_A.weight").or_else(|| rest.strip_suffix(".lora_B.weight"))
        });
        let module =
            module.with_context(|| format!("{name:?} is not the name of a LoRA tensor"))?;
        modules.insert(module.to_owned());
    }
    for module in &modules {
        let [a, b] = ["lora_A", "lora_B"].map(|half| format!("{PREFIX}{module}.{half}.weight"));
        for (one, other) in [(&a, &b), (&b, &a)] {
            ensure!(names.contains(other), "{one:?} is present, but {other:?} is missing");
        }
    }
    ensure!(!modules.is_empty(), "it contains no tensors");
    Ok(modules)
}

/// Changes all modules to one rank, which it returns, and to scale 1, because the loader supports only
/// one of each. A gets rows and B columns of zeros, and B is multiplied by its scale.
fn unify(
    tensors: &mut HashMap<String, Tensor>,
    modules: &BTreeSet<String>,
    rules: &ModuleMatcher,
) -> anyhow::Result<usize> {
    let rank = modules.iter().map(|module| rules.scale(module).r).max().unwrap_or(1);
    for module in modules {
        let ModuleScale { r, scale } = rules.scale(module);
        for (half, side, factor) in [("lora_A", 0_usize, 1.0), ("lora_B", 1, scale)] {
            let name = format!("{PREFIX}{module}.{half}.weight");
            let Some(tensor) = tensors.get_mut(&name) else { continue };
            if tensor.dim(side)? != r {
                bail!("{name:?} has shape {:?} for rank {r}", tensor.dims());
            }
            *tensor = (&*tensor * factor)?.pad_with_zeros(side, 0, rank - r)?;
        }
    }
    Ok(rank)
}

/// While this exists, the thread's loads merge an adapter.
pub(super) struct MergeGuard {
    names: BTreeSet<String>,
    /// The names that the loader has read.
    used: Arc<Mutex<HashSet<String>>>,
}

impl MergeGuard {
    /// Checks that every tensor was merged. The loader ignores tensors of modules that the model does
    /// not have.
    pub(super) fn check_complete(self) -> Result<(), EngineError> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        match self.names.iter().find(|name| !used.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(EngineError::Model(format!(
                "the adapter's tensor {name:?} belongs to no module of the model"
            ))),
        }
    }
}

impl Drop for MergeGuard {
    fn drop(&mut self) {
        clear_applied_loras();
    }
}

/// Returns tensors by name, or zeros for unknown names, and records which were read.
struct TrackedTensors {
    tensors: HashMap<String, Tensor>,
    used: Arc<Mutex<HashSet<String>>>,
}

impl SimpleBackend for TrackedTensors {
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
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
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
    fn a_pattern_matches_its_module_in_every_layer_and_no_other_module() {
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
