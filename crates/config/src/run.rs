//! `[run]`: the keys of `hone train`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::section::Parameters;
use hone_train::monitoring::warnings::WarningConfig;

use super::services::MlflowServer;

/// Service that gets the steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunTracker {
    /// No service.
    #[default]
    None,
    /// An MLflow tracking server.
    Mlflow,
}

hone_core::parameters! {
    /// Early stopping of a run.
    pub struct EarlyStopConfig {
        /// Number of consecutive evaluations without improvement after which the run ends; 0 disables
        /// early stopping.
        pub patience: u64 = 0 => between(0, 1 << 40),
        /// Smallest increase of the held-out reward over the best one that counts as an improvement.
        #[serde(skip)]
        pub min_delta: f64 = 0.0,
    }
}

hone_core::parameters! {
    /// `[run]`.
    pub struct RunConfig {
        /// Optimizer steps between evaluations on held-out prompts; 0 evaluates only at the start and the
        /// end.
        pub eval_every: u64 = 10 => between(0, 1 << 40),
        /// Number of held-out prompts per evaluation, from the first on; 0 for all.
        pub eval_prompts: usize = 64 => between(0, 1 << 24),
        /// Completions per held-out prompt.
        pub eval_samples: usize = 2 => between(1, 1024),
        /// Sampling temperature of evaluations; 0 is greedy.
        pub eval_temperature: f32 = 1.0 => between(0.0, 10.0),
        /// Optimizer steps between tables of samples; 0 shows none.
        pub samples_every: u64 = 10 => between(0, 1 << 40),
        /// Samples per table.
        #[serde(skip)]
        pub samples_shown: usize = 4,
        /// Service that gets the steps.
        pub tracker: RunTracker = RunTracker::default(),
        /// The server of [`RunTracker::Mlflow`], which the loader reads from the environment.
        #[serde(skip)]
        pub mlflow: Option<MlflowServer> = None,
        /// Early stopping.
        pub early_stop: EarlyStopConfig = EarlyStopConfig::default(),
        /// Thresholds of training warnings.
        pub warnings: WarningConfig = WarningConfig::default(),
    }
}

impl RunConfig {
    pub(super) fn check(&self) -> Checked {
        self.check_in("run.")?;
        self.early_stop.check_in("run.early_stop.")?;
        self.warnings.check()
    }
}
