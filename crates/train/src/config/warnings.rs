//! The keys of `[run.warnings]`.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, above, at_least, between, finite};

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
    /// Exploding KL: above this many nats a token. A single token that became unlikely can lift a
    /// step's estimate far, so it takes `patience` steps; told at once where it is no number.
    pub max_kl: f64,
    /// Flat reward: it rises over the window by less than this many of its standard deviations
    /// within groups.
    pub min_rise: f64,
    /// What a perfect completion earns. Within a tenth of it the reward is not called flat.
    #[serde(skip_serializing_if = "Option::is_none")]
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

impl WarningConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("run.warnings.patience", self.patience, 1, 1 << 40)?;
        between("run.warnings.window", self.window, 4, 1 << 20)?;
        between("run.warnings.hysteresis", self.hysteresis, 0.0, 0.99)?;
        at_least("run.warnings.min_reward_std", self.min_reward_std, 0.0)?;
        between("run.warnings.max_zero_std_groups", self.max_zero_std_groups, 0.0, 1.0)?;
        above("run.warnings.max_kl", self.max_kl, 0.0)?;
        at_least("run.warnings.min_rise", self.min_rise, 0.0)?;
        if let Some(most) = self.reward_max {
            finite("run.warnings.reward_max", most)?;
        }
        finite("run.warnings.min_format", self.min_format)?;
        between("run.warnings.format_patience", self.format_patience, 1, 1 << 40)?;
        at_least("run.warnings.max_length_growth", self.max_length_growth, 0.0)?;
        between("run.warnings.max_truncated", self.max_truncated, 0.0, 1.0)?;
        between("run.warnings.min_entropy_share", self.min_entropy_share, 0.0, 1.0)?;
        between("run.warnings.max_clip_ratio", self.max_clip_ratio, 0.0, 1.0)
    }
}
