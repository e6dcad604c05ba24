//! The policy-gradient loss of one sequence and its analytic gradient, as pure functions of
//! log-probabilities and entropies.
//!
//! For token t of sample i, with the policy's log-probability `l`, the log-probability `o` that its
//! ratio is taken against, the sampler's recorded one `s`, the reference policy's `f`, the entropy
//! `H` and the advantage `A`:
//!
//! ```text
//! ratio r = e(l - o)                            token level
//!         = e(mean over tokens of l - o)        sequence level (GSPO, Zheng et al. 2025), for all tokens
//! loss    = sum over tokens of w_i (m rho surrogate(r, l, A) + beta kl) - coef mean(H)
//! ```
//!
//! - `e`: the exponential, with its tangent above 20 ([`ratio::ratio`])
//! - `surrogate`: [`surrogate()`]; `kl`: [`kl::estimate`], times r with the corrected estimator
//! - `rho`: [`correction::sampler_weights`], or [`vespo::weight`] for `vespo`
//! - `m`: 0 for tokens below the entropy threshold ([`entropy::threshold`]) and for sequences that
//!   [`correction::is_off_policy`] masks, else 1. Neither `rho` nor `m` affects the KL or `w_i`
//! - `w_i`: [`sequence_weights`]. Like the threshold and the number of tokens in `mean(H)` (all
//!   tokens, or those at or above the threshold), it is fixed for the whole optimizer step, so that
//!   the loss and its gradient do not depend on how the step is split into micro-batches
//!
//! Without a sampler correction `o` is `s`: the recorded log-probabilities are those of the behavior
//! policy, and the surrogate's ratio corrects for both the sampler's rounding and the optimizer
//! steps between sampling and training. With a correction the two are separate (decoupled PPO,
//! Hilton et al. 2022): the trainer recomputes `o` before the step's first update, rho = exp(o - s)
//! corrects from the sampler to that policy, and the clipped ratio covers the step's own updates.
//!
//! All log-probabilities are natural and at the sample's temperature T, that is of
//! `softmax(logits / T)`, for policy and reference alike. Prompt tokens have no loss; the sampled
//! stop token does. The loss depends on the network through `l` and `H` alone, so its gradient is
//! the sum over tokens of `dloss/dl dl + dloss/dH dH`.

mod correction;
pub(crate) mod entropy;
pub(crate) mod kl;
mod late;
mod ratio;
mod surrogate;
mod vespo;
mod weights;

use crate::config::{KlEstimator, LossKind, RatioLevel, TrainConfig};
use surrogate::surrogate;

pub(crate) use late::{LEAST_WEIGHT, late_weight};
pub(crate) use weights::sequence_weights;

/// One completion as the loss sees it. Every slice has one value per sampled token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossSequence<'a> {
    /// Log-probabilities under the policy.
    pub logprobs: &'a [f64],
    /// Entropies of the policy's distributions, in nats.
    pub entropies: &'a [f64],
    /// Log-probabilities that the sampler recorded.
    pub recorded: &'a [f64],
    /// Log-probabilities before the step's first update; `None` takes the recorded ones.
    pub old: Option<&'a [f64]>,
    /// Log-probabilities under the reference policy; `None` leaves the KL out.
    pub reference: Option<&'a [f64]>,
    pub advantage: f64,
}

/// Factors of one sequence's loss terms. They depend on the whole optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LossCoefficients {
    /// Weight of each token's surrogate and KL: [`sequence_weights`].
    pub token: f64,
    /// Weight of each selected token's entropy: the bonus coefficient over the number of selected
    /// tokens in the step.
    pub entropy: f64,
    /// Tokens below this entropy are not selected: they have neither surrogate nor bonus.
    pub entropy_threshold: Option<f64>,
    /// Coefficient of the KL.
    pub beta: f64,
}

/// The loss of one sequence with its gradient and the values that metrics need.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SequenceLoss {
    /// Weighted sum of all terms.
    pub loss: f64,
    /// Its derivative with respect to each log-probability.
    pub dloss_dlogp: Vec<f64>,
    /// Its derivative with respect to each entropy.
    pub dloss_dentropy: Vec<f64>,
    /// The ratio of each token, or the one ratio of the sequence.
    pub ratios: Vec<f64>,
    /// Fraction of [`Self::ratios`] whose gradient the lower bound cut (`A < 0`).
    pub clipped_low: f64,
    /// Fraction of [`Self::ratios`] whose gradient the upper bound cut (`A > 0`).
    pub clipped_high: f64,
    /// Sum of the KL terms over tokens; 0 without a reference.
    pub kl: f64,
    /// Number of tokens at or above the entropy threshold.
    pub selected_tokens: usize,
    /// Sum of the entropies of those tokens.
    pub selected_entropy: f64,
    /// The sampler correction's weights: one per token or one for the sequence.
    pub sampler_weights: Vec<f64>,
    /// The sequence's weight phi with `vespo`.
    pub vespo_weight: Option<f64>,
    /// Whether the surrogate was masked because the sequence is too far off policy.
    pub off_policy: bool,
}

/// The loss of one sequence. A token whose surrogate has the factor 0 has none, even if its ratio
/// is not finite, which only a log-probability that is not finite makes it.
pub(crate) fn sequence_loss(
    sequence: &LossSequence<'_>,
    coefficients: &LossCoefficients,
    config: &TrainConfig,
) -> SequenceLoss {
    let LossSequence { logprobs, entropies, recorded, advantage, .. } = *sequence;
    let count = logprobs.len();
    let old = sequence.old.unwrap_or(recorded);
    let by_sequence =
        config.loss == LossKind::Gspo || config.importance_sampling_level == RatioLevel::Sequence;
    let log_ratios = logprobs.iter().zip(old).map(|(l, o)| l - o);
    let ratios: Vec<f64> = if by_sequence {
        vec![ratio::ratio(log_ratios.sum::<f64>() / count.max(1) as f64)]
    } else {
        log_ratios.map(ratio::ratio).collect()
    };
    let sampler_weights = correction::sampler_weights(&config.sampler_correction, old, recorded);
    let off_policy =
        correction::is_off_policy(advantage, logprobs, recorded, config.off_policy_mask_threshold);
    let vespo_weight = (config.loss == LossKind::Vespo)
        .then(|| vespo::weight(logprobs, old, &sampler_weights, advantage, &config.vespo));
    let mut out = SequenceLoss {
        dloss_dlogp: vec![0.0; count],
        dloss_dentropy: vec![0.0; count],
        vespo_weight,
        off_policy,
        ..SequenceLoss::default()
    };
    // A list holds one value for all tokens or one per token.
    let at = |list: &[f64], t: usize| if list.len() == 1 { list[0] } else { list[t] };
    let kl_by_ratio = config.kl.estimator == KlEstimator::Corrected;
    let mut dloss_dlog_ratio = vec![0.0; count];
    for t in 0..count {
        let selected = coefficients.entropy_threshold.is_none_or(|least| entropies[t] >= least);
        if selected {
            out.selected_tokens += 1;
            out.selected_entropy += entropies[t];
            out.loss -= coefficients.entropy * entropies[t];
            out.dloss_dentropy[t] = -coefficients.entropy;
        }
        let rho = match vespo_weight {
            Some(phi) => phi,
            None if sampler_weights.is_empty() => 1.0,
            None => at(&sampler_weights, t),
        };
        let factor = if selected && !off_policy { rho } else { 0.0 };
        let ratio = at(&ratios, t);
        let (mut loss, mut dloss_dlogp) = (0.0, 0.0);
        let term = surrogate(ratio, logprobs[t], advantage, config);
        // As in TRL, ratios count as clipped even if their surrogate has the factor 0.
        out.clipped_low += f64::from(u8::from(term.clipped_low));
        out.clipped_high += f64::from(u8::from(term.clipped_high));
        if factor != 0.0 {
            loss += factor * term.value;
            dloss_dlogp += factor * term.d_logp;
            dloss_dlog_ratio[t] += factor * term.d_log_ratio;
        }
        if let Some(reference) = sequence.reference {
            let (value, d_logp) = kl::estimate(config.kl.estimator, logprobs[t], reference[t]);
            let scale = if kl_by_ratio { ratio } else { 1.0 };
            out.kl += scale * value;
            loss += coefficients.beta * scale * value;
            dloss_dlogp += coefficients.beta * scale * d_logp;
            if kl_by_ratio {
                dloss_dlog_ratio[t] += coefficients.beta * ratio::slope(ratio) * value;
            }
        }
        out.loss += coefficients.token * loss;
        out.dloss_dlogp[t] = dloss_dlogp;
    }
    if by_sequence {
        // Each log-probability changes the sequence's log ratio by 1 / count.
        let mean = dloss_dlog_ratio.iter().sum::<f64>() / count.max(1) as f64;
        dloss_dlog_ratio.fill(mean);
    }
    for (dloss_dlogp, through_ratio) in out.dloss_dlogp.iter_mut().zip(dloss_dlog_ratio) {
        *dloss_dlogp = coefficients.token * (*dloss_dlogp + through_ratio);
    }
    out.clipped_low /= count.max(1) as f64;
    out.clipped_high /= count.max(1) as f64;
    out.ratios = ratios;
    out.sampler_weights = sampler_weights;
    out
}

#[cfg(test)]
mod tests;
