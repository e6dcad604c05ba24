//! The learning loop: batches of groups in, adapters out.
//!
//! [`Learner`] is the pure part (model, loss, optimiser, checkpoint); the worker drives it.
// STUB: the worker's signatures only.

pub mod advantage;
mod batch;
pub mod checkpoint;
pub mod error;
mod files;
pub mod learner;
#[cfg(test)]
mod learner_tests;
pub mod lora;
pub mod loss;
#[cfg(test)]
mod loss_tests;
pub mod model;
pub mod optim;
#[cfg(test)]
mod optim_tests;
mod pass;
#[cfg(test)]
mod pass_tests;
pub mod peft;
pub mod schedule;
#[cfg(test)]
mod step_bench;
#[cfg(test)]
mod testing;

pub use batch::TrainSample;
pub use error::LearnError;
pub use learner::{Learner, StepStats};
pub use lora::Lora;
pub use model::{Model, ModelSpec};

use serde::Serialize;
use std::collections::BTreeMap;

/// What the trainer is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainState {
    /// `train.enabled` is false.
    Disabled,
    /// Waiting for enough groups.
    #[default]
    Waiting,
    /// Computing a step.
    Training,
    /// Publishing a version.
    Publishing,
    /// Paused by `/admin/train/pause`.
    Paused,
    /// `train.max_steps` is reached.
    Finished,
    /// Stopped by an error; `last_error` says which.
    Failed,
}

/// What `GET /admin/train` answers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrainStatus {
    /// Now.
    pub state: TrainState,
    /// Optimiser steps taken.
    pub step: u64,
    /// Groups waiting.
    pub ready_groups: usize,
    /// The version that the trainer's weights come after.
    pub policy_version: u64,
    /// Metrics of the last step.
    pub metrics: BTreeMap<String, f64>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// Restarts from a checkpoint since the start.
    pub restarts: u64,
}

/// What can go wrong when the trainer is told something.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Training is switched off.
    #[error("training is disabled (`train.enabled = false`)")]
    Disabled,
    /// A step was asked for, but nothing waits.
    #[error("no group is ready to train on")]
    NothingReady,
    /// The worker has stopped.
    #[error("the trainer has stopped")]
    Stopped,
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// Talks to the worker. Cheap to clone.
#[derive(Clone)]
pub struct TrainHandle {}

#[expect(clippy::unused_async, reason = "stub")]
impl TrainHandle {
    /// What it is doing.
    pub fn status(&self) -> TrainStatus {
        TrainStatus::default()
    }
    /// Takes no further step until resumed.
    pub fn pause(&self) -> Result<(), TrainError> {
        Ok(())
    }
    /// Goes on.
    pub fn resume(&self) -> Result<(), TrainError> {
        Ok(())
    }
    /// Takes one step now on whatever is ready, even when paused; the status after it.
    pub async fn step(&self) -> Result<TrainStatus, TrainError> {
        Err(TrainError::Stopped)
    }
}
