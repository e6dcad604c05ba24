//! Choices of the loss and of the advantages.

use serde::{Deserialize, Serialize};

/// The loss: a surrogate per token, and how token losses are combined into the step's loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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

hone_core::parameters! {
    /// The weight of a sequence with ratio w in `vespo`: `w^k exp(lambda (1 - w))`.
    #[derive(Copy)]
    pub struct VespoConfig {
        /// k for advantages of 0 or more: how fast the weight falls for small ratios.
        pub k_pos: f64 = 2.0 => at_least(0.0),
        /// lambda for advantages of 0 or more: how fast the weight falls for large ratios.
        pub lambda_pos: f64 = 3.0 => at_least(1e-4),
        /// k for negative advantages.
        pub k_neg: f64 = 3.0 => at_least(0.0),
        /// lambda for negative advantages.
        pub lambda_neg: f64 = 2.0 => at_least(1e-4),
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
        /// Number of samples over which beta adapts; smaller is faster.
        pub horizon: f64 = 10_000.0,
        /// Steps between updates of the reference toward the policy; 0 keeps the reference.
        pub sync_steps: u64 = 0,
        /// The policy's share in such an update.
        pub sync_mixup: f64 = 0.6 => share(),
    }
}

hone_core::parameters! {
    /// The entropy bonus.
    pub struct EntropyConfig {
        /// Coefficient of the mean entropy, which is subtracted from the loss; the initial one if
        /// `adaptive`.
        pub coef: f64 = 0.0 => at_least(0.0),
        /// Raise the coefficient while the entropy is at or below `target`, lower it otherwise.
        pub adaptive: bool = false,
        /// Minimum of the adaptive coefficient.
        pub coef_min: f64 = 0.0 => at_least(0.0),
        /// Maximum of the adaptive coefficient.
        pub coef_max: f64 = 1.0 => finite(),
        /// Change of the adaptive coefficient per update.
        pub coef_delta: f64 = 0.005 => at_least(0.0),
        /// The entropy below which the adaptive bonus acts, in nats per token.
        pub target: f64 = 0.2 => at_least(0.0),
    }
}

/// How the difference between the sampler's and the trainer's log-probabilities is corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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

hone_core::parameters! {
    /// Importance weights of the trainer's policy over the sampler's.
    pub struct CorrectionConfig {
        /// The granularity of the weights, and what happens outside the bounds.
        pub mode: CorrectionMode = CorrectionMode::default(),
        /// Lower bound of a weight.
        pub clip_min: f64 = 0.0 => at_least(0.0),
        /// Upper bound of a weight; 0 is no bound.
        pub clip_max: f64 = 3.0 => at_least(0.0),
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

/// The baseline that is subtracted from a group's rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageBaseline {
    /// The group's mean (GRPO).
    #[default]
    Mean,
    /// The mean of the group's other members (RLOO).
    LeaveOneOut,
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
