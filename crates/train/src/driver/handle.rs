//! What the rest of the daemon sees of the trainer: its status and four commands.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::IntGauge;
use serde::Serialize;
use tokio::sync::oneshot;

use hone_core::metrics::Metrics;

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
    /// Waiting for a version to be published, which goes on beside the next step where there is one.
    Publishing,
    /// Paused by `/admin/train/pause`.
    Paused,
    /// `train.max_steps` is reached.
    Finished,
    /// Stopped by an error and backing off; `last_error` says which.
    Failed,
}

impl TrainState {
    const ALL: [Self; 7] = [
        Self::Disabled,
        Self::Waiting,
        Self::Training,
        Self::Publishing,
        Self::Paused,
        Self::Finished,
        Self::Failed,
    ];

    /// The label in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Waiting => "waiting",
            Self::Training => "training",
            Self::Publishing => "publishing",
            Self::Paused => "paused",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }

    /// Whether the trainer is using the machine.
    pub fn is_busy(self) -> bool {
        matches!(self, Self::Training | Self::Publishing)
    }
}

/// What `GET /admin/train` answers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrainStatus {
    /// Now.
    pub state: TrainState,
    /// Optimiser steps taken.
    pub step: u64,
    /// Prompts waiting for a group.
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    pub in_flight_groups: u64,
    /// Groups waiting for a step, those of the step in hand included.
    pub ready_groups: u64,
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
#[derive(Clone, Debug, thiserror::Error)]
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

/// What the worker is told.
pub(crate) enum TrainCommand {
    /// Take no further step by yourself.
    Pause,
    /// Go on.
    Resume,
    /// Take no step beyond this one by yourself; `None` lifts the bound.
    Until(Option<u64>),
    /// Take one step now.
    Step(oneshot::Sender<Result<TrainStatus, TrainError>>),
    /// Something that may matter has changed.
    Wake,
    /// End after the step in hand.
    Stop,
}

/// What keeps the worker from stepping by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepGate {
    /// Paused by hand.
    pub(crate) paused: bool,
    /// Takes no step beyond this one.
    pub(crate) until: Option<u64>,
}

impl StepGate {
    /// Follows a command that is about holding; gives any other one back.
    pub(crate) fn follow(&mut self, command: TrainCommand) -> Option<TrainCommand> {
        match command {
            TrainCommand::Pause => self.paused = true,
            TrainCommand::Resume => self.paused = false,
            TrainCommand::Until(step) => self.until = step,
            other => return Some(other),
        }
        None
    }

    /// Whether `step` steps are enough for now.
    pub(crate) fn holds(&self, step: u64) -> bool {
        self.paused || self.until.is_some_and(|until| step >= until)
    }
}

/// The status, shared between the worker and its handles.
#[derive(Clone)]
pub(crate) struct StatusCell {
    status: Arc<Mutex<TrainStatus>>,
    metrics: Arc<Metrics>,
}

impl StatusCell {
    pub(crate) fn new(state: TrainState, metrics: Arc<Metrics>) -> Self {
        let board = Self { status: Arc::default(), metrics };
        board.state(state);
        board
    }

    /// The status with what waits at this moment.
    pub(crate) fn read(&self) -> TrainStatus {
        let now = |gauge: &IntGauge| u64::try_from(gauge.get()).unwrap_or_default();
        TrainStatus {
            queued_prompts: now(&self.metrics.rollout_queue),
            in_flight_groups: now(&self.metrics.rollout_in_flight),
            ready_groups: now(&self.metrics.train.ready_groups),
            ..self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut TrainStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets the state, in the status and in the metrics alike.
    pub(crate) fn state(&self, state: TrainState) {
        self.update(|s| s.state = state);
        for each in TrainState::ALL {
            self.metrics
                .train
                .state
                .with_label_values(&[each.as_str()])
                .set(i64::from(each == state));
        }
    }
}

/// Talks to the worker. Cheap to clone.
#[derive(Clone)]
pub struct TrainHandle {
    board: StatusCell,
    /// `None` where training is disabled.
    commands: Option<Sender<TrainCommand>>,
}

impl TrainHandle {
    pub(crate) fn new(board: StatusCell, commands: Option<Sender<TrainCommand>>) -> Self {
        Self { board, commands }
    }

    /// The handle of a daemon that does not train.
    pub fn disabled(metrics: Arc<Metrics>) -> Self {
        Self::new(StatusCell::new(TrainState::Disabled, metrics), None)
    }

    fn send(&self, command: TrainCommand) -> Result<(), TrainError> {
        let commands = self.commands.as_ref().ok_or(TrainError::Disabled)?;
        commands.send(command).map_err(|_| TrainError::Stopped)
    }

    /// What it is doing.
    pub fn status(&self) -> TrainStatus {
        self.board.read()
    }

    /// Takes no further step until resumed; a step in hand is finished and published.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn pause(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Pause)
    }

    /// Goes on.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn resume(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Resume)
    }

    /// Pauses once this many steps are taken in all, counted from the first run's beginning; `None`
    /// lifts the bound.
    ///
    /// # Errors
    /// [`TrainError::Disabled`] or [`TrainError::Stopped`].
    pub fn until(&self, step: Option<u64>) -> Result<(), TrainError> {
        self.send(TrainCommand::Until(step))
    }

    /// Takes one step now on whatever is ready, even when paused; the status after it.
    ///
    /// # Errors
    /// [`TrainError::NothingReady`] when no group waits, otherwise what went wrong.
    pub async fn step(&self) -> Result<TrainStatus, TrainError> {
        let (reply, answer) = oneshot::channel();
        self.send(TrainCommand::Step(reply))?;
        answer.await.map_err(|_| TrainError::Stopped)?
    }

    /// Ends the worker after the step in hand.
    pub(crate) fn stop(&self) {
        // A worker that has ended already needs no telling.
        let _ended = self.send(TrainCommand::Stop);
    }
}
