//! From the log-probabilities and entropies of a forward pass to the gradient of the loss with
//! respect to them, and to metrics.
//!
//! [`Objective::new`] fixes what depends on the whole optimizer step: the tokens' weights and the
//! entropy threshold. [`Objective::add_sequence`] then handles the sequences one by one.

mod totals;

use serde::{Deserialize, Serialize};

use super::float_bits;
use super::loss::{LossCoefficients, LossSequence, sequence_loss, sequence_weights};
use crate::config::TrainConfig;

pub(crate) use totals::StepTotals;

/// Current values of the coefficients that may follow a target; a part of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdaptiveCoefficients {
    /// Coefficient of the KL.
    #[serde(with = "float_bits")]
    pub beta: f64,
    /// Coefficient of the entropy bonus.
    #[serde(with = "float_bits")]
    pub entropy_coef: f64,
    /// Mean entropy of the last update, in nats; infinite before the first.
    #[serde(with = "float_bits")]
    pub entropy: f64,
}

impl AdaptiveCoefficients {
    /// The configured values, before the first update.
    pub fn new(config: &TrainConfig) -> Self {
        Self { beta: config.beta, entropy_coef: config.entropy.coef, entropy: f64::INFINITY }
    }

    /// Replaces restored coefficients that are not adaptive with the configured values.
    pub fn configured(self, config: &TrainConfig) -> Self {
        let beta = if config.kl.target > 0.0 { self.beta } else { config.beta };
        let entropy_coef =
            if config.entropy.adaptive { self.entropy_coef } else { config.entropy.coef };
        Self { beta, entropy_coef, ..self }
    }

    /// Adapts the coefficients after one update.
    pub fn update(&mut self, totals: &StepTotals, config: &TrainConfig) {
        if let Some(kl) = totals.kl() {
            self.beta = super::loss::adapted_beta(self.beta, kl, totals.samples, &config.kl);
        }
        if let Some(entropy) = totals.selected_entropy() {
            self.entropy_coef =
                super::loss::adapted_coef(self.entropy_coef, entropy, &config.entropy);
            self.entropy = entropy;
        }
    }
}

/// The loss of one update, with the values that depend on the whole optimizer step.
pub(crate) struct Objective<'a> {
    config: &'a TrainConfig,
    /// Token weight of each sample.
    weights: Vec<f64>,
    /// Coefficients of all samples, except for the token weight.
    coefficients: LossCoefficients,
    /// Weight of each token of a correction.
    correction: f64,
}

impl<'a> Objective<'a> {
    /// `lengths` has the completion length of each sample, 0 for those that are not trained on,
    /// `sequences` the sequence that it is a part of, and
    /// `entropies` those of all trained tokens if `train.top_entropy_quantile` is below 1.
    pub fn new(
        config: &'a TrainConfig,
        adaptive: &AdaptiveCoefficients,
        lengths: &[usize],
        sequences: &[usize],
        max_completion_tokens: usize,
        entropies: &[f64],
    ) -> Self {
        let entropy_coef = super::loss::active_entropy_coef(
            adaptive.entropy_coef,
            adaptive.entropy,
            &config.entropy,
        );
        let entropy_threshold =
            super::loss::entropy_threshold(entropies, config.top_entropy_quantile);
        let selected = match entropy_threshold {
            Some(least) => entropies.iter().filter(|entropy| **entropy >= least).count(),
            None => lengths.iter().sum(),
        };
        let coefficients = LossCoefficients {
            token: 0.0,
            entropy: entropy_coef / selected.max(1) as f64,
            entropy_threshold,
            beta: adaptive.beta,
        };
        let weights = sequence_weights(config.loss, lengths, sequences, max_completion_tokens);
        Self { config, weights, coefficients, correction: 0.0 }
    }

    /// Appends `[dloss/dlogp, dloss/dentropy]` of every token of sample `index` to `gradients`, and
    /// adds the sample to `totals`. A sample of weight 0 has gradients of 0 and is not counted.
    pub fn add_sequence(
        &self,
        index: usize,
        sequence: &LossSequence<'_>,
        gradients: &mut Vec<[f64; 2]>,
        totals: &mut StepTotals,
    ) {
        let token = self.weights.get(index).copied().unwrap_or(0.0);
        if token == 0.0 {
            gradients.extend(sequence.logprobs.iter().map(|_| [0.0; 2]));
            return;
        }
        let coefficients = LossCoefficients { token, ..self.coefficients };
        let loss = sequence_loss(sequence, &coefficients, self.config);
        totals.add_sequence(sequence, &loss);
        let pairs = loss.dloss_dlogp.into_iter().zip(loss.dloss_dentropy);
        gradients.extend(pairs.map(|(dlogp, dentropy)| [dlogp, dentropy]));
    }
}

// The loss of corrections: texts that clients wrote in place of a completion.

impl Objective<'_> {
    /// The same objective for a step with this number of corrections' tokens. It adds
    ///
    /// ```text
    /// train.correction_weight * mean over all tokens of the step's corrections of -l
    /// ```
    ///
    /// to the loss, where `l` is the policy's log-probability at temperature 1. The mean over tokens is
    /// that of supervised fine-tuning (TRL's `SFTTrainer`); InstructGPT adds a weighted log-likelihood
    /// to its reinforcement learning objective in the same way (Ouyang et al. 2022, eq. 2). There is no
    /// importance ratio, because no policy sampled the text, and no KL and no entropy bonus.
    pub fn with_corrections(self, tokens: usize) -> Self {
        let correction = self.config.correction_weight / tokens.max(1) as f64;
        Self { correction, ..self }
    }

    /// Appends `[dloss/dlogp, dloss/dentropy]` of every token of a correction to `gradients`, and adds
    /// the correction to `totals`. `logprobs` are the policy's.
    pub fn add_correction(
        &self,
        logprobs: &[f64],
        gradients: &mut Vec<[f64; 2]>,
        totals: &mut StepTotals,
    ) {
        let nll = -logprobs.iter().sum::<f64>();
        totals.loss += self.correction * nll;
        totals.add_correction(logprobs.len(), nll);
        gradients.extend(logprobs.iter().map(|_| [-self.correction, 0.0]));
    }
}

#[cfg(test)]
mod tests;
