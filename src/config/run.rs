//! `[run]`: the keys of `hone train`.

use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, between};
use hone_train::monitoring::warnings::WarningConfig;

/// Early stopping of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStopConfig {
    /// Number of consecutive evaluations without improvement after which the run ends; 0 disables
    /// early stopping.
    pub patience: u64,
    /// Smallest increase of the held-out reward over the best one that counts as an improvement.
    #[serde(skip)]
    pub min_delta: f64,
}

/// `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Optimizer steps between evaluations on held-out prompts; 0 evaluates only at the start and the
    /// end.
    pub eval_every: u64,
    /// Number of held-out prompts per evaluation, from the first on; 0 for all.
    pub eval_prompts: usize,
    /// Completions per held-out prompt.
    pub eval_samples: usize,
    /// Sampling temperature of evaluations; 0 is greedy.
    pub eval_temperature: f32,
    /// Optimizer steps between tables of samples; 0 shows none.
    pub samples_every: u64,
    /// Samples per table.
    pub samples_shown: usize,
    /// Early stopping.
    pub early_stop: EarlyStopConfig,
    /// Thresholds of training warnings.
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
            early_stop: EarlyStopConfig::default(),
            warnings: WarningConfig::default(),
        }
    }
}

impl RunConfig {
    pub(super) fn check(&self) -> Checked {
        between("run.eval_every", self.eval_every, 0, 1 << 40)?;
        between("run.eval_prompts", self.eval_prompts, 0, 1 << 24)?;
        between("run.eval_samples", self.eval_samples, 1, 1024)?;
        between("run.eval_temperature", self.eval_temperature, 0.0, 10.0)?;
        between("run.samples_every", self.samples_every, 0, 1 << 40)?;
        between("run.samples_shown", self.samples_shown, 0, 256)?;
        between("run.early_stop.patience", self.early_stop.patience, 0, 1 << 40)?;
        self.warnings.check()
    }
}
