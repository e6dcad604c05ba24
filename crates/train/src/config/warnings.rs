//! The keys of `[run.warnings]`.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, above, at_least, between, finite};

/// What the daemon does when a warning begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningAction {
    /// Log it, as always.
    #[default]
    Log,
    /// Halve the learning rate until training is resumed.
    LowerRate,
    /// Pause training until it is resumed.
    Pause,
    /// Roll the active version back to its parent.
    RollBack,
}

/// `[run.warnings.actions]`: the action of each warning in the daemon. A run on a dataset only logs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarningActions {
    /// Of `collapse`.
    pub collapse: WarningAction,
    /// Of `kl_explosion`.
    pub kl_explosion: WarningAction,
    /// Of `flat_reward`.
    pub flat_reward: WarningAction,
    /// Of `format_ignored`.
    pub format_ignored: WarningAction,
    /// Of `length_hacking`.
    pub length_hacking: WarningAction,
    /// Of `entropy_collapse`.
    pub entropy_collapse: WarningAction,
    /// Of `clip_ratio_high`.
    pub clip_ratio_high: WarningAction,
}

/// Limits of the warnings. Guides to GRPO call a reward standard deviation above 0.1 and a KL below
/// 0.5 healthy; the other defaults are estimates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarningConfig {
    /// Consecutive steps, 1 or more, that begin an episode, and that end it.
    pub patience: u64,
    /// Steps, 4 or more, over which trends of reward and length are measured.
    pub window: usize,
    /// An episode ends only if the metric is within its limit by this share of the limit, at least 0
    /// and less than 1.
    pub hysteresis: f64,
    /// Collapse: minimum of the reward's standard deviation within groups, or over the completions of a
    /// step that has single ones only.
    pub min_reward_std: f64,
    /// Collapse: maximum share of groups with equal rewards.
    pub max_zero_std_groups: f64,
    /// Exploding KL: maximum in nats per token. One token that became unlikely can raise a step's
    /// estimate far, so it takes `patience` steps; a value that is not finite takes one.
    pub max_kl: f64,
    /// Flat reward: minimum rise over the window, in those standard deviations.
    pub min_rise: f64,
    /// The reward of a perfect completion. A reward within a tenth of it is neither flat nor collapsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_max: Option<f64>,
    /// Format ignored: minimum of the part's mean.
    pub min_format: f64,
    /// Format ignored: consecutive steps, 1 or more, that begin an episode.
    pub format_patience: u64,
    /// Length hacking: maximum growth of completions over the window, as a share of their length.
    pub max_length_growth: f64,
    /// Length hacking: maximum share of completions that end at the token limit.
    pub max_truncated: f64,
    /// Entropy collapse: minimum share of the mean entropy of the first `patience` steps.
    pub min_entropy_share: f64,
    /// Clip ratio high: maximum share of clipped ratios, both bounds together.
    pub max_clip_ratio: f64,
    /// `[run.warnings.actions]`
    pub actions: WarningActions,
}

impl Default for WarningConfig {
    fn default() -> Self {
        Self {
            patience: 5,
            window: 40,
            hysteresis: 0.2,
            min_reward_std: 0.1,
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
            actions: WarningActions::default(),
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
