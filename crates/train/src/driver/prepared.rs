//! A batch that is ready for the optimizer.

use super::skipped::{SkipReason, SkippedBatch};
use crate::data::advantage::{Advantages, Baselines};
use crate::data::batch_builder::TrainBatch;
use crate::data::packing::TrainSample;

/// Groups with their advantages and the samples to train on.
pub(super) struct PreparedBatch {
    pub(super) batch: TrainBatch,
    pub(super) advantages: Advantages,
    /// Every member that has an advantage, the corrections, and then samples of earlier steps.
    pub(super) samples: Vec<TrainSample>,
    /// Number of the samples of earlier steps.
    pub(super) replayed: usize,
    /// The running baselines including this batch, which replace the old ones if a step is taken.
    pub(super) baselines: Baselines,
    /// Mean number of versions between sampling and training.
    pub(super) staleness: f64,
}

impl PreparedBatch {
    /// The batch as skipped for the reason that the learner reports.
    pub(super) fn skip(&self, mut message: String) -> SkippedBatch {
        let groups = self.batch.group_ids();
        let reason = SkipReason::of(&message, self.advantages.dropped_groups, groups.len());
        if reason == SkipReason::EqualRewards {
            message = format!("all {} groups of the batch have equal rewards", groups.len());
        }
        SkippedBatch { reason, message, groups }
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

    /// The group of a sample that cannot be trained on, as skipped.
    pub(super) fn skip_sample(&self, index: usize, message: String) -> SkippedBatch {
        let groups = self.batch.group_of(&self.advantages, index);
        SkippedBatch { reason: SkipReason::Invalid, message, groups }
    }
}
