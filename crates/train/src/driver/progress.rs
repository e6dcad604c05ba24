//! The trainer's state between steps, apart from the learner's own; part of a checkpoint.

use serde::{Deserialize, Serialize};

use hone_core::types::{PolicyVersion, StepRecord, UnixMillis};

use crate::data::adaptive_weights::AdaptiveWeights;
use crate::data::advantage::Baselines;

/// A pause of training that an operator's activation began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hold {
    /// The version that was activated.
    pub(super) version: PolicyVersion,
    /// When training goes on; `None` waits for a resume.
    pub(super) until: Option<UnixMillis>,
}

impl Hold {
    /// The text of [`TrainStatus::hold`].
    ///
    /// [`TrainStatus::hold`]: crate::TrainStatus::hold
    pub(super) fn text(&self) -> String {
        let end = match self.until {
            None => "POST /admin/train/resume ends the pause".to_owned(),
            Some(until) => format!("training goes on at {until} (Unix milliseconds)"),
        };
        format!("version {} was activated: {end}", self.version)
    }
}

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
    /// The pause after an activation. Absent from older checkpoints.
    #[serde(default)]
    pub(super) hold: Option<Hold>,
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
            hold: None,
            last_step: None,
        }
    }

    /// Records that the weights are those of `version`.
    pub(super) fn set_published(&mut self, version: PolicyVersion) {
        self.parent = version;
        self.unpublished_steps = 0;
    }

    /// Ends a hold whose time is over, and returns whether training still pauses.
    pub(super) fn is_held(&mut self, now: UnixMillis) -> bool {
        self.hold.take_if(|hold| hold.until.is_some_and(|until| until <= now));
        self.hold.is_some()
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
