//! AdamW over named variables, with moments that can be saved.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};

use super::error::{LearnError, Result};

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
}

/// First and second moment of one variable, shaped as it.
#[derive(Clone, Debug)]
pub struct AdamMoments {
    /// `m`, the running mean of the gradient.
    pub first: Tensor,
    /// `v`, the running mean of its square.
    pub second: Tensor,
}

/// Decoupled weight decay (Loshchilov & Hutter 2019), operation by operation as `torch.optim.AdamW`:
///
/// ```text
/// p <- p (1 - lr decay)
/// m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
/// p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
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

    /// The moments by variable name.
    pub fn moments(&self) -> &BTreeMap<String, AdamMoments> {
        &self.moments
    }

    /// Goes on from saved moments.
    pub fn restore(&mut self, updates: u64, moments: BTreeMap<String, AdamMoments>) {
        self.updates = updates;
        self.moments = moments;
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.updates = 0;
        self.moments.clear();
    }

    /// One update of every variable that `gradients` names; the others are left alone.
    ///
    /// # Errors
    /// If a gradient is not shaped as its variable; nothing is changed then.
    pub fn update(
        &mut self,
        variables: &[(String, &Var)],
        gradients: &BTreeMap<String, Tensor>,
        learning_rate: f64,
    ) -> Result<()> {
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        let t = i32::try_from(self.updates + 1).unwrap_or(i32::MAX);
        let step_size = learning_rate / (1.0 - beta1.powi(t));
        let root = (1.0 - beta2.powi(t)).sqrt();
        let mut changed = Vec::new();
        for (name, variable) in variables {
            let Some(gradient) = gradients.get(name) else { continue };
            if gradient.dims() != variable.dims() {
                return Err(LearnError::Weights(format!(
                    "the gradient of `{name}` has shape {:?}, the variable {:?}",
                    gradient.dims(),
                    variable.dims()
                )));
            }
            let (first, second) = match self.moments.get(name) {
                Some(m) => (m.first.clone(), m.second.clone()),
                None => (gradient.zeros_like()?, gradient.zeros_like()?),
            };
            let first = ((first * beta1)? + (gradient * (1.0 - beta1))?)?;
            let second = ((second * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
            let denominator = ((second.sqrt()? / root)? + eps)?;
            let decayed = (variable.as_detached_tensor() * (1.0 - learning_rate * weight_decay))?;
            let value = (decayed - ((&first / denominator)? * step_size)?)?;
            changed.push((name, variable, value, AdamMoments { first, second }));
        }
        for (name, variable, value, moments) in changed {
            variable.set(&value)?;
            self.moments.insert(name.clone(), moments);
        }
        self.updates += 1;
        Ok(())
    }
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
