//! The sequence weights of `vespo` ("Variational Sequence-Level Soft Policy Optimization",
//! arXiv:2602.10693).

use super::ratio;
use crate::config::VespoConfig;

/// Bounds of logarithms as in TRL: `ln 1e-8` and 20.
const BOUNDS: (f64, f64) = (-18.420_680_743_952_367, 20.0);

/// The gamma weight of a sequence with ratio w. The gradient treats it as a constant:
///
/// ```text
/// phi(w) = w^k exp(lambda (1 - w))
/// ln w   = sum over tokens of l - o, plus ln rho with a sampler correction
/// ```
///
/// It is 1 at w = 1 and approaches 0 on either side; k and lambda depend on the sign of the
/// advantage. As in TRL, `l - o` is clamped to [-20, 20], ln rho and ln w to [`BOUNDS`]; ln phi is at most
/// 20, which only large k reach.
pub(super) fn weight(
    logprobs: &[f64],
    old: &[f64],
    sampler_weights: &[f64],
    advantage: f64,
    config: &VespoConfig,
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
    ratio::weight(k * log_w + lambda * (1.0 - log_w.exp()))
}
