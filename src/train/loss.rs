//! The policy-gradient loss, token by token, as pure functions of log-probabilities.
//!
//! For token t of sample i, with the policy's log-probability `l`, the recorded behaviour
//! log-probability `o`, the reference's `f` (the base, adapters off), ratio `r = exp(l - o)`,
//! `d = f - l` and advantage `A`:
//!
//! ```text
//! surrogate = -min(r A, clip(r, 1 - low, 1 + high) A)     PPO (Schulman et al. 2017, eq. 7);
//!                                                         two bounds as in DAPO (Yu et al. 2025)
//! k3        = exp(d) - d - 1                              Schulman, "Approximating KL divergence"
//! loss      = sum over tokens of w_i (surrogate + beta k3)
//! ```
//!
//! `w_i` is fixed for the whole optimiser step by [`sequence_weights`], so the loss and its
//! gradient do not depend on how the step is cut into micro-batches. All log-probabilities are
//! natural and at the sample's temperature T: of `softmax(logits / T)`, policy and reference alike.
//! Prompt and padding carry no loss; the sampled stop token does. As the loss depends on the
//! network through `l` alone, its gradient is `dl/dtheta` weighted by [`TokenLoss::slope`].
//!
//! Drawn from the policy itself, the mean of k3 is KL(policy || reference), but its gradient as a loss
//! term is that of KL(reference || policy), since the draw is not differentiated; only `r k3` would
//! have the former's gradient. The plain form is the one GRPO publishes and TRL computes by default;
//! a test enumerates both. Both are 0 at the same place, and agree to first order around it.

use crate::config::LossKind;

/// Coefficients of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossConfig {
    /// The ratio's lower bound is 1 minus this.
    pub clip_low: f64,
    /// The ratio's upper bound is 1 plus this.
    pub clip_high: f64,
    /// Coefficient of k3.
    pub beta: f64,
}

/// What one token contributes, before its weight.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// `surrogate + beta k3`
    pub loss: f64,
    /// Its derivative by the policy's log-probability.
    pub slope: f64,
    /// `exp(l - o)`
    pub ratio: f64,
    /// k3; 0 without a reference.
    pub kl: f64,
    /// The lower bound cut the gradient (`A < 0`).
    pub clipped_low: bool,
    /// The upper bound cut the gradient (`A > 0`).
    pub clipped_high: bool,
}

/// The loss of one token.
pub fn token_loss(
    logprob: f64,
    behaviour: f64,
    reference: Option<f64>,
    advantage: f64,
    config: &LossConfig,
) -> TokenLoss {
    let ratio = (logprob - behaviour).exp();
    let clipped_low = ratio < 1.0 - config.clip_low && advantage < 0.0;
    let clipped_high = ratio > 1.0 + config.clip_high && advantage > 0.0;
    let bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high);
    let surrogate = -(ratio * advantage).min(bounded * advantage);
    // d r / d l = r where the unclipped term is the smaller one, else 0.
    let surrogate_slope = if clipped_low || clipped_high { 0.0 } else { -ratio * advantage };
    let (kl, kl_slope) = match reference {
        Some(reference) => {
            let d = reference - logprob;
            (d.exp_m1() - d, -d.exp_m1())
        }
        None => (0.0, 0.0),
    };
    TokenLoss {
        loss: surrogate + config.beta * kl,
        slope: surrogate_slope + config.beta * kl_slope,
        ratio,
        kl,
        clipped_low,
        clipped_high,
    }
}

/// The weight of every token of each sequence, from the completion lengths of the *whole*
/// optimiser step (n sequences):
///
/// - `grpo`: `1 / (n * length_i)`, the mean over tokens, then over sequences (Shao et al. 2024)
/// - `dr_grpo`: `1 / (n * max_completion_tokens)`, free of length bias (Liu et al. 2025)
/// - `dapo`: `1 / sum of lengths` (Yu et al. 2025)
///
/// A sequence of length 0 gets 0 and does not count.
pub fn sequence_weights(
    kind: LossKind,
    lengths: &[usize],
    max_completion_tokens: usize,
) -> Vec<f64> {
    let sequences = lengths.iter().filter(|l| **l > 0).count() as f64;
    let tokens = lengths.iter().sum::<usize>() as f64;
    lengths
        .iter()
        .map(|length| match (length, kind) {
            (0, _) => 0.0,
            (length, LossKind::Grpo) => 1.0 / (sequences * *length as f64),
            (_, LossKind::DrGrpo) => 1.0 / (sequences * max_completion_tokens.max(1) as f64),
            (_, LossKind::Dapo) => 1.0 / tokens,
        })
        .collect()
}
