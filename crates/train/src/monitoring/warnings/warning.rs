//! The kinds of warnings and their advice.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What batches without a learning signal have in common; their number precedes it in messages.
pub(crate) const EQUAL_REWARDS: &str = "had no group with different rewards";

/// A way in which a run goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningKind {
    /// The completions of a group have equal rewards, so nothing is learned from them.
    Collapse,
    /// The policy moves away from the reference policy.
    KlExplosion,
    /// The reward does not rise although completions differ.
    FlatReward,
    /// A part that rewards a format stays near 0 or missing.
    FormatIgnored,
    /// Completions grow, and the reward with them, but correctness does not; or most are truncated.
    LengthHacking,
    /// The policy has become nearly deterministic.
    EntropyCollapse,
    /// Many importance ratios are clipped: updates are too large.
    ClipRatioHigh,
}

impl WarningKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Collapse,
        Self::KlExplosion,
        Self::FlatReward,
        Self::FormatIgnored,
        Self::LengthHacking,
        Self::EntropyCollapse,
        Self::ClipRatioHigh,
    ];

    /// The value of the label `kind` in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Collapse => "collapse",
            Self::KlExplosion => "kl_explosion",
            Self::FlatReward => "flat_reward",
            Self::FormatIgnored => "format_ignored",
            Self::LengthHacking => "length_hacking",
            Self::EntropyCollapse => "entropy_collapse",
            Self::ClipRatioHigh => "clip_ratio_high",
        }
    }

    /// What to change, in one sentence with configuration keys in backquotes.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Collapse => {
                "Raise `rollout.temperature` or `rollout.group_size`, use easier or harder prompts, \
                 or add a graded reward part that gives partial credit."
            }
            Self::KlExplosion => {
                "Lower `train.learning_rate`, raise `train.beta`, or lower `train.max_grad_norm`, \
                 and continue from a version published before the rise."
            }
            Self::FlatReward => {
                "Raise `train.learning_rate` or `rollout.group_size`, or add a part with partial \
                 credit (`route.reward.kind`), so that better completions earn more."
            }
            Self::FormatIgnored => {
                "Show the format in the system prompt, reward it step by step with \
                 `route.reward.kind` \"format_incremental\" before the answer counts, or raise its \
                 `route.reward.weight`."
            }
            Self::LengthHacking => {
                "Lower the `route.reward.weight` of the parts that grow with length, add one of \
                 `route.reward.kind` \"length\", or set `rollout.max_tokens` to what an answer needs."
            }
            Self::EntropyCollapse => {
                "Lower `train.learning_rate`, raise `train.clip_high` or `train.beta`, or raise \
                 `rollout.temperature`."
            }
            Self::ClipRatioHigh => {
                "Lower `train.learning_rate` or `train.num_iterations`, or lower \
                 `train.max_staleness`, so that samples stay close to the current policy."
            }
        }
    }
}

impl fmt::Display for WarningKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The beginning of an episode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The kind of the episode.
    pub kind: WarningKind,
    /// The step at which it began.
    pub step: u64,
    /// The observation with its numbers, a clause without a period.
    pub message: String,
    /// The kind's advice.
    pub advice: String,
}
