//! Estimators of KL(policy || reference) from one draw, and the coefficient that follows a target.

use crate::config::{KlConfig, KlEstimator};

/// The estimate at one token and its derivative by the policy's log-probability, the ratio held
/// constant. With `d = reference - logprob` (Schulman, "Approximating KL divergence", 2020):
///
/// ```text
/// k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1        corrected = r k3
/// ```
///
/// `corrected` gives k3 here; its factor r, the surrogate's ratio with its own gradient, is applied by
/// [`super::sequence_loss`] (DeepSeek-V3.2, 2025; TRL's `use_bias_correction_kl`). All but k1 are at
/// least 0. As loss terms: k1's gradient is 0 in the mean, k2's is that of KL(policy || reference)
/// and k3's that of KL(reference || policy) where the draw is the policy's own.
pub fn estimate(estimator: KlEstimator, logprob: f64, reference: f64) -> (f64, f64) {
    let d = reference - logprob;
    match estimator {
        KlEstimator::K1 => (-d, 1.0),
        KlEstimator::K2 => (0.5 * d * d, -d),
        KlEstimator::K3 | KlEstimator::Corrected => (d.exp_m1() - d, -d.exp_m1()),
    }
}

/// Beta after an update whose mean KL was `kl` over `samples` samples (Ziegler et al. 2019, section
/// 2.2; the adaptive controller of PPO trainers):
///
/// ```text
/// beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)
/// ```
///
/// Beta stays where the target is 0 or `kl` is not finite. The factor is above 0 as long as there are
/// fewer than 5 horizons of samples, which the configuration's check sees to.
pub fn adapted_beta(beta: f64, kl: f64, samples: f64, config: &KlConfig) -> f64 {
    if config.target == 0.0 || !kl.is_finite() {
        return beta;
    }
    let error = (kl / config.target - 1.0).clamp(-0.2, 0.2);
    beta * (1.0 + error * samples / config.horizon).max(0.0)
}
