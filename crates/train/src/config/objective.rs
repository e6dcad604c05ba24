//! Choices of the loss and of the advantages.

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantNames};

/// A surrogate per token, and how token losses are combined into the step's loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum LossKind {
    /// Clipped ratio; mean over each sequence, then over sequences (Shao et al. 2024).
    Grpo,
    /// Clipped ratio; sum over tokens, divided by sequences x `rollout.max_tokens`.
    DrGrpo,
    /// Clipped ratio; mean over the tokens of the local batch, which is the optimizer step.
    Bnpo,
    /// Clipped ratio; mean over all tokens of the optimizer step.
    #[default]
    Dapo,
    /// The bounded ratio as a constant weight of the log-probability; mean over all tokens.
    Cispo,
    /// A sigmoid gate of the ratio; mean over each sequence, then over sequences.
    Sapo,
    /// Clipped ratio; sum over tokens, mean over sequences.
    Luspo,
    /// `grpo` with one ratio per sequence.
    Gspo,
    /// Log-probability times advantage, without a ratio; mean over all tokens.
    Reinforce,
    /// `reinforce` with a smooth weight of the sequence's ratio; mean over all tokens.
    Vespo,
}

impl LossKind {
    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

hone_core::choice! {
    /// The loss with its parameters.
    pub struct Loss of LossKind {
        for Sapo {
            /// The sharpness tau of the gate of `sapo`, for positive advantages.
            pub tau_pos: f64 = 1.0 => above(0.0),
            /// The same for other advantages.
            pub tau_neg: f64 = 1.05 => above(0.0),
        }
        for Vespo {
            /// k of the weight of a sequence with ratio w in `vespo`, `w^k exp(lambda (1 - w))`, for advantages of 0
            /// or more: how fast the weight falls for small ratios.
            pub k_pos: f64 = 2.0 => at_least(0.0),
            /// lambda for advantages of 0 or more: how fast the weight falls for large ratios.
            pub lambda_pos: f64 = 3.0 => at_least(1e-4),
            /// k for negative advantages.
            pub k_neg: f64 = 3.0 => at_least(0.0),
            /// lambda for negative advantages.
            pub lambda_neg: f64 = 2.0 => at_least(1e-4),
        }
    }
}

/// Whether a sequence has one importance ratio or one per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// One ratio per token.
    #[default]
    Token,
    /// One ratio per sequence: the geometric mean over its tokens.
    Sequence,
}

/// The estimator of KL(policy || reference) in the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `logp - ref`
    K1,
    /// `(logp - ref)^2 / 2`
    K2,
    /// `exp(ref - logp) - (ref - logp) - 1`
    #[default]
    K3,
    /// `k3` times the importance ratio.
    Corrected,
}

hone_core::parameters! {
    /// The KL term and the reference policy.
    pub struct KlConfig {
        /// The estimator in the loss.
        pub estimator: KlEstimator = KlEstimator::default(),
        /// Adapt `train.beta` so that the KL approaches this, in nats per token; 0 keeps beta fixed.
        pub target: f64 = 0.0 => at_least(0.0),
        /// Steps between updates of the reference toward the policy; 0 keeps the reference.
        pub sync_steps: u64 = 0,
        /// The policy's share in such an update.
        pub sync_mixup: f64 = 0.6 => share(),
    }
}

hone_core::parameters! {
    /// The entropy bonus.
    pub struct EntropyConfig {
        /// Coefficient of the mean entropy, which is subtracted from the loss; with a target the initial one.
        pub coef: f64 = 0.0 => at_least(0.0),
        /// Mean entropy, in nats per token, at or below which the bonus acts and its coefficient rises; above it
        /// the coefficient falls. 0 keeps the coefficient fixed.
        pub target: f64 = 0.0 => at_least(0.0),
    }
}

impl EntropyConfig {
    /// Whether the coefficient follows the target.
    pub fn is_adaptive(&self) -> bool {
        self.target > 0.0
    }
}

/// How the difference between the sampler's and the trainer's log-probabilities is corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum CorrectionMode {
    /// Not separately: the surrogate's ratio is taken against the recorded log-probabilities.
    #[default]
    None,
    /// One weight per token, clamped to the bounds.
    TokenTruncate,
    /// One weight per token, 0 outside the bounds.
    TokenMask,
    /// One weight per sequence, clamped to the bounds.
    SequenceTruncate,
    /// One weight per sequence, 0 outside the bounds.
    SequenceMask,
}

hone_core::choice! {
    /// Importance weights of the trainer's policy over the sampler's.
    pub struct CorrectionConfig of CorrectionMode {
        for TokenTruncate | TokenMask | SequenceTruncate | SequenceMask {
            /// Lower bound of a weight.
            pub clip_min: f64 = 0.0 => at_least(0.0),
            /// Upper bound of a weight; 0 is no bound.
            pub clip_max: f64 = 3.0 => at_least(0.0),
        }
    }
}

/// The divisor of group advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageScale {
    /// The group's standard deviation (GRPO).
    #[default]
    Group,
    /// The batch's standard deviation.
    Batch,
    /// 1 (Dr. GRPO).
    None,
}

/// How several reward parts become one advantage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardAggregation {
    /// Sum the parts by weight, then normalize the sum (TRL's default).
    #[default]
    SumThenNormalize,
    /// Normalize each part, then sum them by weight.
    NormalizeThenSum,
    /// `normalize_then_sum`, then standardize over the batch.
    Gdpo,
}

/// The treatment of groups whose rewards are all equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVariance {
    /// Their samples count in the normalizer and in the KL.
    #[default]
    Keep,
    /// They are not trained on, except members whose feedback differs from its running baseline.
    Drop,
}
