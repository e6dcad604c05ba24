//! Samples of earlier steps in a step.

use super::Trainer;
use crate::data::batch_builder::BatchGroup;
use crate::data::{feedback_cap, replay};
use crate::driver::error::TrainFailure;
use crate::driver::prepared::PreparedBatch;

impl Trainer<'_> {
    /// Adds samples of earlier steps to those of the batch, at most `train.replay.share` of all. They are
    /// used for their gradient alone: baselines, adaptive weights, the ledger and the metrics of rewards and
    /// feedback have had them before.
    pub(super) fn add_replay(&self, prepared: &mut PreparedBatch) -> Result<(), TrainFailure> {
        let (setup, config) = (self.setup, &self.setup.config);
        let most = config.replay.most(prepared.samples.len());
        if most == 0 {
            return Ok(());
        }
        let fits = |group: &BatchGroup| {
            group.longest_tokens() <= setup.longest_sample
                && (self.publication.is_none() || !self.is_long_shard(group.tokens()))
        };
        let steps = self.learner.step_count();
        let ages = self.version_ages();
        let mut batch =
            replay::draw(&setup.store, &setup.routes, &ages, config, steps, most, fits)?;
        feedback_cap::cap(&mut batch, &setup.routes, None);
        self.progress.weights.apply(&setup.routes, &mut batch);
        let advantages = self.progress.baselines.clone().advantages(&batch.rewards(), config);
        let samples = batch.train_samples(&advantages);
        prepared.replayed = samples.len();
        prepared.samples.extend(samples);
        Ok(())
    }
}
