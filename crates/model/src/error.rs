//! Errors of models and adapters.

use std::fmt::Display;
use std::path::Path;

use hone_core::files::FileError;

/// Why a model or an adapter cannot be read, used or written.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The model, the adapter or a setting cannot be used: a sentence without a period, which includes the
    /// text of its cause.
    #[error("{0}")]
    Unsupported(String),
    /// The GPU cannot be used.
    #[error("`model.device`: {0}")]
    Device(#[from] hone_cuda::GpuError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl ModelError {
    /// A weight is missing or has the wrong shape.
    pub fn weights(reason: impl Display) -> Self {
        Self::Unsupported(format!("model weights: {reason}"))
    }

    /// An adapter directory cannot be read or does not fit the model.
    pub fn adapter(path: &Path, reason: impl Display) -> Self {
        Self::Unsupported(format!("adapter {}: {reason}", path.display()))
    }

    /// A model directory cannot be read or used.
    pub(crate) fn model(path: &Path, reason: impl Display) -> Self {
        Self::Unsupported(format!("model {}: {reason}", path.display()))
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
