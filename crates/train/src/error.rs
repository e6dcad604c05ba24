//! Errors of the learner.

use std::path::PathBuf;

use hone_core::files::FileError;
use hone_model::ModelError;

/// Why a model cannot be trained, a step failed, or a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The model or the adapter cannot be read, used or written.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A checkpoint is damaged, belongs to another model, or does not fit the configuration.
    #[error("checkpoint {path}: {reason}")]
    Checkpoint {
        /// The checkpoint's directory.
        path: PathBuf,
        /// A clause without a period.
        reason: String,
    },
    /// A sample cannot be trained on.
    #[error("sample {index}: {reason}")]
    Sample {
        /// Its index in the batch.
        index: usize,
        /// A clause without a period.
        reason: String,
    },
    /// Training, or the longest sample that is configured, needs more memory than there is.
    #[error("{0}")]
    Memory(String),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A result of the learner.
pub type Result<T> = std::result::Result<T, LearnError>;
