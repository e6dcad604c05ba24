//! The batch of the next step, and the members that leave it.

use hone_core::types::GroupId;
use hone_store::Op;

use super::Trainer;
use crate::data::batch_builder::BatchCorrection;
use crate::data::batch_builder::{BatchGroup, STALE, StalenessLimits, TrainBatch};
use crate::data::{batch_builder, feedback_cap};
use crate::driver::PreparedBatch;
use crate::driver::error::TrainFailure;
use crate::memory;

/// Reason of a dropped correction that has no weight in the loss.
const NO_CORRECTION_WEIGHT: &str = "correction_weight";
/// Reason of a dropped group with a sample that does not fit in the memory.
const TOO_LONG: &str = "too_long";

impl Trainer<'_> {
    /// The oldest ready groups, once they hold `wanted` trainable samples. Drops stale groups.
    pub(super) fn next_batch(&self, wanted: usize) -> Result<Option<TrainBatch>, TrainFailure> {
        let (setup, config) = (self.setup, &self.setup.config);
        let mut batch = batch_builder::build_batch(
            &setup.store,
            &setup.routes,
            &self.version_ages(),
            StalenessLimits::new(config),
            wanted,
            config.samples_per_step,
            &setup.metrics.train.dropped_groups,
        )?;
        if let Some(built) = &mut batch {
            let unused = self.drop_corrections(built)?;
            let dropped = self.drop_long(built)? || unused;
            if dropped && built.sample_count() < wanted {
                // The other groups stay ready.
                return Ok(None);
            }
            if self.publication.is_some() && self.has_long_shard(built) {
                return Ok(None);
            }
            feedback_cap::cap(built, &setup.routes, Some(&setup.metrics));
        }
        Ok(batch)
    }

    /// Drops the corrections if `train.correction_weight` is 0: they arrived while it was not.
    fn drop_corrections(&self, batch: &mut TrainBatch) -> Result<bool, TrainFailure> {
        if batch.corrections.is_empty() || self.setup.config.correction_weight > 0.0 {
            return Ok(false);
        }
        let unused = batch.corrections.drain(..);
        let drops = unused.map(|one| (one.group, NO_CORRECTION_WEIGHT.to_owned()));
        let counter = &self.setup.metrics.train.dropped_groups;
        batch_builder::drop_groups(&self.setup.store, drops, counter)?;
        Ok(true)
    }

    /// Whether a shard of the batch is longer than usual. The memory plan has no room for such a shard
    /// beside the copy that a publication loads, so the step waits for its end.
    fn has_long_shard(&self, batch: &TrainBatch) -> bool {
        let groups = batch.groups.iter().map(BatchGroup::tokens);
        let corrections = batch.corrections.iter().map(BatchCorrection::tokens);
        groups.chain(corrections).any(|tokens| self.is_long_shard(tokens))
    }

    /// Whether a shard of so many tokens is longer than usual.
    pub(super) fn is_long_shard(&self, tokens: usize) -> bool {
        tokens > memory::shard_tokens(self.learner.spec())
    }

    /// Drops the groups with a sample that does not fit in the memory, before anything is computed.
    fn drop_long(&self, batch: &mut TrainBatch) -> Result<bool, TrainFailure> {
        let limit = self.setup.longest_sample;
        let groups = batch.groups.extract_if(.., |group| group.longest_tokens() > limit);
        let mut long: Vec<_> =
            groups.map(|group| (group.group.id, group.longest_tokens())).collect();
        let corrections = batch.corrections.extract_if(.., |one| one.tokens() > limit);
        long.extend(corrections.map(|one| (one.group, one.tokens())));
        if long.is_empty() {
            return Ok(false);
        }
        for (id, tokens) in &long {
            tracing::warn!(group = %id, tokens, limit, "a sample is too long to be trained on");
        }
        let drops = long.into_iter().map(|(id, _)| (id, TOO_LONG.to_owned()));
        let counter = &self.setup.metrics.train.dropped_groups;
        batch_builder::drop_groups(&self.setup.store, drops, counter)?;
        Ok(true)
    }

    /// The operations that drop the members with faded samples, which are counted, and the ids of the
    /// groups that have other members.
    pub(super) fn faded(
        &self,
        prepared: &PreparedBatch,
        samples: &[usize],
    ) -> (Vec<Op>, Vec<GroupId>) {
        let (ops, left) = prepared.batch.without(&prepared.advantages, samples);
        let dropped = &self.setup.metrics.train.dropped_groups;
        dropped.with_label_values(&[STALE]).inc_by(ops.len() as u64);
        (ops, left)
    }
}
