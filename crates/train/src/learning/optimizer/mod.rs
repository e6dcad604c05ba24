//! AdamW over named variables, with moments that can be saved, in 32 or 8 bits.

mod quantized_moments;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};

use hone_model::ModelError;

use super::optimizer::quantized_moments::{BLOCK, Blocks, CodeBook, SIGNED, SMALLEST, UNSIGNED};
use crate::error::{LearnError, Result};

/// Settings of [`AdamW`], all but the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Whether moments of 4096 values or more are kept in eight bits each.
    pub eight_bit: bool,
}

/// One moment of one variable.
#[derive(Clone, Debug)]
enum Moment {
    /// Shaped and typed as the variable.
    Whole(Tensor),
    /// Its values by rows.
    Blocks(Blocks),
}

impl Moment {
    fn whole(&self, like: &Tensor, book: &CodeBook) -> Result<Tensor> {
        Ok(match self {
            Self::Whole(tensor) => tensor.clone(),
            Self::Blocks(blocks) => {
                Tensor::from_vec(blocks.decode(book), like.shape(), like.device())?
                    .to_dtype(like.dtype())?
            }
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Whole(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Blocks(blocks) => blocks.bytes(),
        }
    }
}

/// First moment `m`, the running mean of the gradient, and second moment `v`, that of its square.
#[derive(Clone, Debug)]
struct AdamMoments {
    first: Moment,
    second: Moment,
}

/// Decoupled weight decay (Loshchilov & Hutter 2019), operation by operation as `torch.optim.AdamW`:
///
/// ```text
/// p <- p (1 - lr decay)
/// m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
/// p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// With eight bits the same, and then m and v are rounded to what is kept of them.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// Updates done.
    updates: u64,
    moments: BTreeMap<String, AdamMoments>,
}

impl AdamW {
    /// An optimiser that has seen no gradient.
    pub fn new(config: AdamWConfig) -> Self {
        Self { config, updates: 0, moments: BTreeMap::new() }
    }

    /// Updates done.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Bytes that the moments take.
    pub fn bytes(&self) -> usize {
        self.moments.values().map(|m| m.first.bytes() + m.second.bytes()).sum()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.updates = 0;
        self.moments.clear();
    }

    /// Everything needed to go on exactly, but the number of updates: `NAME.first` and
    /// `NAME.second`, or, where kept in eight bits, `NAME.first.codes`, `NAME.first.maxima` and so on.
    ///
    /// # Errors
    /// If a tensor cannot be made.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (name, moments) in &self.moments {
            for (suffix, moment) in [("first", &moments.first), ("second", &moments.second)] {
                let name = format!("{name}.{suffix}");
                match moment {
                    Moment::Whole(tensor) => {
                        tensors.insert(name, tensor.clone());
                    }
                    Moment::Blocks(Blocks { codes, maxima }) => {
                        let list = Tensor::new(codes.as_slice(), &Device::Cpu)?;
                        tensors.insert(format!("{name}.codes"), list);
                        let list = Tensor::new(maxima.as_slice(), &Device::Cpu)?;
                        tensors.insert(format!("{name}.maxima"), list);
                    }
                }
            }
        }
        Ok(tensors)
    }

    /// Goes on from what [`Self::tensors`] gave. AdamMoments saved in another number of bits than is set
    /// now are taken over with the first update.
    ///
    /// # Errors
    /// If a moment does not fit its variable or belongs to none; nothing is changed then.
    pub fn restore(
        &mut self,
        updates: u64,
        variables: &[(String, &Var)],
        mut tensors: BTreeMap<String, Tensor>,
    ) -> Result<()> {
        let mut moments = BTreeMap::new();
        for (name, variable) in variables {
            let first = take(&mut tensors, &format!("{name}.first"), variable)?;
            let second = take(&mut tensors, &format!("{name}.second"), variable)?;
            match (first, second) {
                (Some(first), Some(second)) => {
                    moments.insert(name.clone(), AdamMoments { first, second });
                }
                (None, None) => {}
                _ => return Err(misfit(name)),
            }
        }
        if let Some(name) = tensors.keys().next() {
            return Err(misfit(name));
        }
        (self.updates, self.moments) = (updates, moments);
        Ok(())
    }

    /// One update of every variable that `gradients` names; the others are left alone. Returns
    /// whether it was done: a value or moment that would not be finite changes nothing.
    ///
    /// # Errors
    /// If a gradient is not shaped as its variable; nothing is changed then.
    pub fn update(
        &mut self,
        variables: &[(String, &Var)],
        gradients: &BTreeMap<String, Tensor>,
        learning_rate: f64,
    ) -> Result<bool> {
        let AdamWConfig { beta1, beta2, eps, weight_decay, eight_bit } = self.config;
        let t = i32::try_from(self.updates + 1).unwrap_or(i32::MAX);
        let step_size = learning_rate / (1.0 - beta1.powi(t));
        let root = (1.0 - beta2.powi(t)).sqrt();
        let mut changed = Vec::new();
        for (name, variable) in variables {
            let Some(gradient) = gradients.get(name) else { continue };
            if gradient.dims() != variable.dims() {
                let reason = format!(
                    "the gradient of `{name}` has shape {:?}, the variable {:?}",
                    gradient.dims(),
                    variable.dims()
                );
                return Err(ModelError::weights(reason).into());
            }
            let (first, second) = match self.moments.get(name) {
                Some(m) => {
                    (m.first.whole(gradient, &SIGNED)?, m.second.whole(gradient, &UNSIGNED)?)
                }
                None => (gradient.zeros_like()?, gradient.zeros_like()?),
            };
            let first = ((first * beta1)? + (gradient * (1.0 - beta1))?)?;
            let second = ((second * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
            let denominator = ((second.sqrt()? / root)? + eps)?;
            let decayed = (variable.as_detached_tensor() * (1.0 - learning_rate * weight_decay))?;
            let value = (decayed - ((&first / denominator)? * step_size)?)?;
            if !(is_finite(&value)? && is_finite(&second)?) {
                return Ok(false);
            }
            let moments = if eight_bit && variable.elem_count() >= SMALLEST {
                AdamMoments {
                    first: Moment::Blocks(Blocks::encode(&list(&first)?, &SIGNED, false)),
                    second: Moment::Blocks(Blocks::encode(&list(&second)?, &UNSIGNED, true)),
                }
            } else {
                AdamMoments { first: Moment::Whole(first), second: Moment::Whole(second) }
            };
            changed.push((name, variable, value, moments));
        }
        for (name, variable, value, moments) in changed {
            variable.set(&value)?;
            self.moments.insert(name.clone(), moments);
        }
        self.updates += 1;
        Ok(true)
    }
}

/// A saved moment, in whichever form it was kept.
fn take(
    tensors: &mut BTreeMap<String, Tensor>,
    name: &str,
    variable: &Var,
) -> Result<Option<Moment>> {
    if let Some(whole) = tensors.remove(name) {
        let fits = whole.dims() == variable.dims() && whole.dtype() == variable.dtype();
        return if fits { Ok(Some(Moment::Whole(whole))) } else { Err(misfit(name)) };
    }
    let parts = ["codes", "maxima"].map(|part| tensors.remove(&format!("{name}.{part}")));
    let (codes, maxima) = match parts {
        [Some(codes), Some(maxima)] => (codes, maxima),
        [None, None] => return Ok(None),
        _ => return Err(misfit(name)),
    };
    let count = variable.elem_count();
    if codes.dims() != [count] || maxima.dims() != [count.div_ceil(BLOCK)] {
        return Err(misfit(name));
    }
    Ok(Some(Moment::Blocks(Blocks { codes: codes.to_vec1()?, maxima: maxima.to_vec1()? })))
}

fn misfit(name: &str) -> LearnError {
    ModelError::weights(format!("the optimiser's moments of `{name}` do not fit")).into()
}

fn list(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    let values = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    Ok(values.iter().all(|x| x.is_finite()))
}

/// The Euclidean norm of all gradients together.
///
/// # Errors
/// If a tensor operation fails.
pub fn global_norm(gradients: &BTreeMap<String, Tensor>) -> Result<f64> {
    let mut sum = 0.0;
    for gradient in gradients.values() {
        sum += gradient.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    }
    Ok(sum.sqrt())
}

/// Scales all gradients by `limit / (norm + 1e-6)` if their norm is above `limit`
/// (`torch.nn.utils.clip_grad_norm_`); a limit of 0 leaves them alone. Returns the norm before.
///
/// # Errors
/// If a tensor operation fails.
pub fn clip_global_norm(gradients: &mut BTreeMap<String, Tensor>, limit: f64) -> Result<f64> {
    let norm = global_norm(gradients)?;
    let factor = limit / (norm + 1e-6);
    if limit > 0.0 && factor < 1.0 {
        for gradient in gradients.values_mut() {
            *gradient = (&*gradient * factor)?;
        }
    }
    Ok(norm)
}

#[cfg(test)]
mod tests;
