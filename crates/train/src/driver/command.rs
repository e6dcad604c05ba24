//! Commands to the trainer's thread, and the conditions under which it takes no step on its own.

use tokio::sync::oneshot;

use super::error::TrainError;
use super::status::TrainStatus;

/// Receives the status after a requested step.
pub(crate) type StepReply = oneshot::Sender<Result<TrainStatus, TrainError>>;

/// A message to the trainer's thread.
pub(crate) enum TrainCommand {
    /// Stop stepping until [`Self::Resume`].
    Pause,
    /// Undo [`Self::Pause`].
    Resume,
    /// Stop stepping after this step; `None` removes the limit.
    SetStepLimit(Option<u64>),
    /// Halve the learning rate until [`Self::Resume`].
    LowerRate,
    /// Take one step now, even if paused.
    Step(StepReply),
    /// Look for ready groups and rollbacks now.
    Wake,
    /// End the thread after the current step.
    Stop,
}

/// Decides whether the trainer may take a step on its own. Outlives restarts of the trainer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepGate {
    pub(crate) paused: bool,
    /// Whether a resume has come that the trainer has not taken yet. It ends a hold too.
    pub(crate) resumed: bool,
    /// The last step that may be taken.
    pub(crate) step_limit: Option<u64>,
}

impl StepGate {
    /// Applies a command that changes the gate; returns any other command.
    pub(crate) fn apply(&mut self, command: TrainCommand) -> Option<TrainCommand> {
        match command {
            TrainCommand::Pause => self.paused = true,
            TrainCommand::Resume => (self.paused, self.resumed) = (false, true),
            TrainCommand::SetStepLimit(limit) => self.step_limit = limit,
            other => return Some(other),
        }
        None
    }

    /// Whether no step may follow step `step`.
    pub(crate) fn is_closed(&self, step: u64) -> bool {
        self.paused || self.step_limit.is_some_and(|limit| step >= limit)
    }
}
