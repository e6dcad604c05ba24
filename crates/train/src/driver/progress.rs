//! The trainer's state between steps, apart from the learner's own; part of a checkpoint.

use serde::{Deserialize, Serialize};

use hone_core::types::{PolicyVersion, StepRecord};

use crate::data::adaptive_weights::AdaptiveWeights;
use crate::data::advantage::Baselines;

/// What a checkpoint stores under `extra`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TrainProgress {
    /// Running baselines by route and part.
    pub(super) baselines: Baselines,
    /// State of adaptive part weights. Absent from older checkpoints.
    #[serde(default)]
    pub(super) weights: AdaptiveWeights,
    /// The published version that the weights descend from.
    pub(super) parent: PolicyVersion,
    /// Steps taken since `parent`.
    #[serde(rename = "pending")]
    pub(super) unpublished_steps: u64,
    /// The record of the last step. It names the groups that the step consumed, so a restart can
    /// repeat a ledger write that a crash prevented.
    pub(super) last_step: Option<StepRecord>,
}

impl TrainProgress {
    pub(super) fn new(baseline_window: f64) -> Self {
        Self {
            baselines: Baselines::new(baseline_window),
            weights: AdaptiveWeights::default(),
            parent: PolicyVersion::BASE,
            unpublished_steps: 0,
            last_step: None,
        }
    }

    /// Records that the weights are those of `version`.
    pub(super) fn set_published(&mut self, version: PolicyVersion) {
        self.parent = version;
        self.unpublished_steps = 0;
    }

    /// Records a step.
    pub(super) fn add_step(&mut self, record: StepRecord) {
        self.last_step = Some(record);
        self.unpublished_steps += 1;
    }

    /// Number of recorded steps. The learner is one ahead while its step may still be undone.
    pub(super) fn steps(&self) -> u64 {
        self.last_step.as_ref().map_or(0, |step| step.step)
    }

    /// The version that has exactly these weights; `None` after an unpublished step.
    pub(super) fn current_version(&self) -> Option<PolicyVersion> {
        (self.unpublished_steps == 0).then_some(self.parent)
    }
}
