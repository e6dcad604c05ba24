//! What to do where the sampler's policy is not the one that is trained.

use crate::config::CorrectionMode;

/// The weight of each token's surrogate for the difference of the policy `old` from the sampler's
/// `recorded` log-probabilities, all constant (truncated: Yao et al. 2025, "Your efficient RL
/// framework secretly brings you off-policy RL training"; masked: Liu et al. 2025, "When speed kills
/// stability"):
///
/// ```text
/// token:    rho_t = exp(old_t - recorded_t)
/// sequence: rho_t = exp(sum over tokens of old_t - recorded_t)
/// truncate: min(max(rho, low), high)        mask: rho where low <= rho <= high, else 0
/// ```
///
/// A `high` of 0 is none. One value for the whole sequence at sequence level, else one for each token;
/// none without a correction.
pub fn sampler_weights(
    mode: CorrectionMode,
    old: &[f64],
    recorded: &[f64],
    low: f64,
    high: f64,
) -> Vec<f64> {
    let high = if high > 0.0 { high } else { f64::INFINITY };
    let differences = old.iter().zip(recorded).map(|(o, s)| o - s);
    let ratios: Vec<f64> = match mode {
        CorrectionMode::None => Vec::new(),
        CorrectionMode::TokenTruncate | CorrectionMode::TokenMask => {
            differences.map(f64::exp).collect()
        }
        CorrectionMode::SequenceTruncate | CorrectionMode::SequenceMask => {
            vec![differences.sum::<f64>().exp()]
        }
    };
    let masks = matches!(mode, CorrectionMode::TokenMask | CorrectionMode::SequenceMask);
    let bounded = |ratio: f64| {
        if !masks {
            ratio.clamp(low, high)
        } else if (low..=high).contains(&ratio) {
            ratio
        } else {
            0.0
        }
    };
    ratios.into_iter().map(bounded).collect()
}

/// Whether a sequence keeps its surrogate: its advantage is at least 0, or it has become less
/// probable than it was recorded by no more than `threshold`, in nats a token (DeepSeek-V3.2, 2025,
/// eq. 9). A threshold of 0 keeps all.
pub fn keeps(advantage: f64, logprobs: &[f64], recorded: &[f64], threshold: f64) -> bool {
    if threshold == 0.0 || advantage >= 0.0 {
        return true;
    }
    let sum: f64 = recorded.iter().zip(logprobs).map(|(s, l)| s - l).sum();
    let drift = sum / logprobs.len().max(1) as f64;
    // What is not a number is kept, so that the step is seen not to be finite.
    drift.is_nan() || drift <= threshold
}
