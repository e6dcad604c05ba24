//! The names of a step's figures that this module reads from [`StepRecord::metrics`].
//!
//! Where the peers have a figure of the same meaning, its definition is theirs (TRL's
//! `GRPOTrainer`). A figure that could not be computed is absent.

use hone_core::types::StepRecord;

/// Mean weighted reward of the step's samples.
pub const REWARD_MEAN: &str = "reward_mean";
/// Mean within-group standard deviation of the weighted reward.
pub const REWARD_STD: &str = "reward_std";
/// Share of groups whose rewards were all equal, 0 to 1.
pub const ZERO_STD_GROUPS: &str = "zero_std_groups_ratio";
/// Estimate of KL(policy || reference) by `train.kl.estimator`, mean over tokens, in nats.
pub const KL: &str = "kl";
/// Mean entropy of the next token, in nats.
pub const ENTROPY: &str = "entropy";
/// Share of tokens whose ratio was clipped from below, 0 to 1.
pub const CLIP_LOW: &str = "clip_low";
/// Share of tokens whose ratio was clipped from above, 0 to 1.
pub const CLIP_HIGH: &str = "clip_high";
/// Mean completion length in tokens.
pub const LENGTH: &str = "completion_length";
/// Share of completions that ended at the token limit, 0 to 1 (TRL's `completions/clipped_ratio`).
pub const TRUNCATED: &str = "truncated_ratio";
/// Completion tokens trained on.
pub const TOKENS: &str = "tokens";
/// Seconds that the step took.
pub const STEP_SECONDS: &str = "step_seconds";
/// Mean weighted reward on the held-out prompts, where the step was evaluated.
pub const HELD_OUT: &str = "held_out_reward";
/// `part/NAME` is the mean of a reward part over the samples that have it.
pub const PART: &str = "part/";

/// A figure of a step, if it is known and finite.
pub fn finite(record: &StepRecord, name: &str) -> Option<f64> {
    record.metrics.get(name).copied().filter(|value| value.is_finite())
}

/// The mean of a reward part, if it is known and finite.
pub fn part(record: &StepRecord, name: &str) -> Option<f64> {
    finite(record, &format!("{PART}{name}"))
}

/// The names of the parts that a step has a mean of, in order.
pub fn parts(record: &StepRecord) -> impl Iterator<Item = &str> {
    record.metrics.keys().filter_map(|name| name.strip_prefix(PART))
}
