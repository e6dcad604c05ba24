//! Errors of the trainer.

use std::any::Any;
use std::io;
use std::sync::Arc;

use hone_core::types::PolicyVersion;
use hone_engine::EngineError;
use hone_store::StoreError;

use crate::error::LearnError;
use crate::policy::PolicyError;

/// Why the trainer's thread cannot start, or must restart from its checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum TrainFailure {
    /// The learner failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A version cannot be listed, read or published.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thread pool of `train.threads` threads cannot be built.
    #[error("train.threads: {0}")]
    Pool(#[from] rayon::ThreadPoolBuildError),
    /// A thread cannot be started.
    #[error("a thread of the trainer cannot be started: {0}")]
    Thread(#[source] io::Error),
    /// The trainer or a publication panicked with this message.
    #[error("panic: {0}")]
    Panic(String),
}

impl TrainFailure {
    pub(super) fn from_panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Self::Panic(text.unwrap_or_else(|| "unknown".to_owned()))
    }
}

/// Why a call of a [`TrainHandle`](crate::TrainHandle) failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrainError {
    /// Training is switched off.
    #[error("training is disabled (`train.enabled = false`)")]
    Disabled,
    /// A step was requested, but no group is ready.
    #[error("no group is ready to train on")]
    NothingReady,
    /// A step was requested while a canary is served, whose end decides from where training continues.
    #[error("version {0} is a canary: no step can be taken before its end")]
    CanaryRunning(PolicyVersion),
    /// The trainer's thread has ended.
    #[error("the trainer has stopped")]
    Stopped,
    /// The trainer failed; it restarts from its checkpoint.
    #[error(transparent)]
    Failed(Arc<TrainFailure>),
}

impl TrainError {
    /// Whether the engine no longer takes requests because the process ends, which is no failure.
    pub(super) fn is_end_of_engine(&self) -> bool {
        use TrainFailure::Policy;
        let Self::Failed(failure) = self else { return false };
        matches!(&**failure, Policy(PolicyError::Engine(EngineError::ShuttingDown)))
    }
}

impl<E: Into<TrainFailure>> From<E> for TrainError {
    fn from(error: E) -> Self {
        Self::Failed(Arc::new(error.into()))
    }
}
