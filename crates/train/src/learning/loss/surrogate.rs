//! What a token gains from becoming more probable, with its two derivatives.

use super::LossConfig;
use crate::config::LossKind;

/// One surrogate loss, to be minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Surrogate {
    /// Its value.
    pub value: f64,
    /// Its derivative by the logarithm of the ratio.
    pub by_log_ratio: f64,
    /// Its derivative by the log-probability, the ratio held constant.
    pub by_logprob: f64,
    /// The lower bound cut the gradient (`A < 0`).
    pub clipped_low: bool,
    /// The upper bound cut the gradient (`A > 0`); of `cispo`, held the weight back.
    pub clipped_high: bool,
}

/// The surrogate of one token with ratio r, log-probability l and advantage A; `sg` stops the
/// gradient, and `high = 1 + clip_high`:
///
/// | loss | value | source |
/// | --- | --- | --- |
/// | grpo, dr_grpo, bnpo, dapo, luspo, gspo | see [`clipped`] | PPO (Schulman et al. 2017, eq. 7) |
/// | cispo | `-sg(min(r, high)) A l` | MiniMax-M1 (2025), eq. 4; no lower bound, as TRL |
/// | sapo | `-(4 / tau) sigmoid(tau (r - 1)) A` | Gao et al. 2025; tau by the sign of A |
/// | reinforce | `-A l` | Williams 1992 |
/// | vespo | `-A l`, whose factor is [`super::vespo::weight`] | arXiv:2602.10693 |
///
/// TRL's `epsilon_high` for cispo is the bound itself, here `1 + clip_high`.
pub fn surrogate(ratio: f64, logprob: f64, advantage: f64, config: &LossConfig) -> Surrogate {
    match config.kind {
        LossKind::Cispo => {
            let high = 1.0 + config.clip_high;
            let slope = -at_most(ratio, high) * advantage;
            Surrogate {
                value: slope * logprob,
                by_logprob: slope,
                clipped_high: ratio > high && advantage > 0.0,
                ..Surrogate::default()
            }
        }
        LossKind::Sapo => {
            let tau = if advantage > 0.0 { config.sapo_tau_pos } else { config.sapo_tau_neg };
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            // A ratio that overflows has a gate of 1 and a gradient of 0.
            let slope = gate * (1.0 - gate);
            let by_log_ratio = if slope == 0.0 { 0.0 } else { -4.0 * slope * advantage * ratio };
            Surrogate {
                value: -(4.0 / tau) * gate * advantage,
                by_log_ratio,
                ..Surrogate::default()
            }
        }
        LossKind::Reinforce | LossKind::Vespo => Surrogate {
            value: -advantage * logprob,
            by_logprob: -advantage,
            ..Surrogate::default()
        },
        _ => clipped(ratio, advantage, config),
    }
}

/// The clipped ratio and its bounds:
///
/// ```text
/// gain  = min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)
/// gain  = max(gain, c A) where A < 0
/// value = -gain
/// ```
///
/// Two bounds `low` and `high` as in DAPO (Yu et al. 2025); `delta` as in INTELLECT-2 (2025); the dual
/// clip `c` by Ye et al. 2020. Above `1 + high`, delta and c bound the same thing; 0 is no bound.
pub fn clipped(ratio: f64, advantage: f64, config: &LossConfig) -> Surrogate {
    let (low, high) = (1.0 - config.clip_low, 1.0 + config.clip_high);
    let bound = |x: f64| if x > 0.0 { x } else { f64::INFINITY };
    let delta = bound(config.delta);
    let (free, held) = (at_most(ratio, delta) * advantage, ratio.clamp(low, high) * advantage);
    let mut gain = free.min(held);
    let within = if free <= held { ratio < delta } else { (low..=high).contains(&ratio) };
    let mut slope = if within { ratio * advantage } else { 0.0 };
    if advantage < 0.0 && config.dual_clip > 0.0 && config.dual_clip * advantage > gain {
        gain = config.dual_clip * advantage;
        slope = 0.0;
    }
    Surrogate {
        value: -gain,
        by_log_ratio: -slope,
        by_logprob: 0.0,
        clipped_low: ratio < low && advantage < 0.0,
        clipped_high: ratio > high && advantage > 0.0,
    }
}

/// The lesser one; a ratio that is not a number stays so.
fn at_most(ratio: f64, bound: f64) -> f64 {
    if ratio > bound { bound } else { ratio }
}
