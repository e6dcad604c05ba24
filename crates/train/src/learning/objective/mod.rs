//! From a pass's log-probabilities and entropies to slopes and statistics.
//!
//! A pass has up to two phases. [`Objective::plan`] fixes what depends on the whole optimiser step:
//! the tokens' weights, and, where only the most uncertain tokens are trained on, the entropy
//! threshold, for which [`Objective::wants_entropies`] asks for a forward pass over all samples
//! first. [`StepPlan::sample`] then gives the slopes of one sample, shard by shard.

mod figures;
mod totals;

use serde::{Deserialize, Serialize};

use super::float_bits;
use super::loss::{
    LossConfig, LossSequence, TokenWeights, entropy, kl, sequence_loss, sequence_weights,
};
use crate::config::{CorrectionMode, TrainConfig};
use crate::data::packing::TrainSample;

pub(crate) use figures::completions;
pub(crate) use totals::Totals;

/// What the coefficients that follow a target have come to; part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdaptiveCoefficients {
    /// Coefficient of the KL.
    #[serde(with = "float_bits")]
    pub beta: f64,
    /// Coefficient of the entropy bonus.
    #[serde(with = "float_bits")]
    pub entropy_coef: f64,
    /// The last update's mean entropy; infinite before the first.
    #[serde(with = "float_bits")]
    pub entropy: f64,
}

impl AdaptiveCoefficients {
    /// As configured, before the first update.
    pub fn new(config: &TrainConfig) -> Self {
        Self { beta: config.beta, entropy_coef: config.entropy.coef, entropy: f64::INFINITY }
    }

    /// Coefficients that the configuration keeps fixed are the configuration's.
    pub fn configured(self, config: &TrainConfig) -> Self {
        let fresh = Self::new(config);
        Self {
            beta: if config.kl.target > 0.0 { self.beta } else { fresh.beta },
            entropy_coef: if config.entropy.adaptive {
                self.entropy_coef
            } else {
                fresh.entropy_coef
            },
            ..self
        }
    }

    /// Follows one update.
    pub fn update(&mut self, totals: &Totals, config: &TrainConfig) {
        if let Some(kl) = totals.kl() {
            self.beta = kl::adapted_beta(self.beta, kl, totals.samples, &config.kl);
        }
        if let Some(entropy) = totals.open_entropy() {
            self.entropy_coef = entropy::adapted_coef(self.entropy_coef, entropy, &config.entropy);
            self.entropy = entropy;
        }
    }
}

/// The loss of one optimiser step's updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Objective {
    loss: LossConfig,
    /// Coefficient of the entropy bonus.
    bonus: f64,
    top_share: f64,
}

impl Objective {
    pub fn new(config: &TrainConfig, adaptive: &AdaptiveCoefficients) -> Self {
        Self {
            loss: LossConfig::new(config, adaptive.beta),
            bonus: entropy::acting(adaptive.entropy_coef, adaptive.entropy, &config.entropy),
            top_share: config.top_entropy_quantile,
        }
    }

    /// Whether [`Self::plan`] needs the entropies of all tokens that are trained on.
    pub fn wants_entropies(&self) -> bool {
        self.top_share < 1.0
    }

    /// Whether log-probabilities from before the step's first update are needed.
    pub fn wants_old(&self) -> bool {
        self.loss.correction != CorrectionMode::None
    }

    /// Fixes what depends on the whole step: `lengths` by sample, 0 for those that are not trained
    /// on, and the entropies of all their tokens where they are wanted.
    pub fn plan(&self, lengths: &[usize], max_tokens: usize, entropies: &[f64]) -> StepPlan {
        let threshold = entropy::threshold(entropies, self.top_share);
        let open = match threshold {
            Some(least) => entropies.iter().filter(|entropy| **entropy >= least).count(),
            None => lengths.iter().sum(),
        };
        StepPlan {
            loss: self.loss,
            weights: sequence_weights(self.loss.kind, lengths, max_tokens),
            entropy_weight: self.bonus / open.max(1) as f64,
            threshold,
        }
    }
}

/// The forward pass of one sample's tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenRows<'a> {
    pub logprobs: &'a [f64],
    pub entropies: &'a [f64],
    /// Log-probabilities from before the step's first update.
    pub old: Option<&'a [f64]>,
    /// The reference's log-probabilities.
    pub reference: Option<&'a [f64]>,
}

/// The derivatives of the loss by a pass's log-probabilities and entropies, row by row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LossGradients {
    pub logprob: Vec<f64>,
    pub entropy: Vec<f64>,
}

/// An [`Objective`] whose step is known.
#[derive(Clone, Debug)]
pub(crate) struct StepPlan {
    loss: LossConfig,
    weights: Vec<f64>,
    entropy_weight: f64,
    threshold: Option<f64>,
}

impl StepPlan {
    /// Appends the slopes of the sample at `index` and counts it; a sample of weight 0 has slopes of 0
    /// and counts nowhere.
    pub fn sample(
        &self,
        index: usize,
        sample: &TrainSample,
        rows: &TokenRows<'_>,
        slopes: &mut LossGradients,
        totals: &mut Totals,
    ) {
        let weight = self.weights.get(index).copied().unwrap_or(0.0);
        if weight == 0.0 {
            slopes.logprob.resize(slopes.logprob.len() + rows.logprobs.len(), 0.0);
            slopes.entropy.resize(slopes.entropy.len() + rows.logprobs.len(), 0.0);
            return;
        }
        let recorded: Vec<f64> = sample.logprobs.iter().map(|l| f64::from(*l)).collect();
        let sequence = LossSequence {
            logprobs: rows.logprobs,
            entropies: rows.entropies,
            recorded: &recorded,
            old: rows.old,
            reference: rows.reference,
            advantage: sample.advantage,
        };
        let weights =
            TokenWeights { loss: weight, entropy: self.entropy_weight, threshold: self.threshold };
        let loss = sequence_loss(&sequence, &weights, &self.loss);
        totals.sequence(&sequence, &loss);
        slopes.logprob.extend(loss.logprob_slopes);
        slopes.entropy.extend(loss.entropy_slopes);
    }
}

#[cfg(test)]
mod tests;
