//! Every key of `hone train`: evaluation, tables, early stop, warnings.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, at_least, between};
use hone_train::config::WarningConfig;

use super::Config;

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
    c.warnings.check()
}
