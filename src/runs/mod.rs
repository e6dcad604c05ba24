//! Runs on a dataset or on recorded completions: `hone train`, `hone eval` and `hone rewards test`, with
//! their logs, statistics, tables and reports.
//!
//! [`train`] and [`eval`] drive the daemon's [`Core`](crate::app::Core), and [`data_check`] decides
//! whether they can learn. [`from_ledger`] trains without a daemon. The other modules depend on no engine, trainer or clock: the same input
//! gives the same bytes.

pub mod compare;
pub mod data_check;
pub mod early_stop;
pub mod eval;
pub mod eval_set;
pub mod from_ledger;
pub mod jsonl;
pub mod progress;
pub mod report;
pub mod score;
pub mod stats;
pub mod table;
pub mod tensorboard;
pub mod train;

/// Error of a run without a dataset.
const NO_DATASET: &str = "dataset.path is missing: it must name a file of prompts";

/// Error of a run without a length.
const NO_LENGTH: &str =
    "train.max_steps and train.epochs are 0: one of them must be set (--steps N or --epochs E)";
