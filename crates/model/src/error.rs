//! Errors of models and adapters.

use std::path::PathBuf;

use hone_core::files::FileError;

/// Why a model or an adapter cannot be read, used or written.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The model or a setting asks for something that Hone does not compute.
    #[error("{0}")]
    Unsupported(String),
    /// A field of `config.json` is missing or wrong.
    #[error("config.json: `{field}` is {value}, but must be {expected}")]
    Spec {
        /// The field.
        field: &'static str,
        /// Its value as JSON, or `missing`.
        value: String,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// A weight is missing or has the wrong shape.
    #[error("model weights: {0}")]
    Weights(String),
    /// A model directory cannot be read or used.
    #[error("model {path}: {reason}")]
    Model {
        /// The directory.
        path: PathBuf,
        /// A sentence without a period.
        reason: String,
    },
    /// An adapter directory cannot be read or does not fit the model.
    #[error("adapter {path}: {reason}")]
    Adapter {
        /// The directory.
        path: PathBuf,
        /// A sentence without a period.
        reason: String,
    },
    /// A configuration key is out of range.
    #[error("`{key}` is {value}, but must be {expected}")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
