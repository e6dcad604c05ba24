//! Corrections for a sampler whose policy differs from the trained one.

use super::ratio;
use crate::config::{CorrectionConfig, CorrectionMode};

/// Importance weights of each token's surrogate, from the sampler's `recorded` log-probabilities to
/// the policy's `old` ones. The gradient treats them as constants (truncated: Yao et al. 2025, "Your
/// efficient RL framework secretly brings you off-policy RL training"; masked: Liu et al. 2025, "When
/// speed kills stability"):
///
/// ```text
/// token:    rho_t = exp(old_t - recorded_t)
/// sequence: rho_t = exp(sum over tokens of old_t - recorded_t)
/// truncate: min(max(rho, low), high)        mask: rho where low <= rho <= high, else 0
/// ```
///
/// `low` is `clip_min`; `high` is `clip_max`, where 0 is no bound but that of [`ratio::weight`], which
/// keeps the product over a long sequence finite. Returns one weight for the whole
/// sequence at sequence level, else one per token; empty without a correction.
pub(super) fn sampler_weights(
    config: &CorrectionConfig,
    old: &[f64],
    recorded: &[f64],
) -> Vec<f64> {
    let low = config.clip_min;
    let high = if config.clip_max > 0.0 { config.clip_max } else { f64::INFINITY };
    let differences = old.iter().zip(recorded).map(|(o, s)| o - s);
    let ratios: Vec<f64> = match config.mode {
        CorrectionMode::None => Vec::new(),
        CorrectionMode::TokenTruncate | CorrectionMode::TokenMask => {
            differences.map(ratio::weight).collect()
        }
        CorrectionMode::SequenceTruncate | CorrectionMode::SequenceMask => {
            vec![ratio::weight(differences.sum())]
        }
    };
    let masks = matches!(config.mode, CorrectionMode::TokenMask | CorrectionMode::SequenceMask);
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

/// Whether a sequence is too far off policy to have a surrogate: its advantage is negative, and its
/// log-probability fell since sampling by more than `threshold`, in nats per token (DeepSeek-V3.2,
/// 2025, eq. 9). Never with a threshold of 0.
pub(super) fn is_off_policy(
    advantage: f64,
    logprobs: &[f64],
    recorded: &[f64],
    threshold: f64,
) -> bool {
    if threshold == 0.0 || advantage >= 0.0 {
        return false;
    }
    let sum: f64 = recorded.iter().zip(logprobs).map(|(s, l)| s - l).sum();
    // False for NaN, so that the surrogate makes the loss NaN and the step is skipped.
    sum / logprobs.len().max(1) as f64 > threshold
}
