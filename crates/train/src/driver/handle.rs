//! The handle through which the rest of the daemon controls the trainer.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use tokio::sync::oneshot;

use hone_core::metrics::Metrics;

use super::command::TrainCommand;
use super::error::TrainError;
use super::status::{StatusCell, TrainState, TrainStatus};

/// Controls the trainer's thread. Cheap to clone; no method but [`Self::step`] waits for it.
#[derive(Clone)]
pub struct TrainHandle {
    status: StatusCell,
    /// `None` if training is disabled.
    commands: Option<Sender<TrainCommand>>,
}

impl TrainHandle {
    pub(crate) fn new(status: StatusCell, commands: Option<Sender<TrainCommand>>) -> Self {
        Self { status, commands }
    }

    /// The handle of a daemon that does not train.
    pub fn disabled(metrics: Arc<Metrics>) -> Self {
        Self::new(StatusCell::new(TrainState::Disabled, metrics), None)
    }

    fn send(&self, command: TrainCommand) -> Result<(), TrainError> {
        let commands = self.commands.as_ref().ok_or(TrainError::Disabled)?;
        commands.send(command).map_err(|_| TrainError::Stopped)
    }

    /// The trainer's current status.
    pub fn status(&self) -> TrainStatus {
        self.status.read()
    }

    /// Pauses training after the current step, which is still published.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn pause(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Pause)
    }

    /// Ends a pause, and restores a lowered learning rate.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn resume(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Resume)
    }

    /// Halves the learning rate until [`Self::resume`].
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn lower_rate(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::LowerRate)
    }

    /// Pauses training once `limit` steps are taken in total, earlier processes included; `None`
    /// removes the limit.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn set_step_limit(&self, limit: Option<u64>) -> Result<(), TrainError> {
        self.send(TrainCommand::SetStepLimit(limit))
    }

    /// Takes one step on the groups that are ready, however few, even if paused. Returns the status
    /// after the step's publication.
    ///
    /// # Errors
    /// [`TrainError::NothingReady`] if no group is ready; otherwise as the step fails.
    pub async fn step(&self) -> Result<TrainStatus, TrainError> {
        let (reply, answer) = oneshot::channel();
        self.send(TrainCommand::Step(reply))?;
        answer.await.map_err(|_| TrainError::Stopped)?
    }

    /// Ends the trainer's thread after the current step.
    pub(crate) fn stop(&self) {
        // Fails only if the thread has already ended.
        let _ended = self.send(TrainCommand::Stop);
    }
}
