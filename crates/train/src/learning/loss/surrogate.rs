//! The surrogate loss of one token, with its derivatives.

use crate::config::{LossKind, TrainConfig};

/// The surrogate loss of one token, to be minimized.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Surrogate {
    pub value: f64,
    /// Derivative of the value with respect to the logarithm of the ratio.
    pub d_log_ratio: f64,
    /// Derivative of the value with respect to the log-probability at a constant ratio.
    pub d_logp: f64,
    /// Whether the lower bound cut the gradient (`A < 0`).
    pub clipped_low: bool,
    /// Whether the upper bound cut the gradient (`A > 0`), or, with `cispo`, limited the weight.
    pub clipped_high: bool,
}

/// The surrogate of one token with ratio r, log-probability l and advantage A; `sg` stops the
/// gradient, and `high = 1 + clip_high`:
///
/// | loss | value | source |
/// | --- | --- | --- |
/// | grpo, dr_grpo, bnpo, dapo, luspo, gspo | [`clipped`] | PPO (Schulman et al. 2017, eq. 7) |
/// | cispo | `-sg(min(r, high)) A l` | MiniMax-M1 (2025), eq. 4; no lower bound, as TRL |
/// | sapo | `-(4 / tau) sigmoid(tau (r - 1)) A` | Gao et al. 2025; tau by the sign of A |
/// | reinforce | `-A l` | Williams 1992 |
/// | vespo | `-A l`, with the factor [`super::vespo::weight`] | arXiv:2602.10693 |
///
/// TRL's `epsilon_high` for cispo is the bound itself, here `1 + clip_high`.
pub(super) fn surrogate(
    ratio: f64,
    logprob: f64,
    advantage: f64,
    config: &TrainConfig,
) -> Surrogate {
    match config.loss {
        LossKind::Cispo => {
            let high = 1.0 + config.clip_high;
            let d_logp = -at_most(ratio, high) * advantage;
            Surrogate {
                value: d_logp * logprob,
                d_logp,
                clipped_high: ratio > high && advantage > 0.0,
                ..Surrogate::default()
            }
        }
        LossKind::Sapo => {
            let tau = if advantage > 0.0 { config.sapo_tau_pos } else { config.sapo_tau_neg };
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            let d_gate = gate * (1.0 - gate);
            let d_log_ratio = -4.0 * d_gate * advantage * slope(ratio);
            let value = -(4.0 / tau) * gate * advantage;
            Surrogate { value, d_log_ratio, ..Surrogate::default() }
        }
        LossKind::Reinforce | LossKind::Vespo => {
            Surrogate { value: -advantage * logprob, d_logp: -advantage, ..Surrogate::default() }
        }
        _ => clipped(ratio, advantage, config),
    }
}

/// The clipped ratio times the advantage, with optional bounds `delta` and `c` (`dual_clip`), where
/// 0 is no bound, and a `delta` replaces c:
///
/// ```text
/// gain  = min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)
/// gain  = max(gain, c A) where A < 0
/// value = -gain
/// ```
///
/// Two bounds `low` and `high` as in DAPO (Yu et al. 2025); `delta` as in INTELLECT-2 (2025); the
/// dual clip `c` by Ye et al. 2020. Above `1 + high`, delta and c are the same bound.
pub(super) fn clipped(ratio: f64, advantage: f64, config: &TrainConfig) -> Surrogate {
    let (low, high) = (1.0 - config.clip_low, 1.0 + config.clip_high);
    let bound = |x: f64| if x > 0.0 { x } else { f64::INFINITY };
    let delta = bound(config.delta);
    let unclipped = at_most(ratio, delta) * advantage;
    let clipped = ratio.clamp(low, high) * advantage;
    let mut gain = unclipped.min(clipped);
    let in_bounds =
        if unclipped <= clipped { ratio < delta } else { (low..=high).contains(&ratio) };
    let mut d_gain = if in_bounds { slope(ratio) * advantage } else { 0.0 };
    let has_dual_clip = config.dual_clip > 0.0 && config.delta == 0.0;
    if advantage < 0.0 && has_dual_clip && config.dual_clip * advantage > gain {
        gain = config.dual_clip * advantage;
        d_gain = 0.0;
    }
    Surrogate {
        value: -gain,
        d_log_ratio: -d_gain,
        d_logp: 0.0,
        clipped_low: ratio < low && advantage < 0.0,
        clipped_high: ratio > high && advantage > 0.0,
    }
}

// Exponentials of log-ratios that stay finite.

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
