//! The trainer's state between steps, apart from the learner's: what a checkpoint has, and durable markers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use hone_core::files::{at, remove_any, replace_file};
use hone_core::types::{GroupId, PolicyVersion, Sample, SampleId, StepRecord, UnixMillis};
use hone_reward::Routes;

use crate::config::{TrainConfig, day};
use crate::data::AdaptiveWeights;
use crate::data::advantage::{Advantages, Baselines};
use crate::data::batch_builder::TrainBatch;
use crate::data::head::learned::LearnedHeads;
use crate::data::packing::TrainSample;
use crate::error::{LearnError, Result};

/// A pause of training after an operator's activation, or after too many rejected versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hold {
    pub(super) version: PolicyVersion,
    /// When training goes on; `None` waits for a resume.
    pub(super) until: Option<UnixMillis>,
    /// Why training pauses; `None` after an activation.
    pub(super) reason: Option<String>,
}

impl Hold {
    /// The text of [`TrainStatus::hold`](crate::TrainStatus::hold).
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
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct TrainProgress {
    pub(super) baselines: Baselines,
    #[serde(default)]
    pub(super) learned: LearnedHeads,
    pub(super) weights: AdaptiveWeights,
    /// The published version that the weights descend from.
    pub(super) parent: PolicyVersion,
    #[serde(rename = "pending")]
    pub(super) unpublished_steps: u64,
    pub(super) hold: Option<Hold>,
    /// The groups of the steps since `parent`, which get ready again if these steps are undone.
    pub(super) unpublished_groups: Vec<GroupId>,
    /// Groups that got ready again because a version was rejected. After a second rejection they are dropped,
    /// so that they do not keep the trainer from newer groups.
    pub(super) returned_groups: BTreeSet<GroupId>,
    pub(super) rejections: u64,
    /// How often warnings in progress halve the learning rate.
    pub(super) rate_halvings: u32,
    /// The day (UTC) of the last step and its number of steps, for `train.max_steps_per_day`.
    pub(super) today: (u64, u64),
    /// The record of the last step, with which a restart repeats a ledger write that a crash prevented.
    pub(super) last_step: Option<StepRecord>,
}

impl TrainProgress {
    /// From the `extra` of checkpoint `dir`, which errors name.
    pub(super) fn from_json(extra: Value, dir: &Path) -> Result<Self> {
        serde_json::from_value(extra).map_err(|error| at(dir)(error.into()).into())
    }

    /// Computes the advantages of a batch, whose feedback is capped, and selects the samples to train on.
    pub(super) fn prepare(
        &self,
        mut batch: TrainBatch,
        routes: &Routes,
        config: &TrainConfig,
        staleness: f64,
    ) -> PreparedBatch {
        self.weights.apply(routes, &mut batch);
        let mut baselines = self.baselines.clone();
        let rewards = batch.rewards();
        let advantages = baselines.advantages(&rewards, config);
        let samples = batch.train_samples(&advantages);
        PreparedBatch { batch, advantages, samples, replayed: 0, baselines, staleness }
    }

    pub(super) fn set_published(&mut self, version: PolicyVersion) {
        self.parent = version;
        self.unpublished_steps = 0;
        for group in self.unpublished_groups.drain(..) {
            self.returned_groups.remove(&group);
            self.learned.forget(&group);
        }
    }

    /// Ends a hold whose time is over, and returns whether training still pauses.
    pub(super) fn is_held(&mut self, now: UnixMillis) -> bool {
        self.hold.take_if(|hold| hold.until.is_some_and(|until| until <= now));
        self.hold.is_some()
    }

    pub(super) fn add_step(&mut self, record: StepRecord) {
        self.unpublished_groups.extend(&record.groups);
        self.today = (day(record.created), self.steps_today(record.created) + 1);
        self.last_step = Some(record);
        self.unpublished_steps += 1;
    }

    pub(super) fn rate_factor(&self) -> f64 {
        0.5_f64.powi(self.rate_halvings.try_into().unwrap_or(i32::MAX))
    }

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

/// Groups with their advantages and the samples to train on: a batch that is ready for the optimizer.
pub(super) struct PreparedBatch {
    pub(super) batch: TrainBatch,
    pub(super) advantages: Advantages,
    /// Every member that has an advantage, the corrections, and then samples of earlier steps.
    pub(super) samples: Vec<TrainSample>,
    pub(super) replayed: usize,
    /// The running baselines including this batch, which replace the old ones if a step is taken.
    pub(super) baselines: Baselines,
    /// Mean number of versions between sampling and training.
    pub(super) staleness: f64,
}

/// `sqrt(sum over tokens of (1 - p)^2)` with the recorded probabilities: what a token of the probability 1 adds to the
/// gradient is 0.
fn surprise(sample: &Sample) -> f64 {
    sample.logprobs.iter().map(|logprob| f64::from(logprob.exp_m1()).powi(2)).sum::<f64>().sqrt()
}

impl PreparedBatch {
    /// Leaves at most `most` samples where some are rated ([`Advantages::select`]). The same `seed` and `step` choose the same.
    pub(super) fn select(&mut self, most: usize, seed: u64, step: u64) {
        let most = most.saturating_sub(self.batch.corrections.len());
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(step);
        let is_rated: Vec<bool> = self.batch.groups.iter().map(|group| group.is_rated).collect();
        let surprises = self
            .batch
            .groups
            .iter()
            .map(|group| group.members.iter().map(|member| surprise(&member.sample)).collect());
        let surprises: Vec<Vec<f64>> = surprises.collect();
        self.advantages.select(&is_rated, &surprises, most, random.random());
        if self.advantages.represented > 0 {
            self.samples = self.batch.train_samples(&self.advantages);
        }
    }

    /// Takes the samples of earlier steps out, if the sample with this index is one of them.
    pub(super) fn without_replay_of(&mut self, index: usize) -> bool {
        let fresh = self.samples.len() - self.replayed;
        let is_replayed = index >= fresh;
        if is_replayed {
            self.samples.truncate(fresh);
            self.replayed = 0;
        }
        is_replayed
    }
}

// Durable markers of what the trainer has begun, beside its checkpoints.

/// A file that exists while the marker is set.
pub(super) struct Marker(PathBuf);

impl Marker {
    /// The marker of an operator's activation that the trainer's weights do not follow yet. Without it, a start could
    /// not distinguish an activation of the version that the checkpoint descends from, which undoes unpublished
    /// steps and pauses training, from no activation.
    pub(super) fn of_activation(checkpoints: &Path) -> Self {
        Self(checkpoints.join("activation"))
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.exists()
    }

    /// Makes the marker durable.
    pub(super) fn set(&self, content: &[u8]) -> Result<()> {
        if let Some(dir) = self.0.parent() {
            std::fs::create_dir_all(dir).map_err(at(dir))?;
        }
        Ok(replace_file(&self.0, content)?)
    }

    pub(super) fn clear(&self) -> Result<()> {
        if self.is_set() { Ok(remove_any(&self.0)?) } else { Ok(()) }
    }
}

/// The groups and samples of a step that did not end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StepAttempt {
    pub(super) groups: Vec<GroupId>,
    pub(super) samples: Vec<SampleId>,
    /// The groups that were part of an earlier attempt too.
    pub(super) repeated: Vec<GroupId>,
    /// Tokens of the longest sample, prompt included.
    pub(super) longest: usize,
}

impl StepAttempt {
    pub(super) fn of(batch: &TrainBatch) -> Self {
        let members = || batch.members();
        let corrections = || batch.corrections.iter();
        let tokens = members().map(|(g, m)| g.prompt_ids.len() + m.sample.ids.len());
        let samples = members().map(|(_, member)| member.sample.id);
        Self {
            groups: batch.group_ids(),
            repeated: Vec::new(),
            samples: samples.chain(corrections().map(|one| one.sample)).collect(),
            longest: tokens.chain(corrections().map(|one| one.tokens())).max().unwrap_or_default(),
        }
    }
}

/// The marker of the step that is being computed.
///
/// A step can end the process: the kernel kills it if memory runs out. The next start would take the same
/// groups and be killed again. A start that finds the marker trains its groups once more, because the end may
/// have had another cause, and drops those that a second marker names.
pub(super) struct AttemptMarker {
    marker: Marker,
    /// The groups of an attempt that ended an earlier process, whose next attempt will be their second.
    pub(super) suspects: Vec<GroupId>,
}

impl AttemptMarker {
    pub(super) fn new(checkpoints: &Path) -> Self {
        Self { marker: Marker(checkpoints.join("attempt.json")), suspects: Vec::new() }
    }

    /// Makes the marker durable. The step may start then.
    pub(super) fn set(&self, mut attempt: StepAttempt) -> Result<()> {
        let is_suspect = |group: &&GroupId| self.suspects.contains(group);
        attempt.repeated = attempt.groups.iter().filter(is_suspect).copied().collect();
        let text = serde_json::to_vec(&attempt).map_err(|e| at(&self.marker.0)(e.into()))?;
        self.marker.set(&text)
    }

    /// Removes the marker: the step ended, or its groups are dropped.
    pub(super) fn clear(&self) -> Result<()> {
        self.marker.clear()
    }

    /// The attempt that did not end. An unreadable marker names no group and is removed.
    pub(super) fn read(&self) -> Result<Option<StepAttempt>> {
        if !self.marker.is_set() {
            return Ok(None);
        }
        let file = &self.marker.0;
        let text = std::fs::read(file).map_err(at(file)).map_err(LearnError::from)?;
        match serde_json::from_slice(&text) {
            Ok(attempt) => Ok(Some(attempt)),
            Err(error) => {
                tracing::warn!(%error, file = %file.display(), "the marker of a step is unreadable");
                self.clear()?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_read_until_it_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("checkpoints");
        let mut marker = AttemptMarker::new(&dir);
        assert_eq!(marker.read().unwrap(), None);
        let attempt = StepAttempt {
            groups: vec![GroupId::new()],
            repeated: Vec::new(),
            samples: vec![SampleId::new(), SampleId::new()],
            longest: 9,
        };
        marker.set(attempt.clone()).unwrap();
        assert_eq!(AttemptMarker::new(&dir).read().unwrap(), Some(attempt.clone()));
        marker.suspects = vec![GroupId::new(), attempt.groups[0]];
        marker.set(attempt.clone()).unwrap();
        assert_eq!(marker.read().unwrap().unwrap().repeated, attempt.groups);
        marker.clear().unwrap();
        assert_eq!(marker.read().unwrap(), None);
        marker.clear().unwrap();
        std::fs::write(dir.join("attempt.json"), "{").unwrap();
        assert_eq!(marker.read().unwrap(), None);
        assert!(!dir.join("attempt.json").exists());
    }
}
