//! The contents of a report.

use serde::{Deserialize, Serialize};

use hone_core::types::{StepRecord, UnixMillis};
use hone_train::monitoring::warnings::Warning;

use crate::runs::Best;
use crate::runs::from_ledger::RecordReport;
use crate::runs::stats::Estimate;

/// Why a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All requested steps were taken.
    Finished,
    /// The held-out reward stopped improving.
    EarlyStop,
    /// The operator interrupted it.
    Interrupted,
    /// A component failed, with this error.
    Failed(String),
}

/// One measurement on the held-out prompts before the first step and after the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// `total` or the name of a part.
    pub name: String,
    /// Before; `None` if it could not be computed.
    pub before: Option<Estimate>,
    /// After; `None` if it could not be computed.
    pub after: Option<Estimate>,
    /// After minus before, over the same prompts.
    pub difference: Option<Estimate>,
}

/// A held-out prompt with a completion before and after training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplePair {
    /// The prompt.
    pub prompt: String,
    /// The completion before and its reward.
    pub before: Option<(String, Option<f64>)>,
    /// The completion after and its reward.
    pub after: Option<(String, Option<f64>)>,
}

/// The contents of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The run's name.
    pub name: String,
    /// The trained model.
    pub model: String,
    /// Start of the run.
    pub started: UnixMillis,
    /// End of the run.
    pub ended: UnixMillis,
    /// Why it ended.
    pub ending: Ending,
    /// Keys of the configuration that differ from their defaults, with their values, in display order.
    pub configuration: Vec<(String, String)>,
    /// The whole effective configuration as TOML, without secrets.
    #[serde(default)]
    pub configuration_text: String,
    /// The file with a copy of it.
    #[serde(default)]
    pub configuration_file: Option<String>,
    /// The metrics of every step.
    pub steps: Vec<StepRecord>,
    /// Step and mean held-out reward of each evaluation; step 0 is before training.
    pub held_out: Vec<(u64, f64)>,
    /// Held-out measurements before and after.
    pub comparisons: Vec<Comparison>,
    /// Completions before and after.
    pub samples: Vec<SamplePair>,
    /// The warnings in the order they were raised.
    pub warnings: Vec<Warning>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// The directory of the best adapter.
    pub best_checkpoint: Option<String>,
    /// The recorded completions of a run on a ledger, and what they say about the policies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordReport>,
}
