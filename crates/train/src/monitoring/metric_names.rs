//! Names of the metrics in [`StepRecord::metrics`] that warnings and reports read. Those that TRL's
//! `GRPOTrainer` has are computed as there. A metric that could not be computed is absent.

use hone_core::types::StepRecord;

/// Mean weighted reward of the step's samples.
pub const REWARD_MEAN: &str = "reward_mean";
/// Mean over groups of the weighted reward's standard deviation; absent without a group of two or more.
pub const REWARD_STD: &str = "reward_std";
/// The standard deviation of the weighted reward over the step's completions.
pub const REWARD_BATCH_STD: &str = "reward_batch_std";
/// Share of groups whose rewards were all equal, 0 to 1.
pub const ZERO_STD_GROUPS: &str = "zero_std_groups_ratio";
/// Estimate of KL(policy || reference) by `train.kl.estimator`, mean over tokens, in nats.
pub const KL: &str = "kl";
/// Entropy of the next token, mean over tokens, in nats.
pub const ENTROPY: &str = "entropy";
/// Share of importance ratios that were clipped from below, 0 to 1.
pub const CLIP_LOW: &str = "clip_low";
/// Share of importance ratios that were clipped from above, 0 to 1.
pub const CLIP_HIGH: &str = "clip_high";
/// Mean completion length in tokens.
pub const LENGTH: &str = "completion_length";
/// Share of completions that ended at the token limit, 0 to 1 (TRL's `completions/clipped_ratio`).
pub const TRUNCATED: &str = "truncated_ratio";
/// Completion tokens trained on.
pub const TOKENS: &str = "tokens";
/// Mean weighted reward on the held-out prompts, in the records of evaluations.
pub const HELD_OUT: &str = "held_out_reward";
/// Prefix of `held_out/NAME`, the mean of a reward part on the held-out prompts, of evaluations.
pub const HELD_OUT_PART: &str = "held_out/";
/// Prefix of `part/NAME`, the mean of a reward part over the samples that have it.
pub const PART: &str = "part/";

/// A metric of a step, if it is present and finite.
pub fn finite(record: &StepRecord, name: &str) -> Option<f64> {
    record.metrics.get(name).copied().filter(|value| value.is_finite())
}

/// The standard deviation of the reward within groups, or, of a step without groups, over its completions.
pub fn reward_std(record: &StepRecord) -> Option<f64> {
    finite(record, REWARD_STD).or_else(|| finite(record, REWARD_BATCH_STD))
}

/// The mean of a reward part, if it is present and finite.
pub fn part(record: &StepRecord, name: &str) -> Option<f64> {
    finite(record, &format!("{PART}{name}"))
}

/// The names of the parts whose mean a step has, in ascending order.
pub fn parts(record: &StepRecord) -> impl Iterator<Item = &str> {
    record.metrics.keys().filter_map(|name| name.strip_prefix(PART))
}
