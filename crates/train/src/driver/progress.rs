//! What the worker remembers between steps beside the learner's own state; part of a checkpoint.

use serde::{Deserialize, Serialize};

use hone_core::types::{PolicyVersion, StepRecord};

use crate::data::adaptive_weights::AdaptiveWeights;
use crate::data::advantage::Baselines;

/// The worker's share of a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LoopState {
    /// Running baselines by route and part.
    pub(crate) baselines: Baselines,
    /// AdaptiveWeights of adaptive parts.
    #[serde(default)]
    pub(crate) weights: AdaptiveWeights,
    /// The version that the weights come after.
    pub(crate) parent: PolicyVersion,
    /// Steps taken since that version.
    pub(crate) pending: u64,
    /// The last step: the ledger's cursor, since it names the groups that were consumed.
    pub(crate) last_step: Option<StepRecord>,
}

impl LoopState {
    pub(crate) fn new(baseline_window: f64) -> Self {
        Self {
            baselines: Baselines::new(baseline_window),
            weights: AdaptiveWeights::default(),
            parent: PolicyVersion::BASE,
            pending: 0,
            last_step: None,
        }
    }

    /// The weights are now those of `version`.
    pub(crate) fn published(&mut self, version: PolicyVersion) {
        self.parent = version;
        self.pending = 0;
    }

    /// The weights have moved on by a step.
    pub(crate) fn stepped(&mut self, record: StepRecord) {
        self.last_step = Some(record);
        self.pending += 1;
    }

    /// Steps that are written down.
    pub(crate) fn steps(&self) -> u64 {
        self.last_step.as_ref().map_or(0, |step| step.step)
    }

    /// The version whose weights these are exactly, if it is one.
    pub(crate) fn current_version(&self) -> Option<PolicyVersion> {
        (self.pending == 0).then_some(self.parent)
    }
}
