//! The trainer's state between steps, apart from the learner's own; part of a checkpoint.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use hone_core::types::{GroupId, PolicyVersion, StepRecord, UnixMillis};

use crate::config::day;
use crate::data::AdaptiveWeights;
use crate::data::advantage::Baselines;

/// A pause of training that the trainer began: after an operator's activation, or after too many
/// rejected versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hold {
    /// The version that is active.
    pub(super) version: PolicyVersion,
    /// When training goes on; `None` waits for a resume.
    pub(super) until: Option<UnixMillis>,
    /// Why training pauses; `None` after an activation.
    #[serde(default)]
    pub(super) reason: Option<String>,
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
        match &self.reason {
            None => format!("version {} was activated: {end}", self.version),
            Some(reason) => format!("{reason}: {end}"),
        }
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
    /// The pause that the trainer began. Absent from older checkpoints.
    #[serde(default)]
    pub(super) hold: Option<Hold>,
    /// The groups of the steps since `parent`, which get ready again if these steps are undone.
    /// Absent from older checkpoints.
    #[serde(default)]
    pub(super) unpublished_groups: Vec<GroupId>,
    /// Groups that got ready again because a version trained on them was rejected. After a second
    /// rejection they are dropped, so that they do not keep the trainer from newer groups. Absent from
    /// older checkpoints.
    #[serde(default)]
    pub(super) returned_groups: BTreeSet<GroupId>,
    /// Versions in a row that were not promoted. Absent from older checkpoints.
    #[serde(default)]
    pub(super) rejections: u64,
    /// How often a warning halved the learning rate since the last resume. Absent from older
    /// checkpoints.
    #[serde(default)]
    pub(super) rate_halvings: u32,
    /// The day (UTC) of the last step and its number of steps, for `train.max_steps_per_day`. Absent
    /// from older checkpoints.
    #[serde(default)]
    pub(super) today: (u64, u64),
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
            unpublished_groups: Vec::new(),
            returned_groups: BTreeSet::new(),
            rejections: 0,
            rate_halvings: 0,
            today: (0, 0),
            last_step: None,
        }
    }

    /// Records that the weights are those of `version`.
    pub(super) fn set_published(&mut self, version: PolicyVersion) {
        self.parent = version;
        self.unpublished_steps = 0;
        for group in self.unpublished_groups.drain(..) {
            self.returned_groups.remove(&group);
        }
    }

    /// Ends a hold whose time is over, and returns whether training still pauses.
    pub(super) fn is_held(&mut self, now: UnixMillis) -> bool {
        self.hold.take_if(|hold| hold.until.is_some_and(|until| until <= now));
        self.hold.is_some()
    }

    /// Records a step.
    pub(super) fn add_step(&mut self, record: StepRecord) {
        self.unpublished_groups.extend(&record.groups);
        self.today = (day(record.created), self.steps_today(record.created) + 1);
        self.last_step = Some(record);
        self.unpublished_steps += 1;
    }

    /// The factor of the learning rate that warnings have led to.
    pub(super) fn rate_factor(&self) -> f64 {
        0.5_f64.powi(self.rate_halvings.try_into().unwrap_or(i32::MAX))
    }

    /// Number of steps on the day of `now`.
    pub(super) fn steps_today(&self, now: UnixMillis) -> u64 {
        if self.today.0 == day(now) { self.today.1 } else { 0 }
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
