//! Errors of the learner.

use std::path::PathBuf;

use hone_core::config::Problem;
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
    /// A configuration key is out of range.
    #[error("{}{}", .0.key, .0.rest)]
    Setting(Problem),
    /// The machine has less memory than training needs.
    #[error(
        "the process needs about {needed} MiB to train, but {available} MiB are available; with \
         `train.recompute` \"always\" it needs about {least} MiB"
    )]
    Memory {
        /// MiB that the memory plan predicts.
        needed: usize,
        /// MiB that the process may hold.
        available: usize,
        /// MiB with every layer recomputed in the backward pass.
        least: usize,
    },
    /// The longest sample that is configured needs more memory than there is.
    #[error(
        "`train.max_tokens` is {max_tokens}, for which the process needs about {needed} MiB, but \
         {available} MiB are available: set it to at most {fits}, or to 0 for what fits"
    )]
    MaxTokens {
        /// The value of the key.
        max_tokens: usize,
        /// MiB that the memory plan predicts for it.
        needed: usize,
        /// MiB that the process may hold.
        available: usize,
        /// The greatest value that fits.
        fits: usize,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A result of the learner.
pub type Result<T> = std::result::Result<T, LearnError>;
