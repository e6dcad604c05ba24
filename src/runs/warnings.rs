//! Watches a run's figures for the ways in which it goes wrong, and says what to change.
//!
//! Each kind of warning has an episode: it is raised when its condition has held for some steps in
//! a row, told once, and lifted when a stricter condition has held for some steps in a row
//! (hysteresis, so that a figure near its threshold is not told again and again). A figure that is
//! missing proves nothing and leaves the episode as it is.

use std::fmt;

use serde::{Deserialize, Serialize};

mod detect;
#[cfg(test)]
mod tests;
mod watch;

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

/// Where the limits lie. The defaults follow the guides this project was started from (reward
/// standard deviation above 0.1, KL below 0.5 in a healthy run); those they do not give are ours.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarningConfig {
    /// Steps in a row, 1 or more, that a condition must hold before it is told, and that its
    /// opposite must hold before the episode is over.
    pub patience: u64,
    /// Steps, 4 or more, over which trends (of the reward, the length) are measured.
    pub window: usize,
    /// An episode is over only when the figure is back within its limit by this share of it,
    /// 0 or more and less than 1.
    pub hysteresis: f64,
    /// Collapse: the reward's standard deviation within groups is below this, in units of the
    /// reward.
    pub min_reward_std: f64,
    /// Collapse: more than this share of groups has no deviation at all.
    pub max_zero_std_groups: f64,
    /// Exploding KL: above this many nats a token. Told at once, without `patience`.
    pub max_kl: f64,
    /// Flat reward: it rises over the window by less than this many of its standard deviations
    /// within groups.
    pub min_rise: f64,
    /// What a perfect completion earns. Within a tenth of it the reward is not called flat.
    pub reward_max: Option<f64>,
    /// Format ignored: the part's mean is below this.
    pub min_format: f64,
    /// Format ignored: for this many steps in a row, 1 or more.
    pub format_patience: u64,
    /// Length hacking: completions grow over the window by more than this share of their length.
    pub max_length_growth: f64,
    /// Length hacking: more than this share of completions ends at the token limit.
    pub max_truncated: f64,
    /// Entropy collapse: below this share of what it was over the first `patience` steps.
    pub min_entropy_share: f64,
    /// Clip ratio high: more than this share of tokens is clipped, both sides together.
    pub max_clip_ratio: f64,
}

impl Default for WarningConfig {
    fn default() -> Self {
        Self {
            patience: 5,
            window: 40,
            hysteresis: 0.2,
            min_reward_std: 0.05,
            max_zero_std_groups: 0.8,
            max_kl: 0.5,
            min_rise: 0.1,
            reward_max: None,
            min_format: 0.05,
            format_patience: 20,
            max_length_growth: 0.25,
            max_truncated: 0.5,
            min_entropy_share: 0.1,
            max_clip_ratio: 0.3,
        }
    }
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
