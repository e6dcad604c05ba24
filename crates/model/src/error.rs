//! Errors of models and adapters.

use std::error::Error;
use std::path::{Path, PathBuf};

use hone_core::files::FileError;

type Cause = Box<dyn Error + Send + Sync>;

/// Why a model or an adapter cannot be read, used or written.
///
/// A reason is a sentence without a period. It includes the text of its cause, if there is one.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The model or a setting needs a computation that Hone does not implement.
    #[error("{0}")]
    Unsupported(String),
    /// A field of `config.json` is missing or wrong.
    #[error("config.json: `{field}` is {value}, but must be {expected}")]
    Spec {
        /// The field.
        field: &'static str,
        /// Its value as JSON, or `missing`.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// A weight is missing or has the wrong shape: the reason and its cause.
    #[error("model weights: {0}")]
    Weights(String, #[source] Option<Cause>),
    /// A model directory cannot be read or used: the directory, the reason and its cause.
    #[error("model {0}: {1}")]
    Model(PathBuf, String, #[source] Option<Cause>),
    /// An adapter directory cannot be read or does not fit the model: the directory, the reason and its
    /// cause.
    #[error("adapter {0}: {1}")]
    Adapter(PathBuf, String, #[source] Option<Cause>),
    /// A configuration key is out of range.
    #[error("`{key}` is {value}, but must be {expected}")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl ModelError {
    /// [`Self::Weights`] without a cause.
    pub fn weights(reason: impl Into<String>) -> Self {
        Self::Weights(reason.into(), None)
    }

    /// [`Self::Adapter`] without a cause.
    pub fn adapter(path: &Path, reason: impl Into<String>) -> Self {
        Self::Adapter(path.to_owned(), reason.into(), None)
    }

    /// [`Self::Model`] without a cause.
    pub(crate) fn model(path: &Path, reason: impl Into<String>) -> Self {
        Self::Model(path.to_owned(), reason.into(), None)
    }

    /// Sets the cause, in variants that have one.
    #[must_use]
    pub fn caused_by(mut self, error: impl Into<Cause>) -> Self {
        if let Self::Weights(_, cause) | Self::Model(_, _, cause) | Self::Adapter(_, _, cause) =
            &mut self
        {
            *cause = Some(error.into());
        }
        self
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
