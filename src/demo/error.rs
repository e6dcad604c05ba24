//! Errors that end a demo without a report.

use std::path::PathBuf;

use super::client::ClientError;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// An unusable option.
    #[error("{0}")]
    Options(String),
    /// An unusable data directory.
    #[error("data directory {dir}: {reason}")]
    Data {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The daemon did not start.
    #[error("the daemon did not start: {0:#}")]
    Start(anyhow::Error),
    /// The daemon did not shut down cleanly.
    #[error("the daemon did not shut down cleanly: {0:#}")]
    Shutdown(anyhow::Error),
    /// A request that the demo depends on failed.
    #[error(transparent)]
    Request(#[from] ClientError),
    /// The trainer failed.
    #[error("the trainer failed: {0}")]
    Trainer(String),
    /// The report could not be written.
    #[error("cannot write the report: {0}")]
    Output(#[from] std::io::Error),
    /// Ctrl-C before the end.
    #[error("interrupted")]
    Interrupted,
}
