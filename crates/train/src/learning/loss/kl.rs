//! Estimators of KL(policy || reference) from one sampled token, and the adaptive coefficient.

use crate::config::{KlConfig, KlEstimator};

/// Where `exp(d) - d - 1` reaches 10, the bound of verl's k3.
const K3_BOUND: f64 = 2.610_868_638_149_876;

/// The estimate at one token and its derivative with respect to the policy's log-probability at a
/// constant ratio r. With `d = reference - logprob` (Schulman, "Approximating KL divergence", 2020):
///
/// ```text
/// k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1        corrected = r k3
/// ```
///
/// For `corrected` this returns k3; [`super::sequence_loss`] applies the factor r, the surrogate's
/// ratio with its own gradient (DeepSeek-V3.2, 2025; TRL's `use_bias_correction_kl`). All but k1 are
/// at least 0. As loss terms on samples of the policy: the mean gradient of k1 is 0, that of k2 is
/// the gradient of KL(policy || reference), and that of k3 the gradient of KL(reference || policy).
///
/// k3 is continued by its tangent above a value of 10 for tokens that became unlikely, so that a single
/// token adds at most `12.6 d` instead of `exp(d)`. verl limits the value to 10 instead, which removes
/// the restoring gradient of those tokens. For tokens that became likely k3 is about `-d - 1`, and needs
/// no bound.
pub(super) fn estimate(estimator: KlEstimator, logprob: f64, reference: f64) -> (f64, f64) {
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

/// Beta after an update with a mean KL of `kl` (nats per token) over `samples` samples (Ziegler et
/// al. 2019, section 2.2; the adaptive controller of PPO trainers):
///
/// ```text
/// beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)
/// ```
///
/// Beta is unchanged if the target is 0 or `kl` is not finite. The factor is above 0 for fewer than
/// 5 horizons of samples; the configuration's check ensures that.
pub(crate) fn adapted_beta(beta: f64, kl: f64, samples: f64, config: &KlConfig) -> f64 {
    if config.target == 0.0 || !kl.is_finite() {
        return beta;
    }
    let error = (kl / config.target - 1.0).clamp(-0.2, 0.2);
    beta * (1.0 + error * samples / config.horizon).max(0.0)
}
