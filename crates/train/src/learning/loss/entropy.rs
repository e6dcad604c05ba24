//! Which tokens are uncertain enough to learn from, and the bonus for uncertainty.

use crate::config::EntropyConfig;

/// The least entropy that a token of the top `share` has: the quantile at `1 - share`, between
/// neighbours in a line (type 7, as `torch.quantile`); tokens at or above it are taken. `None` where
/// all are taken: a share of 1, or no token. Wang et al. 2025, "Beyond the 80/20 Rule".
pub fn threshold(entropies: &[f64], share: f64) -> Option<f64> {
    if share >= 1.0 || entropies.is_empty() {
        return None;
    }
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (1.0 - share).max(0.0) * (sorted.len() - 1) as f64;
    let below = place.floor() as usize;
    let low = *sorted.get(below)?;
    let high = *sorted.get(below + 1).unwrap_or(&low);
    Some(low + (high - low) * place.fract())
}

/// The bonus's coefficient that acts in the next update: the coefficient, and where it is adaptive
/// 0 unless the last update's mean entropy (infinite before the first) is at or below the target
/// (Skywork-OR1, He et al. 2025; gated as TRL has it).
pub fn acting(coef: f64, last: f64, config: &EntropyConfig) -> f64 {
    if config.adaptive && last > config.target { 0.0 } else { coef }
}

/// The coefficient after an update whose mean entropy was `entropy`: up by `coef_delta` at or below
/// the target, else down, within its bounds. It stays where it is not adaptive.
pub fn adapted_coef(coef: f64, entropy: f64, config: &EntropyConfig) -> f64 {
    if !config.adaptive || !entropy.is_finite() {
        coef
    } else if entropy <= config.target {
        (coef + config.coef_delta).min(config.coef_max)
    } else {
        (coef - config.coef_delta).max(config.coef_min)
    }
}
