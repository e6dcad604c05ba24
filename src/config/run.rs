//! Every key of `hone train`: evaluation, tables, early stop, warnings.

use serde::{Deserialize, Serialize};

use super::Config;
use super::range::{Checked, above, at_least, between, finite};

/// When a run ends early.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStopConfig {
    /// Evaluations in a row without an improvement after which the run ends; 0 never ends it.
    pub patience: u64,
    /// How much higher than the best a held-out reward must be to count as better, 0 or more, in
    /// units of the reward.
    pub min_delta: f64,
}

impl Default for EarlyStopConfig {
    fn default() -> Self {
        Self { patience: 0, min_delta: 0.0 }
    }
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

/// `hone train`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Optimiser steps between evaluations on held-out prompts; 0 evaluates at both ends only.
    pub eval_every: u64,
    /// Held-out prompts that are asked, the first ones; 0 asks all.
    pub eval_prompts: usize,
    /// Completions of each of them.
    pub eval_samples: usize,
    /// Sampling temperature of evaluations; 0 is greedy.
    pub eval_temperature: f32,
    /// Optimiser steps between tables of samples; 0 shows none.
    pub samples_every: u64,
    /// Samples in such a table.
    pub samples_shown: usize,
    /// Whether TensorBoard's event files are written.
    pub tensorboard: bool,
    /// When to end early.
    pub early_stop: EarlyStopConfig,
    /// When to warn.
    pub warnings: WarningConfig,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            eval_every: 10,
            eval_prompts: 64,
            eval_samples: 2,
            eval_temperature: 1.0,
            samples_every: 10,
            samples_shown: 4,
            tensorboard: true,
            early_stop: EarlyStopConfig::default(),
            warnings: WarningConfig::default(),
        }
    }
}

pub(super) fn check(config: &Config) -> Checked {
    let c = &config.run;
    between("run.eval_every", c.eval_every, 0, 1 << 40)?;
    between("run.eval_prompts", c.eval_prompts, 0, 1 << 24)?;
    between("run.eval_samples", c.eval_samples, 1, 1024)?;
    between("run.eval_temperature", c.eval_temperature, 0.0, 10.0)?;
    between("run.samples_every", c.samples_every, 0, 1 << 40)?;
    between("run.samples_shown", c.samples_shown, 0, 256)?;
    between("run.early_stop.patience", c.early_stop.patience, 0, 1 << 40)?;
    at_least("run.early_stop.min_delta", c.early_stop.min_delta, 0.0)?;
    let w = &c.warnings;
    between("run.warnings.patience", w.patience, 1, 1 << 40)?;
    between("run.warnings.window", w.window, 4, 1 << 20)?;
    between("run.warnings.hysteresis", w.hysteresis, 0.0, 0.99)?;
    at_least("run.warnings.min_reward_std", w.min_reward_std, 0.0)?;
    between("run.warnings.max_zero_std_groups", w.max_zero_std_groups, 0.0, 1.0)?;
    above("run.warnings.max_kl", w.max_kl, 0.0)?;
    at_least("run.warnings.min_rise", w.min_rise, 0.0)?;
    if let Some(most) = w.reward_max {
        finite("run.warnings.reward_max", most)?;
    }
    finite("run.warnings.min_format", w.min_format)?;
    between("run.warnings.format_patience", w.format_patience, 1, 1 << 40)?;
    at_least("run.warnings.max_length_growth", w.max_length_growth, 0.0)?;
    between("run.warnings.max_truncated", w.max_truncated, 0.0, 1.0)?;
    between("run.warnings.min_entropy_share", w.min_entropy_share, 0.0, 1.0)?;
    between("run.warnings.max_clip_ratio", w.max_clip_ratio, 0.0, 1.0)
}
