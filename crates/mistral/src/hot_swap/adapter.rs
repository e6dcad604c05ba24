//! Reads a PEFT directory and merges it with mistral.rs's loader.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use mistralrs_quant::{
    LoraAdapter, LoraConfig, ShardedSafeTensors, clear_applied_loras, push_applied_lora,
};
use parking_lot::Mutex;

use hone_engine::EngineError;
use hone_model::adapter::merge::{self, LoraDelta};
use hone_model::adapter::weights::factor_names;

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
    /// The loader supports one rank and one scale only. If modules differ in them, A gets rows and B columns of
    /// zeros, and B is multiplied by its scale.
    pub(crate) fn read(dir: &Path) -> Result<Self, EngineError> {
        let deltas = merge::deltas(dir)?;
        let pad = |error| EngineError::component(dir.display(), error);
        let ranks = || deltas.values().map(|delta| delta.a.dims()[0]);
        let rank = ranks().max().unwrap_or(1);
        let scale = deltas.values().next().map_or(1.0, |delta| delta.scale);
        let uniform = ranks().all(|r| r == rank) && deltas.values().all(|d| d.scale == scale);
        let alpha = rank as f64 * if uniform { scale } else { 1.0 };
        let mut tensors = HashMap::new();
        for (module, LoraDelta { a, b, scale }) in &deltas {
            let (mut a, mut b) = (a.clone(), b.clone());
            if !uniform {
                let more = rank - a.dims()[0];
                a = a.pad_with_zeros(0, 0, more).map_err(pad)?;
                b = (b * *scale).and_then(|b| b.pad_with_zeros(1, 0, more)).map_err(pad)?;
            }
            let [a_name, b_name] = factor_names(module);
            tensors.extend([(a_name, a), (b_name, b)]);
        }
        Ok(Self { rank, alpha, tensors, modules: deltas.into_keys().collect() })
    }

    /// Runs `load`, which must merge this adapter into a model that it loads on this thread. The loader ignores
    /// tensors of modules that the model does not have, which is an error here.
    pub(super) fn merged<T>(
        &self,
        load: impl FnOnce() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
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
        let loaded = load();
        clear_applied_loras();
        let loaded = loaded?;
        let used = used.lock();
        match self.tensors.keys().filter(|name| !used.contains(*name)).min() {
            None => Ok(loaded),
            Some(name) => Err(EngineError::Model(format!(
                "the adapter's tensor {name:?} belongs to no module of the model"
            ))),
        }
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
        self.used.lock().insert(name.to_owned());
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
