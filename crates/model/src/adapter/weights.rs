//! Low-rank adapters (Hu et al. 2021) on any linear layer, laid out and named as PEFT does.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::{ModelError, ModelSpec, Result};

pub use crate::adapter::{LinearKind, LoraConfig, LoraInit, ModuleRules, ModuleScale};

/// Inverted dropout from our own random stream, so that a step can be repeated bit for bit.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Probability that an input is zeroed; the others are scaled by `1 / (1 - p)`.
    pub p: f32,
    /// Where the masks come from.
    pub rng: ChaCha8Rng,
}

impl Dropout {
    /// `x` masked, of any shape.
    pub(crate) fn apply(&mut self, x: &Tensor) -> candle_core::Result<Tensor> {
        let Some(mask) = self.mask(x.elem_count()) else { return Ok(x.clone()) };
        x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
    }

    /// What `count` inputs are multiplied by, drawn from the stream; `None` where p is 0.
    pub(crate) fn mask(&mut self, count: usize) -> Option<Vec<f32>> {
        if self.p <= 0.0 {
            return None;
        }
        let keep = 1.0 / (1.0 - self.p);
        let draw = |_| if self.rng.random::<f32>() < self.p { 0.0 } else { keep };
        Some((0..count).map(draw).collect())
    }
}

/// The two factors on one linear layer: `delta(x) = scale * x A^T B^T`.
#[derive(Clone, Debug)]
pub struct Pair {
    /// `[r, in_features]`
    pub a: Var,
    /// `[out_features, r]`
    pub b: Var,
    /// `alpha / r`, or `alpha / sqrt(r)` with rslora.
    pub scale: f64,
}

/// Adapters on the chosen linears of every layer.
#[derive(Clone, Debug)]
pub struct LoraWeights {
    pairs: BTreeMap<(usize, LinearKind), Pair>,
}

impl LoraWeights {
    /// A fresh adapter: A as `train.lora.init_weights` says, B zero, so that the policy starts as the
    /// base. The random numbers come from `rng` in a fixed order.
    ///
    /// # Errors
    /// If a setting is out of range, no module or one that the model does not have is named, or a
    /// tensor cannot be made.
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
            let a = Tensor::from_vec(starting(config.init_weights, r, inp, rng), (r, inp), device)?
                .to_dtype(dtype)?;
            let (a, b) = (Var::from_tensor(&a)?, Var::zeros((out, r), dtype, device)?);
            pairs.insert((layer, kind), Pair { a, b, scale });
        }
        Ok(Self { pairs })
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
        unknown_modules(spec, &tensors)?;
        let mut pairs = BTreeMap::new();
        for ((layer, kind), ModuleScale { r, scale }) in plan(spec, config)? {
            let (out, inp) = spec.linear_shape(kind);
            let [a_name, b_name] = peft_names(layer, kind);
            let mut take = |name: String, shape: [usize; 2]| -> Result<Var> {
                let tensor = tensors
                    .remove(&name)
                    .ok_or_else(|| ModelError::Weights(format!("`{name}` is missing")))?;
                if tensor.dims() != shape {
                    return Err(ModelError::Weights(format!(
                        "`{name}` has shape {:?} instead of {shape:?}",
                        tensor.dims()
                    )));
                }
                let tensor = tensor.to_device(device)?.to_dtype(dtype)?.copy()?;
                Ok(Var::from_tensor(&tensor)?)
            };
            let (a, b) = (take(a_name, [r, inp])?, take(b_name, [out, r])?);
            pairs.insert((layer, kind), Pair { a, b, scale });
        }
        if let Some(name) = tensors.keys().next() {
            return Err(ModelError::Weights(format!(
                "`{name}` is not on a linear layer that the adapter names"
            )));
        }
        Ok(Self { pairs })
    }

    /// The adapter on one linear layer, if it has one.
    pub fn pair(&self, layer: usize, kind: LinearKind) -> Option<&Pair> {
        self.pairs.get(&(layer, kind))
    }

    /// Rank and scale by the module's name.
    pub fn factors(&self) -> BTreeMap<String, ModuleScale> {
        self.pairs
            .iter()
            .map(|((layer, kind), pair)| {
                let r = pair.a.dims().first().copied().unwrap_or(0);
                (module_name(*layer, *kind), ModuleScale { r, scale: pair.scale })
            })
            .collect()
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

    /// An adapter of its own with the same values.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn copy(&self) -> Result<Self> {
        let own =
            |var: &Var| -> Result<Var> { Ok(Var::from_tensor(&var.as_detached_tensor().copy()?)?) };
        let pairs = self.pairs.iter().map(|(place, pair)| {
            Ok((*place, Pair { a: own(&pair.a)?, b: own(&pair.b)?, scale: pair.scale }))
        });
        Ok(Self { pairs: pairs.collect::<Result<_>>()? })
    }

    /// A copy that changes nothing: A as here, B zero.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn silent(&self) -> Result<Self> {
        let copy = self.copy()?;
        for pair in copy.pairs.values() {
            pair.b.set(&pair.b.zeros_like()?)?;
        }
        Ok(copy)
    }

    /// Moves every factor by `share` of its way to `other`'s, which has the same modules and ranks.
    ///
    /// # Errors
    /// If the shapes differ.
    pub fn approach(&self, other: &Self, share: f64) -> Result<()> {
        for ((_, own), (_, new)) in self.parameters().iter().zip(other.parameters()) {
            let old = own.as_detached_tensor();
            let change = ((new.as_detached_tensor() - &old)? * share)?;
            own.set(&(old + change)?)?;
        }
        Ok(())
    }

    /// Takes the values of tensors under their PEFT names; names it does not have are ignored.
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

/// First values of A, `[r, inp]` by rows.
fn starting(init: LoraInit, r: usize, inp: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
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

/// Rank and scale of every linear layer that carries an adapter.
pub(crate) type Plan = BTreeMap<(usize, LinearKind), ModuleScale>;

/// What settings mean for a model.
///
/// # Errors
/// If a rank is 0, a pattern does not compile, no module is chosen, or a name of the list means no
/// module of the model.
pub fn plan(spec: &ModelSpec, config: &LoraConfig) -> Result<Plan> {
    let wrong = |key, value: String, expected| Err(ModelError::Setting { key, value, expected });
    if config.r == 0 {
        return wrong("train.lora.r", "0".to_owned(), "at least 1");
    }
    let rules = ModuleRules::new(&fitted(spec, config)).map_err(|(key, reason)| {
        ModelError::Unsupported(format!("`train.lora.{key}` cannot be used: {reason}"))
    })?;
    let names: Vec<String> = places(spec).map(|(layer, kind)| module_name(layer, kind)).collect();
    let unmatched = rules.unmatched(&names);
    if !unmatched.is_empty() {
        let hint = match spec.fused {
            true => {
                ": its q, k and v are one layer, `qkv_proj`, and gate and up are `gate_up_proj`"
            }
            false => "",
        };
        return Err(ModelError::Unsupported(format!(
            "`train.lora.target_modules` names {}, but the model has no such linear layer{hint}",
            list(unmatched)
        )));
    }
    let plan: Plan = places(spec)
        .zip(&names)
        .filter_map(|(place, name)| Some((place, rules.factor(name)?)))
        .collect();
    if plan.is_empty() {
        return wrong(
            "train.lora.target_modules",
            serde_json::to_string(&config.target_modules).unwrap_or_default(),
            "names or a pattern of at least one linear layer that is not excluded",
        );
    }
    if plan.values().any(|factor| factor.r == 0) {
        return wrong("train.lora.rank_pattern", "0".to_owned(), "at least 1 for every module");
    }
    Ok(plan)
}

/// Settings as they fit the model: see [`Modules::fused`].
///
/// [`Modules::fused`]: crate::adapter::Modules::fused
pub fn fitted(spec: &ModelSpec, config: &LoraConfig) -> LoraConfig {
    match spec.fused {
        true => LoraConfig { target_modules: config.target_modules.fused(), ..config.clone() },
        false => config.clone(),
    }
}

/// The same by the modules' names.
pub fn named_plan(spec: &ModelSpec, config: &LoraConfig) -> Result<BTreeMap<String, ModuleScale>> {
    let named = |((layer, kind), factor)| (module_name(layer, kind), factor);
    Ok(plan(spec, config)?.into_iter().map(named).collect())
}

/// The linear layers that can carry an adapter.
fn places(spec: &ModelSpec) -> impl Iterator<Item = (usize, LinearKind)> {
    (0..spec.num_layers).flat_map(|layer| spec.linears(layer).map(move |(kind, _)| (layer, kind)))
}

/// Tells of tensors on modules that the model does not have.
fn unknown_modules(spec: &ModelSpec, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let known: BTreeSet<String> =
        places(spec).flat_map(|(layer, kind)| peft_names(layer, kind)).collect();
    let unknown: BTreeSet<String> = tensors
        .keys()
        .filter(|name| !known.contains(*name))
        .map(|name| {
            let module = name.strip_prefix(PREFIX).unwrap_or(name);
            let halves = [".lora_A.weight", ".lora_B.weight"];
            halves.iter().find_map(|half| module.strip_suffix(half)).unwrap_or(module).to_owned()
        })
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(ModelError::Weights(format!(
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

/// What PEFT puts before the model's own names.
pub(crate) const PREFIX: &str = "base_model.model.";

fn module_name(layer: usize, kind: LinearKind) -> String {
    format!("model.layers.{layer}.{}.{}", kind.parent(), kind.as_str())
}

/// The names of A and B in `adapter_model.safetensors`.
pub(crate) fn peft_names(layer: usize, kind: LinearKind) -> [String; 2] {
    let module = module_name(layer, kind);
    [format!("{PREFIX}{module}.lora_A.weight"), format!("{PREFIX}{module}.lora_B.weight")]
}
