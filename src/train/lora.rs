//! Low-rank adapters (Hu et al. 2021) on any linear layer, laid out and named as PEFT does.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::config::{LinearKind, LoraConfig};
use crate::train::error::{LearnError, Result};
use crate::train::model::ModelSpec;

/// Inverted dropout from our own random stream, so that a step can be repeated bit for bit.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Probability that an input is zeroed; the others are scaled by `1 / (1 - p)`.
    pub p: f32,
    /// Where the masks come from.
    pub rng: ChaCha8Rng,
}

impl Dropout {
    pub(super) fn apply(&mut self, x: &Tensor) -> candle_core::Result<Tensor> {
        if self.p <= 0.0 {
            return Ok(x.clone());
        }
        let keep = 1.0 / (1.0 - self.p);
        let mask: Vec<f32> = (0..x.elem_count())
            .map(|_| if self.rng.random::<f32>() < self.p { 0.0 } else { keep })
            .collect();
        x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
    }
}

/// The two factors on one linear layer: `delta(x) = scale * x A^T B^T`.
#[derive(Clone, Debug)]
pub struct Pair {
    /// `[r, in_features]`
    pub a: Var,
    /// `[out_features, r]`
    pub b: Var,
}

/// Adapters on the chosen linears of every layer.
#[derive(Clone, Debug)]
pub struct Lora {
    /// Rank.
    pub r: usize,
    /// `alpha / r`.
    pub scale: f64,
    pairs: BTreeMap<(usize, LinearKind), Pair>,
}

impl Lora {
    /// A fresh adapter: A uniform in `±1/sqrt(in_features)` (PEFT's `kaiming_uniform_(a=sqrt(5))`),
    /// B zero, so that the policy starts as the base. The random numbers come from `rng` in a fixed
    /// order.
    ///
    /// # Errors
    /// If the rank is 0, no module is named, or a tensor cannot be made.
    pub fn fresh(
        spec: &ModelSpec,
        config: &LoraConfig,
        rng: &mut ChaCha8Rng,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let kinds = checked_modules(spec, config)?;
        let mut pairs = BTreeMap::new();
        for layer in 0..spec.num_layers {
            for kind in &kinds {
                let (out, inp) = spec.linear_shape(*kind);
                let bound = 1.0 / (inp as f32).sqrt();
                let a: Vec<f32> =
                    (0..config.r * inp).map(|_| rng.random_range(-bound..bound)).collect();
                let a = Tensor::from_vec(a, (config.r, inp), device)?.to_dtype(dtype)?;
                let pair = Pair {
                    a: Var::from_tensor(&a)?,
                    b: Var::zeros((out, config.r), dtype, device)?,
                };
                pairs.insert((layer, *kind), pair);
            }
        }
        Ok(Self { r: config.r, scale: config.alpha / config.r as f64, pairs })
    }

    /// An adapter from tensors under their PEFT names: exactly those that `config` asks for.
    ///
    /// # Errors
    /// If a tensor is missing, has the wrong shape or belongs to no adapter; the message says which.
    pub fn from_tensors(
        spec: &ModelSpec,
        config: &LoraConfig,
        mut tensors: BTreeMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut pairs = BTreeMap::new();
        for layer in 0..spec.num_layers {
            for kind in checked_modules(spec, config)? {
                let (out, inp) = spec.linear_shape(kind);
                let [a_name, b_name] = peft_names(layer, kind);
                let mut take = |name: String, shape: [usize; 2]| -> Result<Var> {
                    let tensor = tensors
                        .remove(&name)
                        .ok_or_else(|| LearnError::Weights(format!("`{name}` is missing")))?;
                    if tensor.dims() != shape {
                        return Err(LearnError::Weights(format!(
                            "`{name}` has shape {:?} instead of {shape:?}",
                            tensor.dims()
                        )));
                    }
                    let tensor = tensor.to_device(device)?.to_dtype(dtype)?.copy()?;
                    Ok(Var::from_tensor(&tensor)?)
                };
                let a = take(a_name, [config.r, inp])?;
                let b = take(b_name, [out, config.r])?;
                pairs.insert((layer, kind), Pair { a, b });
            }
        }
        if let Some(name) = tensors.keys().next() {
            return Err(LearnError::Weights(format!(
                "`{name}` is not on a linear layer that the adapter names"
            )));
        }
        Ok(Self { r: config.r, scale: config.alpha / config.r as f64, pairs })
    }

    /// The adapter on one linear layer, if it has one.
    pub fn pair(&self, layer: usize, kind: LinearKind) -> Option<&Pair> {
        self.pairs.get(&(layer, kind))
    }

    /// The linear layers that carry an adapter, sorted.
    pub fn linears(&self) -> Vec<LinearKind> {
        let mut kinds: Vec<_> = self.pairs.keys().map(|(_, kind)| *kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }

    /// Every trainable tensor under its PEFT name, in a fixed order.
    pub fn parameters(&self) -> Vec<(String, &Var)> {
        self.pairs
            .iter()
            .flat_map(|((layer, kind), pair)| {
                let [a, b] = peft_names(*layer, *kind);
                [(a, &pair.a), (b, &pair.b)]
            })
            .collect()
    }

    /// Copies of every trainable tensor under its PEFT name: later updates do not change them.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        self.parameters()
            .into_iter()
            .map(|(name, var)| Ok((name, var.as_detached_tensor().copy()?)))
            .collect()
    }
}

/// The names of A and B in `adapter_model.safetensors`.
fn peft_names(layer: usize, kind: LinearKind) -> [String; 2] {
    let module =
        format!("base_model.model.model.layers.{layer}.{}.{}", kind.parent(), kind.as_str());
    [format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight")]
}

/// The linear layers that carry an adapter, sorted.
fn checked_modules(spec: &ModelSpec, config: &LoraConfig) -> Result<Vec<LinearKind>> {
    if config.r == 0 {
        return Err(LearnError::Setting {
            key: "train.lora.r",
            value: "0".to_owned(),
            expected: "at least 1",
        });
    }
    if config.target_modules.is_empty() {
        return Err(LearnError::Setting {
            key: "train.lora.target_modules",
            value: "empty".to_owned(),
            expected: "at least one linear layer",
        });
    }
    spec.target_linears(&config.target_modules)
}
