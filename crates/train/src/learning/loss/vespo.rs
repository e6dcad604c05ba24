//! The sequence weights of `vespo` ("Variational Sequence-Level Soft Policy Optimization",
//! arXiv:2602.10693).

use crate::config::VespoConfig;

/// Bounds of logarithms, TRL's: `ln 1e-8` and 20.
const BOUNDS: (f64, f64) = (-18.420_680_743_952_367, 20.0);

/// The gamma weight of a sequence, constant in the loss, for the ratio w of the whole sequence:
///
/// ```text
/// phi(w) = w^k exp(lambda (1 - w))
/// ln w   = sum over tokens of l - o, and of ln rho where the sampler is corrected for
/// ```
///
/// 1 at w = 1, and 0 far from it on either side; k and lambda by the sign of the advantage. Bounds
/// (20 on either side for a token, those above for rho and for w) are TRL's.
pub fn weight(
    logprobs: &[f64],
    old: &[f64],
    sampler_weights: &[f64],
    advantage: f64,
    config: &VespoConfig,
) -> f64 {
    let (low, high) = BOUNDS;
    let own: f64 = logprobs.iter().zip(old).map(|(l, o)| (l - o).clamp(-high, high)).sum();
    let corrected: f64 = sampler_weights.iter().map(|rho| rho.ln().clamp(low, high)).sum();
    let log_w = (own + corrected).clamp(low, high);
    let (k, lambda) = if advantage >= 0.0 {
        (config.k_pos, config.lambda_pos)
    } else {
        (config.k_neg, config.lambda_neg)
    };
    (k * log_w + lambda * (1.0 - log_w.exp())).exp()
}
