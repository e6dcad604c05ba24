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
//! - `e`: the exponential, with its tangent above 20 ([`ratio`])
//! - `surrogate`: [`surrogate`]; `kl`: [`kl_estimate`], times r with the corrected estimator
//! - `rho`: [`sampler_weights`], or [`vespo_weight`] for `vespo`
//! - `m`: 0 for tokens below the entropy threshold ([`entropy_threshold`]) and for sequences that
//!   [`is_off_policy`] masks, else 1. Neither `rho` nor `m` affects the KL or `w_i`
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

use std::collections::BTreeMap;

use crate::config::{
    CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig, KlEstimator, Loss, LossKind,
    RatioLevel, TrainConfig,
};

/// The names of `train.loss` are TRL's. `train.clip_low`, `clip_high`, `delta` and `dual_clip` bound the ratio, and
/// `train.sampler_correction` corrects for the sampler, whatever the loss.
impl LossKind {
    /// Whether the surrogate is PPO's clipped ratio.
    pub(crate) fn clips(self) -> bool {
        !matches!(self, Self::Cispo | Self::Sapo | Self::Reinforce | Self::Vespo)
    }
}

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
    pub beta: f64,
}

/// The loss of one sequence with its gradient and the values that metrics need.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SequenceLoss {
    pub loss: f64,
    pub dloss_dlogp: Vec<f64>,
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
    pub selected_entropy: f64,
    /// The sampler correction's weights: one per token or one for the sequence.
    pub sampler_weights: Vec<f64>,
    /// The sequence's weight phi with `vespo`.
    pub vespo_weight: Option<f64>,
    /// Whether the surrogate was masked because the sequence is too far off policy.
    pub off_policy: bool,
}

/// The loss of one sequence. A token whose surrogate has the factor 0 has none, even if its ratio is not
/// finite.
pub(crate) fn sequence_loss(
    sequence: &LossSequence<'_>,
    coefficients: &LossCoefficients,
    config: &TrainConfig,
) -> SequenceLoss {
    let LossSequence { logprobs, entropies, recorded, advantage, .. } = *sequence;
    let count = logprobs.len();
    let old = sequence.old.unwrap_or(recorded);
    let by_sequence = config.loss.kind == LossKind::Gspo
        || config.importance_sampling_level == RatioLevel::Sequence;
    let log_ratios = logprobs.iter().zip(old).map(|(l, o)| l - o);
    let ratios: Vec<f64> = if by_sequence {
        vec![ratio(log_ratios.sum::<f64>() / count.max(1) as f64)]
    } else {
        log_ratios.map(ratio).collect()
    };
    let sampler_weights = sampler_weights(&config.sampler_correction, old, recorded);
    let off_policy = is_off_policy(advantage, logprobs, recorded, config.off_policy_mask_threshold);
    let vespo_weight = (config.loss.kind == LossKind::Vespo)
        .then(|| vespo_weight(logprobs, old, &sampler_weights, advantage, &config.loss));
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
            let (value, d_logp) = kl_estimate(config.kl.estimator, logprobs[t], reference[t]);
            let scale = if kl_by_ratio { ratio } else { 1.0 };
            out.kl += scale * value;
            loss += coefficients.beta * scale * value;
            dloss_dlogp += coefficients.beta * scale * d_logp;
            if kl_by_ratio {
                dloss_dlog_ratio[t] += coefficients.beta * slope(ratio) * value;
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

// The surrogate loss of one token, with its derivatives.

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Surrogate {
    pub value: f64,
    /// Derivative of the value with respect to the logarithm of the ratio.
    pub d_log_ratio: f64,
    /// Derivative of the value with respect to the log-probability at a constant ratio.
    pub d_logp: f64,
    /// Whether the lower bound cut the gradient (`A < 0`).
    pub clipped_low: bool,
    /// Whether the upper bound cut the gradient (`A > 0`), or, with `cispo`, limited the weight.
    pub clipped_high: bool,
}

/// The surrogate of one token with ratio r, log-probability l and advantage A, by `train.loss`:
///
/// - `cispo`: `-sg(min(r, 1 + clip_high)) A l` (MiniMax-M1, 2025, eq. 4); no lower bound, as TRL, whose
///   `epsilon_high` is the bound itself
/// - `sapo`: `-(4 / tau) sigmoid(tau (r - 1)) A` (Gao et al. 2025); tau by the sign of A
/// - `reinforce`: `-A l` (Williams 1992)
/// - `vespo`: `-A l` with the factor [`vespo_weight`] (arXiv:2602.10693)
/// - others: [`clipped`], PPO (Schulman et al. 2017, eq. 7)
fn surrogate(ratio: f64, logprob: f64, advantage: f64, config: &TrainConfig) -> Surrogate {
    match config.loss.kind {
        LossKind::Cispo => {
            let high = 1.0 + config.clip_high;
            let d_logp = -at_most(ratio, high) * advantage;
            Surrogate {
                value: d_logp * logprob,
                d_logp,
                clipped_high: ratio > high && advantage > 0.0,
                ..Surrogate::default()
            }
        }
        LossKind::Sapo => {
            let Loss { tau_pos, tau_neg, .. } = config.loss;
            let tau = if advantage > 0.0 { tau_pos } else { tau_neg };
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            let d_gate = gate * (1.0 - gate);
            let d_log_ratio = -4.0 * d_gate * advantage * slope(ratio);
            let value = -(4.0 / tau) * gate * advantage;
            Surrogate { value, d_log_ratio, ..Surrogate::default() }
        }
        LossKind::Reinforce | LossKind::Vespo => {
            Surrogate { value: -advantage * logprob, d_logp: -advantage, ..Surrogate::default() }
        }
        _ => clipped(ratio, advantage, config),
    }
}

/// The clipped ratio times the advantage, with optional bounds `delta` and `c` (`dual_clip`), where
/// 0 is no bound, and a `delta` replaces c:
///
/// ```text
/// gain  = min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)
/// gain  = max(gain, c A) where A < 0
/// value = -gain
/// ```
///
/// Two bounds `low` and `high` as in DAPO (Yu et al. 2025); `delta` as in INTELLECT-2 (2025); the
/// dual clip `c` by Ye et al. 2020. Above `1 + high`, delta and c are the same bound.
fn clipped(ratio: f64, advantage: f64, config: &TrainConfig) -> Surrogate {
    let (low, high) = (1.0 - config.clip_low, 1.0 + config.clip_high);
    let bound = |x: f64| if x > 0.0 { x } else { f64::INFINITY };
    let delta = bound(config.delta);
    let unclipped = at_most(ratio, delta) * advantage;
    let clipped = ratio.clamp(low, high) * advantage;
    let mut gain = unclipped.min(clipped);
    let in_bounds =
        if unclipped <= clipped { ratio < delta } else { (low..=high).contains(&ratio) };
    let mut d_gain = if in_bounds { slope(ratio) * advantage } else { 0.0 };
    let has_dual_clip = config.dual_clip > 0.0 && config.delta == 0.0;
    if advantage < 0.0 && has_dual_clip && config.dual_clip * advantage > gain {
        gain = config.dual_clip * advantage;
        d_gain = 0.0;
    }
    Surrogate {
        value: -gain,
        d_log_ratio: -d_gain,
        d_logp: 0.0,
        clipped_low: ratio < low && advantage < 0.0,
        clipped_high: ratio > high && advantage > 0.0,
    }
}

// Exponentials of log-ratios that stay finite.

/// The log-ratio, in nats, beyond which a ratio is bounded, as in verl.
const MAX_LOG_RATIO: f64 = 20.0;

/// The ratio at [`MAX_LOG_RATIO`].
fn max_slope() -> f64 {
    MAX_LOG_RATIO.exp()
}

/// `exp(x)`, and its tangent above x = 20. So a finite log-ratio has a finite ratio, and a token beyond
/// the bound keeps a gradient that brings it back. verl clamps x to [-20, 20] instead, which removes the
/// gradient of exactly the tokens that drifted most. Below -20 the exponential itself is finite.
fn ratio(log_ratio: f64) -> f64 {
    if log_ratio > MAX_LOG_RATIO {
        max_slope() * (1.0 + log_ratio - MAX_LOG_RATIO)
    } else {
        log_ratio.exp()
    }
}

/// The derivative of [`ratio`] with respect to the log-ratio, from the ratio.
fn slope(ratio: f64) -> f64 {
    at_most(ratio, max_slope())
}

/// `exp(x)` of x limited to 20, for weights that the gradient treats as constants.
fn exp_weight(log_weight: f64) -> f64 {
    at_most(log_weight, MAX_LOG_RATIO).exp()
}

/// The smaller one; NaN if the value is NaN, unlike `f64::min`, so that the step is skipped.
fn at_most(value: f64, bound: f64) -> f64 {
    if value > bound { bound } else { value }
}

// The sequence weights of `vespo` ("Variational Sequence-Level Soft Policy Optimization",
// arXiv:2602.10693).

/// Bounds of logarithms as in TRL: `ln 1e-8` and 20.
const BOUNDS: (f64, f64) = (-18.420_680_743_952_367, 20.0);

/// The gamma weight of a sequence with ratio w, a constant for the gradient:
///
/// ```text
/// phi(w) = w^k exp(lambda (1 - w))
/// ln w   = sum over tokens of l - o, plus ln rho with a sampler correction
/// ```
///
/// It is 1 at w = 1 and approaches 0 on either side; k and lambda depend on the sign of the advantage. As in
/// TRL,
/// `l - o` is clamped to [-20, 20], ln rho and ln w to [`BOUNDS`]; ln phi is at most 20.
fn vespo_weight(
    logprobs: &[f64],
    old: &[f64],
    sampler_weights: &[f64],
    advantage: f64,
    config: &Loss,
) -> f64 {
    let (low, high) = BOUNDS;
    let policy: f64 = logprobs.iter().zip(old).map(|(l, o)| (l - o).clamp(-high, high)).sum();
    let sampler: f64 = sampler_weights.iter().map(|rho| rho.ln().clamp(low, high)).sum();
    let log_w = (policy + sampler).clamp(low, high);
    let (k, lambda) = if advantage >= 0.0 {
        (config.k_pos, config.lambda_pos)
    } else {
        (config.k_neg, config.lambda_neg)
    };
    exp_weight(k * log_w + lambda * (1.0 - log_w.exp()))
}

// Corrections for a sampler whose policy differs from the trained one.

/// Importance weights of each token's surrogate, constants for the gradient, from the sampler's `recorded`
/// log-probabilities to the policy's `old` ones (truncated: Yao et al. 2025, "Your efficient RL framework
/// secretly brings you off-policy RL training"; masked: Liu et al. 2025, "When speed kills stability"):
///
/// ```text
/// token:    rho_t = exp(old_t - recorded_t)
/// sequence: rho_t = exp(sum over tokens of old_t - recorded_t)
/// truncate: min(max(rho, low), high)        mask: rho where low <= rho <= high, else 0
/// ```
///
/// `low` is `clip_min`; `high` is `clip_max`, where 0 is no bound but that of [`exp_weight`]. Returns one weight
/// for the sequence, or one per token; empty without a correction.
fn sampler_weights(config: &CorrectionConfig, old: &[f64], recorded: &[f64]) -> Vec<f64> {
    let low = config.clip_min;
    let high = if config.clip_max > 0.0 { config.clip_max } else { f64::INFINITY };
    let differences = old.iter().zip(recorded).map(|(o, s)| o - s);
    let ratios: Vec<f64> = match config.kind {
        CorrectionMode::None => Vec::new(),
        CorrectionMode::TokenTruncate | CorrectionMode::TokenMask => {
            differences.map(exp_weight).collect()
        }
        CorrectionMode::SequenceTruncate | CorrectionMode::SequenceMask => {
            vec![exp_weight(differences.sum())]
        }
    };
    let masks = matches!(config.kind, CorrectionMode::TokenMask | CorrectionMode::SequenceMask);
    let bounded = |ratio: f64| {
        if !masks {
            ratio.clamp(low, high)
        } else if ratio < low || ratio > high {
            0.0
        } else {
            ratio
        }
    };
    ratios.into_iter().map(bounded).collect()
}

/// Whether a sequence has no surrogate: its advantage is negative, and its log-probability fell since
/// sampling by more than `threshold` nats per token (DeepSeek-V3.2, 2025, eq. 9). Never with a threshold of
/// 0.
fn is_off_policy(advantage: f64, logprobs: &[f64], recorded: &[f64], threshold: f64) -> bool {
    if threshold == 0.0 || advantage >= 0.0 {
        return false;
    }
    let sum: f64 = recorded.iter().zip(logprobs).map(|(s, l)| s - l).sum();
    // False for NaN, so that the surrogate makes the loss NaN and the step is skipped.
    sum / logprobs.len().max(1) as f64 > threshold
}

// Estimators of KL(policy || reference) from one sampled token, and the adaptive coefficient.

/// Where `exp(d) - d - 1` reaches 10, the bound of verl's k3.
const K3_BOUND: f64 = 2.610_868_638_149_876;

/// The estimate at one token and its derivative with respect to the policy's log-probability at a
/// constant ratio r. With `d = reference - logprob` (Schulman, "Approximating KL divergence", 2020):
///
/// ```text
/// k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1        corrected = r k3
/// ```
///
/// For `corrected` this returns k3; [`sequence_loss`] applies the factor r with its own gradient
/// (DeepSeek-V3.2, 2025; TRL's `use_bias_correction_kl`). As loss terms on samples of the policy, the mean
/// gradient of k1 is 0, of k2 that of KL(policy || reference), and of k3 that of KL(reference || policy).
///
/// k3 is continued by its tangent above a value of 10, so that a token that became unlikely adds at most
/// `12.6 d` instead of `exp(d)`. verl limits the value to 10, which removes the restoring gradient.
fn kl_estimate(estimator: KlEstimator, logprob: f64, reference: f64) -> (f64, f64) {
    let d = reference - logprob;
    match estimator {
        KlEstimator::K1 => (-d, 1.0),
        KlEstimator::K2 => (0.5 * d * d, -d),
        KlEstimator::K3 | KlEstimator::Corrected => {
            let bounded = if d > K3_BOUND { K3_BOUND } else { d };
            let slope = bounded.exp_m1();
            (slope - bounded + slope * (d - bounded), -slope)
        }
    }
}

/// Samples over which an adaptive beta follows the KL.
const KL_HORIZON: f64 = 10_000.0;

/// Beta after an update with a mean KL of `kl` (nats per token) over `samples` samples (Ziegler et
/// al. 2019, section 2.2; the adaptive controller of PPO trainers):
///
/// ```text
/// beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) min(samples / 10,000, 1))
/// ```
///
/// It is unchanged if the target is 0 or `kl` is not finite.
pub(crate) fn adapted_beta(beta: f64, kl: f64, samples: f64, config: &KlConfig) -> f64 {
    if config.target == 0.0 || !kl.is_finite() {
        return beta;
    }
    let error = (kl / config.target - 1.0).clamp(-0.2, 0.2);
    beta * (1.0 + error * samples.min(KL_HORIZON) / KL_HORIZON)
}

// Weights of completions that were sampled many versions ago and rated since.

/// Longest completion whose weight is the product over its tokens. Longer ones have that of so many average
/// tokens.
const LONGEST: f64 = 64.0;

/// The least weight of a sample with an advantage of 0 or more.
const LEAST_LIKED: f64 = 0.3;

/// Samples with a smaller weight are left out.
pub(crate) const LEAST_WEIGHT: f64 = 1e-3;

/// The truncated importance weight of a completion of T tokens, from the `recorded` log-probabilities
/// of the policy that sampled it to the `old` ones of the policy before the step:
///
/// ```text
/// rho = min(exp(min(T, 64) * mean over tokens of old - recorded), 1)     if the advantage is negative
/// rho = max(that, 0.3)                                                   otherwise
/// ```
///
/// Up to 64 tokens this is truncated importance sampling of the sequence (Ionides 2008; Espeholt et al. 2018).
/// The product over more tokens is almost always near 0; beyond, the geometric mean (GSPO, Zheng et al. 2025)
/// limits the exponent. The limits bias the size of the update, but not its sign.
///
/// An answer that users disliked and that became rare needs no further lesson, and without the weight its probability
/// would fall without an end. One that they liked and that became rare is what must be learned, so it keeps a weight
/// (TOPR, Le Roux et al. 2025, arXiv:2503.14286, section 3, where it is 1).
pub(crate) fn late_weight(old: &[f64], recorded: &[f64], advantage: f64) -> f64 {
    let count = old.len().max(1) as f64;
    let mean = old.iter().zip(recorded).map(|(o, r)| o - r).sum::<f64>() / count;
    let weight = (mean * count.min(LONGEST)).exp().min(1.0);
    if advantage < 0.0 { weight } else { weight.max(LEAST_LIKED) }
}

// Selection of high-entropy tokens, and the entropy bonus.

/// The lowest entropy of the top `fraction` of tokens: the quantile at `1 - fraction`, linearly
/// interpolated (type 7, as `torch.quantile`). Tokens at or above it are selected. `None` if all
/// are: a fraction of 1, or no tokens. Wang et al. 2025, "Beyond the 80/20 Rule".
pub(crate) fn entropy_threshold(entropies: &[f64], fraction: f64) -> Option<f64> {
    if fraction >= 1.0 || entropies.is_empty() {
        return None;
    }
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (1.0 - fraction).max(0.0) * (sorted.len() - 1) as f64;
    let below = place.floor() as usize;
    let low = *sorted.get(below)?;
    let high = *sorted.get(below + 1).unwrap_or(&low);
    Some(low + (high - low) * place.fract())
}

/// The bonus coefficient of the next update. An adaptive coefficient applies only if the mean
/// entropy of the last update (infinite before the first) is at or below the target, else it is 0
/// (Skywork-OR1, He et al. 2025; gated as in TRL).
pub(crate) fn active_entropy_coef(coef: f64, last: f64, config: &EntropyConfig) -> f64 {
    if config.is_adaptive() && last > config.target { 0.0 } else { coef }
}

/// The adaptive coefficient after an update with a mean entropy of `entropy`: increased by 0.005 if that is at or
/// below the target, else decreased, within 0 and 1 (TRL's defaults). A fixed coefficient is unchanged.
pub(crate) fn adapted_coef(coef: f64, entropy: f64, config: &EntropyConfig) -> f64 {
    if !config.is_adaptive() || !entropy.is_finite() {
        coef
    } else if entropy <= config.target {
        (coef + 0.005).min(1.0)
    } else {
        (coef - 0.005).max(0.0)
    }
}

// The weight of each token within the optimizer step.

/// The weight of every token of each completion, from the completion lengths (in
/// tokens) of the *whole* optimizer step. `sequences` has the sequence of each completion, as any number: a
/// conversation is one sequence of several completions, whose length is the sum of theirs.
///
/// Completions that are not trained on, such as masked truncated completions, have length 0 here.
/// Their weight is 0 and n does not count them. (TRL zeroes their loss but counts them in n for
/// `grpo`, `sapo`, `luspo` and `dr_grpo`, which reduces the weight of the other sequences.)
pub(crate) fn sequence_weights(
    kind: LossKind,
    lengths: &[usize],
    sequences: &[usize],
    max_completion_tokens: usize,
) -> Vec<f64> {
    let trained = || lengths.iter().zip(sequences).filter(|(length, _)| **length > 0);
    let mut whole = BTreeMap::new();
    for (length, sequence) in trained() {
        *whole.entry(sequence).or_insert(0) += length;
    }
    let (n, completions) = (whole.len() as f64, trained().count() as f64);
    let tokens = lengths.iter().sum::<usize>() as f64;
    let weight = |sequence: &usize| match kind {
        // The mean over tokens, then over sequences (Shao et al. 2024).
        LossKind::Grpo | LossKind::Sapo | LossKind::Gspo => {
            1.0 / (n * whole.get(sequence).copied().unwrap_or(1) as f64)
        }
        // As if each completion had the most tokens, free of length bias (Liu et al. 2025).
        LossKind::DrGrpo => 1.0 / (completions * max_completion_tokens.max(1) as f64),
        // The sum over tokens, then the mean over sequences (Tang et al. 2025).
        LossKind::Luspo => 1.0 / n,
        // The mean over all tokens (Yu et al. 2025). The local batch that normalizes `bnpo` is the optimizer step,
        // as in TRL without accumulation; any other choice would depend on the micro-batches.
        LossKind::Bnpo
        | LossKind::Dapo
        | LossKind::Cispo
        | LossKind::Reinforce
        | LossKind::Vespo => 1.0 / tokens,
    };
    let own = |(length, sequence): (&usize, &usize)| {
        if *length == 0 { 0.0 } else { weight(sequence) }
    };
    lengths.iter().zip(sequences).map(own).collect()
}

#[cfg(test)]
mod tests;
