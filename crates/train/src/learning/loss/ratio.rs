//! Exponentials of log-ratios that stay finite.

/// The log-ratio, in nats, beyond which a ratio is bounded, as in verl.
const MAX_LOG_RATIO: f64 = 20.0;

/// The ratio at [`MAX_LOG_RATIO`].
fn max_slope() -> f64 {
    MAX_LOG_RATIO.exp()
}

/// `exp(x)`, and its tangent above x = 20. So a finite log-ratio has a finite ratio, and a token beyond
/// the bound keeps a gradient that brings it back. verl clamps x to [-20, 20] instead, which removes the
/// gradient of exactly the tokens that drifted most. Below -20 the exponential itself is finite.
pub(super) fn ratio(log_ratio: f64) -> f64 {
    if log_ratio > MAX_LOG_RATIO {
        max_slope() * (1.0 + log_ratio - MAX_LOG_RATIO)
    } else {
        log_ratio.exp()
    }
}

/// The derivative of [`ratio`] with respect to the log-ratio, from the ratio.
pub(super) fn slope(ratio: f64) -> f64 {
    at_most(ratio, max_slope())
}

/// `exp(x)` of x limited to 20, for weights that the gradient treats as constants.
pub(super) fn weight(log_weight: f64) -> f64 {
    at_most(log_weight, MAX_LOG_RATIO).exp()
}

/// The smaller one; NaN if the value is NaN, unlike `f64::min`, so that a NaN reaches the loss and the
/// step is skipped.
pub(super) fn at_most(value: f64, bound: f64) -> f64 {
    if value > bound { bound } else { value }
}
