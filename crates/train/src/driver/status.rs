//! The trainer's state and status, and the cell through which other threads read them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::IntGauge;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::metrics::Metrics;

/// The trainer's current activity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainState {
    /// `train.enabled` is false.
    Disabled,
    /// Waiting for enough ready groups.
    #[default]
    Waiting,
    /// Computing a step.
    Training,
    /// Waiting for a publication to finish. A publication during a step does not count.
    Publishing,
    /// Paused by an operator, or at the step limit of `hone train`.
    Paused,
    /// `train.when` or `train.max_steps_per_day` permits no step now.
    Scheduled,
    /// `train.max_steps` is reached.
    Finished,
    /// Waiting to restart after an error, which is in [`TrainStatus::last_error`].
    Failed,
}

impl TrainState {
    const ALL: [Self; 8] = [
        Self::Disabled,
        Self::Waiting,
        Self::Training,
        Self::Publishing,
        Self::Paused,
        Self::Scheduled,
        Self::Finished,
        Self::Failed,
    ];

    /// The name in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Waiting => "waiting",
            Self::Training => "training",
            Self::Publishing => "publishing",
            Self::Paused => "paused",
            Self::Scheduled => "scheduled",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }
}

/// The response of `GET /admin/train`.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct TrainStatus {
    /// The current activity.
    pub state: TrainState,
    /// Optimizer steps in the ledger. A step that may still be undone does not count.
    pub step: u64,
    /// Prompts that no group has been formed for yet.
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    pub in_flight_groups: u64,
    /// Groups waiting for a step, including those of the step being computed.
    pub ready_groups: u64,
    /// The last published version that the trainer's weights descend from.
    pub policy_version: u64,
    /// The pause that an operator's activation of a version began, with its end; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Why the state is `scheduled`; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Longest sample in tokens that can be trained on, by `train.max_tokens` or the memory; 0 until
    /// the trainer has started.
    pub max_sample_tokens: usize,
    /// Metrics of the last step.
    pub metrics: BTreeMap<String, f64>,
    /// The last failure, rejection or reason for a skipped batch; kept when training continues.
    pub last_error: Option<String>,
    /// Restarts from a checkpoint since the process started.
    pub restarts: u64,
    /// Batches without a step since the process started: the sum of
    /// `hone_train_skipped_steps_total` over its reasons.
    pub skipped_batches: u64,
}

/// The status, shared by the trainer's thread and its handles.
#[derive(Clone)]
pub(crate) struct StatusCell {
    status: Arc<Mutex<TrainStatus>>,
    metrics: Arc<Metrics>,
}

impl StatusCell {
    pub(crate) fn new(state: TrainState, metrics: Arc<Metrics>) -> Self {
        let cell = Self { status: Arc::default(), metrics };
        cell.set_state(state);
        cell
    }

    /// The status, with the current values of the gauges that other tasks maintain.
    pub(crate) fn read(&self) -> TrainStatus {
        let count = |gauge: &IntGauge| u64::try_from(gauge.get()).unwrap_or_default();
        TrainStatus {
            queued_prompts: count(&self.metrics.rollout_queue),
            in_flight_groups: count(&self.metrics.rollout_in_flight),
            ready_groups: count(&self.metrics.train.ready_groups),
            ..self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut TrainStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets the state in the status and in `hone_train_state`.
    pub(crate) fn set_state(&self, state: TrainState) {
        self.update(|s| s.state = state);
        for each in TrainState::ALL {
            let gauge = self.metrics.train.state.with_label_values(&[each.as_str()]);
            gauge.set(i64::from(each == state));
        }
    }
}
