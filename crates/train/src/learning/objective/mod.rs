//! From the log-probabilities and entropies of a forward pass to the gradient of the loss with
//! respect to them, and to metrics.
//!
//! [`Objective::new`] fixes what depends on the whole optimizer step: the tokens' weights and the
//! entropy threshold. [`Objective::add_sequence`] then handles the sequences one by one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::float_bits;
use super::loss::{LossCoefficients, LossSequence, SequenceLoss, sequence_loss, sequence_weights};
use crate::config::{LossKind, TrainConfig};

/// Current values of the coefficients that may follow a target; a part of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdaptiveCoefficients {
    #[serde(with = "float_bits")]
    pub beta: f64,
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
            if config.entropy.is_adaptive() { self.entropy_coef } else { config.entropy.coef };
        Self { beta, entropy_coef, ..self }
    }

    /// Adapts the coefficients after one update.
    pub fn update(&mut self, totals: &StepTotals, config: &TrainConfig) {
        if let Some(kl) = totals.kl() {
            let beta = super::loss::adapted_beta(self.beta, kl, totals.samples, &config.kl);
            // Without bounds, a long time on one side of the target would take as long to undo.
            self.beta = beta.clamp(0.1 * config.beta, 100.0 * config.beta);
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
    weights: Vec<f64>,
    /// Coefficients of all samples, except for the token weight.
    coefficients: LossCoefficients,
    correction: f64,
}

impl<'a> Objective<'a> {
    /// `lengths` has the completion length of each sample, 0 for those that are left out, `sequences` the sequence that
    /// it is a part of, `entropies` those of all trained tokens if `train.top_entropy_quantile` is below 1, and
    /// `corrected` is the number of the corrections' tokens.
    pub fn new(
        config: &'a TrainConfig,
        adaptive: &AdaptiveCoefficients,
        lengths: &[usize],
        sequences: &[usize],
        max_completion_tokens: usize,
        entropies: &[f64],
        corrected: usize,
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
        let weights = sequence_weights(config.loss.kind, lengths, sequences, max_completion_tokens);
        let correction = config.correction_weight / corrected.max(1) as f64;
        Self { config, weights, coefficients, correction }
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
    /// As [`Self::add_sequence`], for a correction with the policy's `logprobs`. All corrections add
    ///
    /// ```text
    /// train.correction_weight * mean over all tokens of the step's corrections of -l
    /// ```
    ///
    /// to the loss, where `l` is the policy's log-probability at temperature 1. The mean over tokens is
    /// that of supervised fine-tuning (TRL's `SFTTrainer`); InstructGPT adds a weighted log-likelihood
    /// to its reinforcement learning objective in the same way (Ouyang et al. 2022, eq. 2). There is no
    /// importance ratio, because no policy sampled the text, and no KL and no entropy bonus.
    pub fn add_correction(
        &self,
        logprobs: &[f64],
        gradients: &mut Vec<[f64; 2]>,
        totals: &mut StepTotals,
    ) {
        let nll = -logprobs.iter().sum::<f64>();
        totals.loss += self.correction * nll;
        totals.corrections += 1.0;
        totals.correction_tokens += logprobs.len() as f64;
        totals.correction_nll += nll;
        gradients.extend(logprobs.iter().map(|_| [-self.correction, 0.0]));
    }
}

// Sums over tokens, samples and forward/backward passes, and the metrics computed from them.

/// Minimum, sum, maximum and number of a set of values.
#[derive(Clone, Copy, Debug)]
struct ValueSummary {
    min: f64,
    sum: f64,
    max: f64,
    count: f64,
}

impl Default for ValueSummary {
    fn default() -> Self {
        Self { min: f64::INFINITY, sum: 0.0, max: f64::NEG_INFINITY, count: 0.0 }
    }
}

impl ValueSummary {
    fn add(&mut self, value: f64) {
        self.merge(&Self { min: value, sum: value, max: value, count: 1.0 });
    }

    fn merge(&mut self, other: &Self) {
        self.min = self.min.min(other.min);
        self.sum += other.sum;
        self.max = self.max.max(other.max);
        self.count += other.count;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

/// Sums over all forward/backward passes of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepTotals {
    pub passes: f64,
    pub samples: f64,
    pub loss: f64,
    /// Number of completion tokens that are trained on.
    tokens: f64,
    /// Number of tokens that the forward passes computed, prompts included.
    pub computed_tokens: f64,
    /// Sum over tokens; `None` without a reference.
    kl: Option<f64>,
    entropy: f64,
    /// Number of tokens at or above the entropy threshold, and the sum of their entropies.
    selected_tokens: f64,
    selected_entropy: f64,
    /// Number of sequences masked as off policy.
    off_policy: f64,
    /// Fractions of each sequence's ratios that a bound cut.
    clipped_low: ValueSummary,
    clipped_high: ValueSummary,
    /// Numbers of ratios that a bound cut.
    cut_low: f64,
    cut_high: f64,
    ratio: ValueSummary,
    sampler_ratio: ValueSummary,
    /// Weight of each sequence with `vespo`.
    vespo_weight: ValueSummary,
    /// |recorded - recomputed| log-probabilities of samples of the current version.
    difference: ValueSummary,
    /// Number of corrections, of their tokens, and the sum of the tokens' negative log-probabilities.
    corrections: f64,
    correction_tokens: f64,
    correction_nll: f64,
}

impl StepTotals {
    pub fn of_one_pass() -> Self {
        Self { passes: 1.0, ..Self::default() }
    }

    pub fn add_sequence(&mut self, sequence: &LossSequence<'_>, loss: &SequenceLoss) {
        self.samples += 1.0;
        self.tokens += sequence.logprobs.len() as f64;
        self.loss += loss.loss;
        if sequence.reference.is_some() {
            *self.kl.get_or_insert(0.0) += loss.kl;
        }
        self.entropy += sequence.entropies.iter().sum::<f64>();
        self.selected_tokens += loss.selected_tokens as f64;
        self.selected_entropy += loss.selected_entropy;
        self.off_policy += f64::from(u8::from(loss.off_policy));
        self.clipped_low.add(loss.clipped_low);
        self.clipped_high.add(loss.clipped_high);
        let ratios = loss.ratios.len() as f64;
        self.cut_low += loss.clipped_low * ratios;
        self.cut_high += loss.clipped_high * ratios;
        loss.ratios.iter().for_each(|ratio| self.ratio.add(*ratio));
        loss.sampler_weights.iter().for_each(|weight| self.sampler_ratio.add(*weight));
        loss.vespo_weight.iter().for_each(|weight| self.vespo_weight.add(*weight));
    }

    /// Adds one sample's |recorded - recomputed| log-probabilities; returns their mean.
    pub fn add_difference(&mut self, recorded: &[f64], recomputed: &[f64]) -> f64 {
        let mut own = ValueSummary::default();
        for (recorded, recomputed) in recorded.iter().zip(recomputed) {
            own.add((recorded - recomputed).abs());
        }
        self.difference.merge(&own);
        own.sum / recomputed.len() as f64
    }

    /// Adds the totals of another shard or pass.
    pub fn add(&mut self, other: &Self) {
        self.passes += other.passes;
        self.samples += other.samples;
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.computed_tokens += other.computed_tokens;
        if let Some(kl) = other.kl {
            *self.kl.get_or_insert(0.0) += kl;
        }
        self.entropy += other.entropy;
        self.selected_tokens += other.selected_tokens;
        self.selected_entropy += other.selected_entropy;
        self.off_policy += other.off_policy;
        self.cut_low += other.cut_low;
        self.cut_high += other.cut_high;
        self.corrections += other.corrections;
        self.correction_tokens += other.correction_tokens;
        self.correction_nll += other.correction_nll;
        for (own, other) in [
            (&mut self.clipped_low, &other.clipped_low),
            (&mut self.clipped_high, &other.clipped_high),
            (&mut self.ratio, &other.ratio),
            (&mut self.sampler_ratio, &other.sampler_ratio),
            (&mut self.vespo_weight, &other.vespo_weight),
            (&mut self.difference, &other.difference),
        ] {
            own.merge(other);
        }
    }

    /// Mean of the KL term over tokens; `None` if it is not computed.
    pub fn kl(&self) -> Option<f64> {
        self.kl.map(|kl| kl / self.tokens.max(1.0))
    }

    /// Mean entropy of the tokens at or above the entropy threshold.
    pub fn selected_entropy(&self) -> Option<f64> {
        (self.selected_tokens > 0.0).then(|| self.selected_entropy / self.selected_tokens)
    }

    /// Inserts the metrics that [`StepStats`](crate::StepStats) documents.
    pub fn insert_metrics(&self, config: &TrainConfig, metrics: &mut BTreeMap<String, f64>) {
        let mut put = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        let trained = self.tokens + self.correction_tokens;
        if trained > 0.0 {
            put("loss", self.loss / self.passes);
            put("loss_token_fraction", trained / self.computed_tokens.max(1.0));
        }
        if self.corrections > 0.0 {
            put("correction/nll", self.correction_nll / self.correction_tokens);
            put("correction/samples", self.corrections / self.passes);
        }
        if self.tokens > 0.0 {
            put("entropy", self.entropy / self.tokens);
            put("tokens", self.tokens / self.passes);
            put("samples", self.samples / self.passes);
            if let Some(kl) = self.kl() {
                put("kl", kl);
            }
            if config.off_policy_mask_threshold > 0.0 {
                put("off_policy_ratio", self.off_policy / self.samples);
            }
        }
        if let Some(mean) = self.ratio.mean() {
            put("ratio_min", self.ratio.min);
            put("ratio_mean", mean);
            put("ratio_max", self.ratio.max);
            let clips = config.loss.kind.clips();
            if clips {
                put("clip_low", self.cut_low / self.ratio.count);
                put("clip_low_min", self.clipped_low.min);
                put("clip_region", (self.cut_low + self.cut_high) / self.ratio.count);
            }
            if clips || config.loss.kind == LossKind::Cispo {
                put("clip_high", self.cut_high / self.ratio.count);
                put("clip_high_max", self.clipped_high.max);
            }
        }
        if let Some(mean) = self.sampler_ratio.mean() {
            put("sampler_ratio_min", self.sampler_ratio.min);
            put("sampler_ratio_mean", mean);
            put("sampler_ratio_max", self.sampler_ratio.max);
        }
        if let Some(mean) = self.vespo_weight.mean() {
            put("vespo_phi", mean);
        }
        if let Some(mean) = self.difference.mean() {
            put("sampler_difference_mean", mean);
            put("sampler_difference_max", self.difference.max);
        }
    }
}

#[cfg(test)]
mod tests;
