//! Selection of high-entropy tokens, and the entropy bonus.

use crate::config::EntropyConfig;

/// The lowest entropy of the top `fraction` of tokens: the quantile at `1 - fraction`, linearly
/// interpolated (type 7, as `torch.quantile`). Tokens at or above it are selected. `None` if all
/// are: a fraction of 1, or no tokens. Wang et al. 2025, "Beyond the 80/20 Rule".
pub(crate) fn threshold(entropies: &[f64], fraction: f64) -> Option<f64> {
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
pub(crate) fn active_coef(coef: f64, last: f64, config: &EntropyConfig) -> f64 {
    if config.adaptive && last > config.target { 0.0 } else { coef }
}

/// The adaptive coefficient after an update with a mean entropy of `entropy`: increased by
/// `coef_delta` if that is at or below the target, else decreased, within its bounds. A fixed
/// coefficient is unchanged.
pub(crate) fn adapted_coef(coef: f64, entropy: f64, config: &EntropyConfig) -> f64 {
    if !config.adaptive || !entropy.is_finite() {
        coef
    } else if entropy <= config.target {
        (coef + config.coef_delta).min(config.coef_max)
    } else {
        (coef - config.coef_delta).max(config.coef_min)
    }
}
