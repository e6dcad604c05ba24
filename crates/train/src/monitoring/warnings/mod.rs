//! Watches a run's figures for the ways in which it goes wrong, and says what to change.
//!
//! Each kind of warning has an episode: it is raised when its condition has held for some steps in
//! a row, told once, and lifted when a stricter condition has held for some steps in a row
//! (hysteresis, so that a figure near its threshold is not told again and again). A figure that is
//! missing proves nothing and leaves the episode as it is.

mod detect;
mod health_monitor;
mod watch;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::config::WarningConfig;
pub use health_monitor::HealthMonitor;
pub use watch::{Watch, WatchState};

/// What is going wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningKind {
    /// The completions of a group earn the same, so nothing is learned from them.
    Collapse,
    /// The policy moves away from the reference policy.
    KlExplosion,
    /// The reward does not rise although completions differ.
    FlatReward,
    /// A part that rewards a format stays near 0 or missing.
    FormatIgnored,
    /// Completions grow, and the reward with them, but the right answers do not; or most are cut.
    LengthHacking,
    /// The policy has become nearly deterministic.
    EntropyCollapse,
    /// Many tokens' ratios are clipped: steps are too large.
    ClipRatioHigh,
}

impl WarningKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Collapse,
        Self::KlExplosion,
        Self::FlatReward,
        Self::FormatIgnored,
        Self::LengthHacking,
        Self::EntropyCollapse,
        Self::ClipRatioHigh,
    ];

    /// The value of the label `kind` in the metrics.
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

    /// What to change, in one sentence; keys of the configuration stand in backquotes.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Collapse => {
                "Raise `rollout.temperature` or `rollout.group_size`, take prompts that are neither \
                 always right nor always wrong, or add a part with partial credit."
            }
            Self::KlExplosion => {
                "Lower `train.learning_rate`, raise `train.beta`, or lower `train.max_grad_norm`, \
                 and go on from a checkpoint of before the rise."
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
                 `train.max_staleness`, so that samples stay close to the policy that learns."
            }
        }
    }
}

impl fmt::Display for WarningKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One episode's beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// What is going wrong.
    pub kind: WarningKind,
    /// The step at which it was noticed.
    pub step: u64,
    /// What was seen, with its figures, in one sentence.
    pub message: String,
    /// What to change, in one sentence.
    pub advice: String,
}

/// Which parts of the reward mean what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roles {
    /// Parts that reward a form.
    pub format: Vec<String>,
    /// Parts that reward a right answer.
    pub correctness: Vec<String>,
}

impl Roles {
    /// Sorts parts by words in the `kind` of their function and, for kinds that say nothing
    /// (scripts, webhooks), in their name. A part may be neither.
    pub fn of<'a>(parts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        const FORMAT: [&str; 7] = ["format", "xml", "json", "schema", "think", "tags", "regex"];
        const CORRECT: [&str; 8] =
            ["match", "math", "numeric", "choice", "code", "correct", "accuracy", "right"];
        let mut roles = Self::default();
        for (name, kind) in parts {
            let has = |text: &str, words: &[&str]| {
                let text = text.to_ascii_lowercase();
                words.iter().any(|word| text.contains(word))
            };
            let texts = [kind, name];
            let found = texts.iter().find(|t| has(t, &FORMAT) || has(t, &CORRECT));
            match found {
                Some(text) if has(text, &FORMAT) => roles.format.push(name.to_owned()),
                Some(_) => roles.correctness.push(name.to_owned()),
                None => {}
            }
        }
        roles
    }
}

#[cfg(test)]
mod tests;
