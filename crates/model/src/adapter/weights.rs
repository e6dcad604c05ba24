//! Low-rank adapters (Hu et al. 2021) on any linear layer, laid out and named as PEFT does.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::config::{LoraConfig, LoraInit};
use super::module_matching::{ModuleMatcher, ModuleScale};
use crate::spec::LinearKind;
use crate::{ModelError, ModelSpec, Result};

/// Inverted dropout with a seeded random stream, so that a step can be repeated bit for bit.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Probability that an input is zeroed; the others are scaled by `1 / (1 - p)`.
    pub p: f32,
    /// The source of the masks.
    pub rng: ChaCha8Rng,
}

impl Dropout {
    /// `x`, of any shape, times a mask.
    pub(crate) fn apply(&mut self, x: &Tensor) -> candle_core::Result<Tensor> {
        let Some(mask) = self.mask(x.elem_count()) else { return Ok(x.clone()) };
        x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
    }

    /// The factors of `count` inputs, drawn from the stream; `None` if p is 0.
    pub(crate) fn mask(&mut self, count: usize) -> Option<Vec<f32>> {
        if self.p <= 0.0 {
            return None;
        }
        let keep = 1.0 / (1.0 - self.p);
        let draw = |_| if self.rng.random::<f32>() < self.p { 0.0 } else { keep };
        Some((0..count).map(draw).collect())
    }
}

/// The adapter on one linear layer, which adds `scale * x A^T B^T` to its output.
#[derive(Clone, Debug)]
pub struct LoraPair {
    /// `[r, in_features]`
    pub a: Var,
    /// `[out_features, r]`
    pub b: Var,
    /// `alpha / r`, or `alpha / sqrt(r)` with rslora.
    pub scale: f64,
}

/// The adapters on all linear layers that have one.
#[derive(Clone, Debug)]
pub struct LoraWeights {
    pairs: BTreeMap<(usize, LinearKind), LoraPair>,
}

impl LoraWeights {
    /// A fresh adapter: A by `train.lora.init_weights`, B zero, so that the policy starts as the base.
    /// The random numbers come from `rng` in a fixed order.
    ///
    /// # Errors
    /// As [`plan`], or if a tensor cannot be created.
    pub fn fresh(
        spec: &ModelSpec,
        config: &LoraConfig,
        rng: &mut ChaCha8Rng,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut pairs = BTreeMap::new();
        for ((layer, kind), ModuleScale { r, scale }) in plan(spec, config)? {
            let (out, inp) = spec.linear_shape(kind);
            let a = initial_a(config.init_weights, r, inp, rng);
            let a = Tensor::from_vec(a, (r, inp), device)?.to_dtype(dtype)?;
            let (a, b) = (Var::from_tensor(&a)?, Var::zeros((out, r), dtype, device)?);
            pairs.insert((layer, kind), LoraPair { a, b, scale });
        }
        Ok(Self { pairs })
    }

    /// An adapter from its tensors by PEFT name.
    ///
    /// # Errors
    /// If a tensor of the adapter that `config` describes is missing or has the wrong shape, or if
    /// there are others. The message names the tensor.
    pub fn from_tensors(
        spec: &ModelSpec,
        config: &LoraConfig,
        mut tensors: BTreeMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        check_known_modules(spec, &tensors)?;
        let mut pairs = BTreeMap::new();
        for ((layer, kind), ModuleScale { r, scale }) in plan(spec, config)? {
            let (out, inp) = spec.linear_shape(kind);
            let [a_name, b_name] = peft_names(layer, kind);
            let mut take = |name: String, shape: [usize; 2]| -> Result<Var> {
                let wrong = |reason: String| ModelError::weights(format!("`{name}` {reason}"));
                let tensor = tensors.remove(&name).ok_or_else(|| wrong("is missing".to_owned()))?;
                if tensor.dims() != shape {
                    let dims = tensor.dims();
                    return Err(wrong(format!("has shape {dims:?} instead of {shape:?}")));
                }
                Ok(Var::from_tensor(&tensor.to_device(device)?.to_dtype(dtype)?.detach())?)
            };
            let (a, b) = (take(a_name, [r, inp])?, take(b_name, [out, r])?);
            pairs.insert((layer, kind), LoraPair { a, b, scale });
        }
        if let Some(name) = tensors.keys().next() {
            return Err(ModelError::weights(format!(
                "`{name}` is not on a linear layer that the adapter names"
            )));
        }
        Ok(Self { pairs })
    }

    /// The adapter on one linear layer, if it has one.
    pub fn pair(&self, layer: usize, kind: LinearKind) -> Option<&LoraPair> {
        self.pairs.get(&(layer, kind))
    }

    /// Rank and scale of every adapted module, by its name.
    pub fn module_scales(&self) -> BTreeMap<String, ModuleScale> {
        self.pairs
            .iter()
            .map(|((layer, kind), pair)| {
                let r = pair.a.dims().first().copied().unwrap_or(0);
                (kind.module(*layer), ModuleScale { r, scale: pair.scale })
            })
            .collect()
    }

    /// Every trainable tensor with its PEFT name, in a fixed order.
    pub fn parameters(&self) -> Vec<(String, &Var)> {
        self.pairs
            .iter()
            .flat_map(|((layer, kind), pair)| {
                let [a, b] = peft_names(*layer, *kind);
                [(a, &pair.a), (b, &pair.b)]
            })
            .collect()
    }

    /// Copies of all trainable tensors by PEFT name: later updates do not change them.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let copy = |(name, var): (_, &Var)| Ok((name, var.as_detached_tensor().copy()?));
        self.parameters().into_iter().map(copy).collect()
    }

    /// A deep copy.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn copy(&self) -> Result<Self> {
        let copy = |var: &Var| Var::from_tensor(&var.as_detached_tensor());
        let pairs = self.pairs.iter().map(|(place, pair)| {
            Ok((*place, LoraPair { a: copy(&pair.a)?, b: copy(&pair.b)?, scale: pair.scale }))
        });
        Ok(Self { pairs: pairs.collect::<Result<_>>()? })
    }

    /// A copy with B zero, which leaves the base's output unchanged.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn zeroed_copy(&self) -> Result<Self> {
        let copy = self.copy()?;
        for pair in copy.pairs.values() {
            pair.b.set(&pair.b.zeros_like()?)?;
        }
        Ok(copy)
    }

    /// Interpolates linearly in place: `self + weight * (other - self)`. Both have the same modules
    /// and ranks.
    ///
    /// # Errors
    /// If the shapes differ.
    pub fn lerp(&self, other: &Self, weight: f64) -> Result<()> {
        for ((_, own), (_, new)) in self.parameters().iter().zip(other.parameters()) {
            let old = own.as_detached_tensor();
            let change = ((new.as_detached_tensor() - &old)? * weight)?;
            own.set(&(old + change)?)?;
        }
        Ok(())
    }

    /// Sets values from tensors by PEFT name; names that the adapter does not have are ignored.
    ///
    /// # Errors
    /// If a tensor has another shape than its variable.
    pub fn assign(&self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        for (name, var) in self.parameters() {
            if let Some(tensor) = tensors.get(&name) {
                var.set(tensor)?;
            }
        }
        Ok(())
    }
}

/// Initial values of A, `[r, inp]` by rows.
fn initial_a(init: LoraInit, r: usize, inp: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    match init {
        LoraInit::Kaiming => {
            let bound = 1.0 / (inp as f32).sqrt();
            (0..r * inp).map(|_| rng.random_range(-bound..bound)).collect()
        }
        // Box & Muller 1958; 1 - u is never 0.
        LoraInit::Gaussian => (0..r * inp)
            .map(|_| {
                let (u, v): (f64, f64) = (rng.random(), rng.random());
                let z = (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
                (z / r as f64) as f32
            })
            .collect(),
    }
}

/// Rank and scale of every linear layer that has an adapter.
pub(crate) type Plan = BTreeMap<(usize, LinearKind), ModuleScale>;

/// The adapter that settings describe for a model.
///
/// # Errors
/// If a rank is 0, a pattern does not compile, no module matches, or a listed name matches no module
/// of the model.
pub fn plan(spec: &ModelSpec, config: &LoraConfig) -> Result<Plan> {
    let wrong = |key, value: &str, expected| {
        let reason = format!("`{key}` is {value}, but must be {expected}");
        Err(ModelError::Unsupported(reason))
    };
    if config.r == 0 {
        return wrong("train.lora.r", "0", "at least 1");
    }
    let matcher =
        ModuleMatcher::new(&with_fused_modules(spec, config)).map_err(|(key, reason)| {
            ModelError::Unsupported(format!("`train.lora.{key}` cannot be used: {reason}"))
        })?;
    let names: Vec<String> = places(spec).map(|(layer, kind)| kind.module(layer)).collect();
    let unmatched = matcher.unmatched(&names);
    if !unmatched.is_empty() {
        let hint = ": its q, k and v are one layer, `qkv_proj`, and gate and up are `gate_up_proj`";
        return Err(ModelError::Unsupported(format!(
            "`train.lora.target_modules` names {}, but the model has no such linear layer{}",
            list(unmatched),
            if spec.fused { hint } else { "" }
        )));
    }
    let plan: Plan = places(spec)
        .zip(&names)
        .filter_map(|(place, name)| Some((place, matcher.matched(name)?)))
        .collect();
    if plan.is_empty() {
        return wrong(
            "train.lora.target_modules",
            &serde_json::to_string(&config.target_modules).unwrap_or_default(),
            "names or a pattern of at least one linear layer that is not excluded",
        );
    }
    if plan.values().any(|module| module.r == 0) {
        return wrong("train.lora.rank_pattern", "0", "at least 1 for every module");
    }
    Ok(plan)
}

/// The settings for a model: if it has fused layers (Phi-3), the names of all parts of a fused layer in
/// `target_modules` become the name of the fused layer.
pub fn with_fused_modules(spec: &ModelSpec, config: &LoraConfig) -> LoraConfig {
    let modules = &config.target_modules;
    let target_modules = if spec.fused { modules.fused() } else { modules.clone() };
    LoraConfig { target_modules, ..config.clone() }
}

/// The linear layers that can have an adapter.
fn places(spec: &ModelSpec) -> impl Iterator<Item = (usize, LinearKind)> {
    (0..spec.num_layers).flat_map(|layer| spec.linears(layer).map(move |(kind, _)| (layer, kind)))
}

/// Rejects tensors on modules that the model does not have.
fn check_known_modules(spec: &ModelSpec, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let known: BTreeSet<String> =
        places(spec).flat_map(|(layer, kind)| peft_names(layer, kind)).collect();
    let unknown: BTreeSet<String> = tensors
        .keys()
        .filter(|name| !known.contains(*name))
        .map(|name| module_of(name).unwrap_or(name).to_owned())
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(ModelError::weights(format!(
        "the adapter has tensors on {}, which the model does not have or which cannot be trained",
        list(unknown.iter().map(String::as_str).collect())
    )))
}

/// The first few names, in quotes.
fn list(names: Vec<&str>) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

const PREFIX: &str = "base_model.model.";

/// The PEFT names of A and B on a linear layer.
pub(crate) fn peft_names(layer: usize, kind: LinearKind) -> [String; 2] {
    factor_names(&kind.module(layer))
}

/// The PEFT names of A and B on a module.
pub fn factor_names(module: &str) -> [String; 2] {
    ["lora_A", "lora_B"].map(|factor| format!("{PREFIX}{module}.{factor}.weight"))
}

/// The module that a tensor with a PEFT name of [`factor_names`] is on.
pub(super) fn module_of(name: &str) -> Option<&str> {
    let name = name.strip_prefix(PREFIX)?;
    name.strip_suffix(".lora_A.weight").or_else(|| name.strip_suffix(".lora_B.weight"))
}
