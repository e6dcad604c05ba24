//! The policy-gradient loss, sequence by sequence, as pure functions of log-probabilities and
//! entropies that give values and analytic slopes.
//!
//! For token t of sample i, with the policy's log-probability `l`, the one `o` that its ratio is
//! taken against, the sampler's recorded one `s`, the reference's `f` (the base, adapters off), the
//! entropy `H` and the advantage `A`:
//!
//! ```text
//! ratio r = exp(l - o)                          token level
//!         = exp(mean over tokens of l - o)      sequence level (GSPO, Zheng et al. 2025), for all tokens
//! loss    = sum over tokens of w_i (m rho surrogate(r, l, A) + beta kl) - coef mean(H)
//! ```
//!
//! - `surrogate`: [`surrogate()`]; `kl`: [`kl::estimate`], times r where it is corrected;
//! - `rho`: [`correction::sampler_weights`], or, of `vespo`, [`vespo::weight`]; `m`: 0 for tokens
//!   below the entropy threshold ([`entropy::threshold`]) and for sequences that
//!   [`correction::keeps`] drops, else 1. Neither acts on the KL or on `w_i`;
//! - `w_i`: [`sequence_weights`], fixed for the whole optimiser step like the threshold and the
//!   number of tokens in `mean(H)` (all, or those above the threshold), so that the loss and its
//!   gradient do not depend on how the step is cut into micro-batches.
//!
//! Without a sampler correction `o` is `s`: the recorded log-probabilities are the behaviour policy's
//! and the surrogate's ratio corrects for all that happened since, the sampler's own rounding and
//! the optimiser steps between sampling and training alike. With one, the two are taken apart
//! (decoupled PPO, Hilton et al. 2022): `o` is recomputed by the trainer before the step's first
//! update, rho = exp(o - s) corrects from the sampler to there, and the clipped ratio covers the
//! step's own updates.
//!
//! All log-probabilities are natural and at the sample's temperature T: of `softmax(logits / T)`,
//! policy and reference alike. Prompt and padding carry no loss; the sampled stop token does. As the
//! loss depends on the network through `l` and `H` alone, its gradient is `dl` and `dH` weighted by
//! the slopes.

pub mod correction;
pub mod entropy;
pub mod kl;
mod surrogate;
pub mod vespo;
mod weights;

use crate::config::{CorrectionMode, KlEstimator, LossKind, RatioLevel, TrainConfig, VespoConfig};

pub use surrogate::{Surrogate, clipped, surrogate};
pub use weights::sequence_weights;

/// Settings of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossConfig {
    /// The surrogate.
    pub kind: LossKind,
    /// What the ratio is taken of.
    pub level: RatioLevel,
    /// The ratio's lower bound is 1 minus this.
    pub clip_low: f64,
    /// The ratio's upper bound is 1 plus this.
    pub clip_high: f64,
    /// Bound of the ratio; 0 is none.
    pub delta: f64,
    /// Bound of the loss at negative advantages; 0 is none.
    pub dual_clip: f64,
    /// sapo's tau for positive advantages.
    pub sapo_tau_pos: f64,
    /// sapo's tau for the others.
    pub sapo_tau_neg: f64,
    /// See [`vespo::weight`].
    pub vespo: VespoConfig,
    /// Coefficient of the KL.
    pub beta: f64,
    /// Its estimator.
    pub kl: KlEstimator,
    /// See [`correction::keeps`].
    pub off_policy_threshold: f64,
    /// See [`correction::sampler_weights`].
    pub correction: CorrectionMode,
    /// Lower bound of its weights.
    pub correction_min: f64,
    /// Upper bound of its weights; 0 is none.
    pub correction_max: f64,
}

impl LossConfig {
    /// As configured, with the beta in force.
    pub fn new(config: &TrainConfig, beta: f64) -> Self {
        let level = match config.loss {
            LossKind::Gspo => RatioLevel::Sequence,
            _ => config.importance_sampling_level,
        };
        Self {
            kind: config.loss,
            level,
            clip_low: config.clip_low,
            clip_high: config.clip_high,
            delta: config.delta,
            dual_clip: config.dual_clip,
            sapo_tau_pos: config.sapo_tau_pos,
            sapo_tau_neg: config.sapo_tau_neg,
            vespo: config.vespo,
            beta,
            kl: config.kl.estimator,
            off_policy_threshold: config.off_policy_mask_threshold,
            correction: config.sampler_correction.mode,
            correction_min: config.sampler_correction.clip_min,
            correction_max: config.sampler_correction.clip_max,
        }
    }
}

/// One completion as the loss sees it; all slices are of its length.
#[derive(Clone, Copy, Debug)]
pub struct LossSequence<'a> {
    /// The policy's log-probabilities.
    pub logprobs: &'a [f64],
    /// The policy's entropies.
    pub entropies: &'a [f64],
    /// The log-probabilities that the sampler recorded.
    pub recorded: &'a [f64],
    /// Those before the step's first update; `None` stands for the recorded ones.
    pub old: Option<&'a [f64]>,
    /// The reference's; `None` leaves the KL out.
    pub reference: Option<&'a [f64]>,
    /// Its advantage.
    pub advantage: f64,
}

/// What a sequence's tokens count within the whole optimiser step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenWeights {
    /// Of surrogate and KL: [`sequence_weights`].
    pub loss: f64,
    /// Of the entropy: the coefficient over the number of tokens that it acts on.
    pub entropy: f64,
    /// Tokens below this entropy carry neither surrogate nor bonus.
    pub threshold: Option<f64>,
}

/// What one sequence contributes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceLoss {
    /// Weighted, with KL and bonus.
    pub loss: f64,
    /// Its derivative by each log-probability.
    pub logprob_slopes: Vec<f64>,
    /// Its derivative by each entropy.
    pub entropy_slopes: Vec<f64>,
    /// The ratio of each token, or the sequence's one.
    pub ratios: Vec<f64>,
    /// Share of [`Self::ratios`] whose gradient the lower bound cut (`A < 0`).
    pub clipped_low: f64,
    /// Share of [`Self::ratios`] whose gradient the upper bound cut (`A > 0`).
    pub clipped_high: f64,
    /// Sum of the KL terms over tokens; 0 without a reference.
    pub kl: f64,
    /// Tokens at or above the entropy threshold, and the sum of their entropies.
    pub open: (usize, f64),
    /// The sampler correction's weights, one for each token or one for the sequence.
    pub sampler_weights: Vec<f64>,
    /// Its weight by `vespo`.
    pub phi: Option<f64>,
    /// Whether its surrogate was dropped as too far off policy.
    pub off_policy: bool,
}

/// The loss of one sequence. A token whose factor is 0 has no surrogate whatever its ratio.
pub fn sequence_loss(
    sequence: &LossSequence<'_>,
    weights: &TokenWeights,
    config: &LossConfig,
) -> SequenceLoss {
    let LossSequence { logprobs, entropies, recorded, advantage, .. } = *sequence;
    let count = logprobs.len();
    let old = sequence.old.unwrap_or(recorded);
    let log_ratios = logprobs.iter().zip(old).map(|(l, o)| l - o);
    let ratios: Vec<f64> = match config.level {
        RatioLevel::Token => log_ratios.map(f64::exp).collect(),
        RatioLevel::Sequence => vec![(log_ratios.sum::<f64>() / count.max(1) as f64).exp()],
    };
    let sampler_weights = correction::sampler_weights(
        config.correction,
        old,
        recorded,
        config.correction_min,
        config.correction_max,
    );
    let kept = correction::keeps(advantage, logprobs, recorded, config.off_policy_threshold);
    let phi = (config.kind == LossKind::Vespo)
        .then(|| vespo::weight(logprobs, old, &sampler_weights, advantage, &config.vespo));
    // One value for all tokens, or one for each.
    let at = |list: &[f64], t: usize| if list.len() == 1 { list[0] } else { list[t] };
    let mut out = SequenceLoss {
        logprob_slopes: vec![0.0; count],
        entropy_slopes: vec![0.0; count],
        off_policy: !kept,
        phi,
        ..SequenceLoss::default()
    };
    let mut by_log_ratio = vec![0.0; count];
    for t in 0..count {
        let open = weights.threshold.is_none_or(|least| entropies[t] >= least);
        if open {
            out.open.0 += 1;
            out.open.1 += entropies[t];
            out.loss -= weights.entropy * entropies[t];
            out.entropy_slopes[t] = -weights.entropy;
        }
        let rho = match phi {
            Some(phi) => phi,
            None if sampler_weights.is_empty() => 1.0,
            None => at(&sampler_weights, t),
        };
        let factor = if open && kept { rho } else { 0.0 };
        let ratio = at(&ratios, t);
        let (mut loss, mut slope) = (0.0, 0.0);
        if factor != 0.0 {
            let term = surrogate(ratio, logprobs[t], advantage, config);
            loss += factor * term.value;
            slope += factor * term.by_logprob;
            by_log_ratio[t] += factor * term.by_log_ratio;
        }
        if let Some(reference) = sequence.reference {
            let (value, by_logprob) = kl::estimate(config.kl, logprobs[t], reference[t]);
            let scale = if config.kl == KlEstimator::Corrected { ratio } else { 1.0 };
            out.kl += scale * value;
            loss += config.beta * scale * value;
            slope += config.beta * scale * by_logprob;
            if config.kl == KlEstimator::Corrected {
                by_log_ratio[t] += config.beta * ratio * value;
            }
        }
        out.loss += weights.loss * loss;
        out.logprob_slopes[t] = slope;
    }
    if config.level == RatioLevel::Sequence {
        // Every log-probability moves the one ratio by its share.
        let mean = by_log_ratio.iter().sum::<f64>() / count.max(1) as f64;
        by_log_ratio.fill(mean);
    }
    for (slope, through_ratio) in out.logprob_slopes.iter_mut().zip(by_log_ratio) {
        *slope = weights.loss * (*slope + through_ratio);
    }
    count_clipped(&mut out, &ratios, advantage, config);
    out.ratios = ratios;
    out.sampler_weights = sampler_weights;
    out
}

/// Clipping is counted for every ratio, whatever factor its surrogate has, as TRL counts it.
fn count_clipped(out: &mut SequenceLoss, ratios: &[f64], advantage: f64, config: &LossConfig) {
    let (mut low, mut high) = (0.0, 0.0);
    for ratio in ratios {
        let term = surrogate(*ratio, 0.0, advantage, config);
        low += f64::from(u8::from(term.clipped_low));
        high += f64::from(u8::from(term.clipped_high));
    }
    let count = ratios.len().max(1) as f64;
    (out.clipped_low, out.clipped_high) = (low / count, high / count);
}

#[cfg(test)]
mod tests;
