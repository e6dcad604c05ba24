//! Functions of a completion's length in tokens, the stop token counted.

use crate::config::{CosineScaled, LengthRange, SoftOverlong};

/// `length`: `max(0, 1 - |tokens - ideal| / spread)`; from 0 to 1, typical weight 0.1 to 0.5.
/// `spread` is at least 1.
pub fn length(tokens: usize, ideal: u32, spread: u32) -> f64 {
    let distance = (tokens as f64 - f64::from(ideal)).abs();
    (1.0 - distance / f64::from(spread.max(1))).max(0.0)
}

/// `length_range`: 1 for `min <= tokens <= max`; outside `max(0, 1 - distance / fade)`, with
/// `fade` 0 at once 0; from 0 to 1, typical weight 0.1 to 0.5.
pub fn length_range(tokens: usize, p: &LengthRange) -> f64 {
    let tokens = tokens as f64;
    let distance = (f64::from(p.min) - tokens).max(tokens - f64::from(p.max)).max(0.0);
    if distance == 0.0 {
        return 1.0;
    }
    if p.fade == 0 { 0.0 } else { (1.0 - distance / f64::from(p.fade)).max(0.0) }
}

/// `cosine_scaled`: `low + (high - low) (1 + cos(pi min(1, tokens / max_tokens))) / 2`; right
/// answers have `low, high = min_correct, max_correct`, wrong ones `max_wrong, min_wrong`; from the
/// least to the greatest of the four, typical weight 1 to 2.
///
/// Yeo et al. 2025 (arXiv 2502.03373, C.1) as TRL's `get_cosine_scaled_reward` has it.
pub fn cosine_scaled(tokens: usize, correct: bool, p: &CosineScaled) -> f64 {
    let progress = (tokens as f64 / f64::from(p.max_tokens.max(1))).min(1.0);
    let (low, high) =
        if correct { (p.min_correct, p.max_correct) } else { (p.max_wrong, p.min_wrong) };
    low + 0.5 * (high - low) * (1.0 + (progress * std::f64::consts::PI).cos())
}

/// `soft_overlong`: 0 for `tokens <= max_tokens - cache`, then
/// `(max_tokens - cache - tokens) / cache` up to `max_tokens`, then -1; from -1 to 0, typical
/// weight 0.5 to 1.
///
/// DAPO (arXiv 2503.14476), eq. 13.
pub fn soft_overlong(tokens: usize, p: &SoftOverlong) -> f64 {
    let over = tokens as f64 - (f64::from(p.max_tokens) - f64::from(p.cache));
    if over <= 0.0 {
        return 0.0;
    }
    if p.cache == 0 { -1.0 } else { -(over / f64::from(p.cache)).min(1.0) }
}
