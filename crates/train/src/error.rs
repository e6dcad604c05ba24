//! What can go wrong inside the learner.

use std::path::PathBuf;

use hone_core::files::FileError;
use hone_model::ModelError;

/// Failures of the learning core.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The model cannot be trained.
    #[error("{0}")]
    Unsupported(String),
    /// The model or the adapter cannot be read, used or written.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A checkpoint is torn, foreign or does not fit.
    #[error("checkpoint {path}: {reason}")]
    Checkpoint {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A sample that cannot be trained on.
    #[error("sample {index}: {reason}")]
    Sample {
        /// Its place in the batch.
        index: usize,
        /// Why.
        reason: String,
    },
    /// A setting out of range.
    #[error("`{key}` is {value}, but must be {expected}")]
    Setting {
        /// The configuration key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// The machine has less memory than training needs.
    #[error(
        "training needs about {needed} MiB, but {available} MiB are available; with `train.recompute` \
         \"always\" it needs about {least} MiB"
    )]
    Memory {
        /// MiB that the plan comes to.
        needed: usize,
        /// MiB that may still be taken.
        available: usize,
        /// MiB with every layer computed again.
        least: usize,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A result of the learning core.
pub type Result<T> = std::result::Result<T, LearnError>;
