//! The loop of the trainer's thread, and one optimizer step from batch to publication.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use hone_core::types::{GroupId, StepRecord, UnixMillis, now_ms};
use hone_store::Op;

use super::command::{StepGate, StepReply, TrainCommand};
use super::error::{TrainError, TrainFailure};
use super::prepared::PreparedBatch;
use super::progress::{Hold, TrainProgress};
use super::publication::Publication;
use super::setup::{ThreadPools, TrainSetup};
use super::skipped::{SkipLog, SkippedBatch};
use super::status::{StatusCell, TrainState};
use super::step_metrics;
use crate::data::batch_builder::{STALE, StalenessLimits, TrainBatch, VersionAges};
use crate::data::{batch_builder, feedback_cap};
use crate::error::LearnError;
use crate::learning::checkpoint;
use crate::learning::learner::{Learner, StepStats};
use crate::policy::PublishOutcome;

/// How long an idle trainer waits for a command before it looks for ready groups anyway.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The learner and everything that a step reads or changes.
pub(super) struct Trainer<'a> {
    pub(super) setup: &'a TrainSetup,
    pub(super) status: &'a StatusCell,
    /// Runs the asynchronous part of a publication.
    pub(super) runtime: &'a Handle,
    pub(super) pools: &'a ThreadPools,
    pub(super) learner: Learner,
    pub(super) progress: TrainProgress,
    /// The publication in progress. The learner is at most one step ahead of it.
    pub(super) publication: Option<Publication>,
    /// Operator activations that the weights follow.
    pub(super) rollbacks: u64,
    /// Arrival times of feedback that was trained on, but not yet in a published version.
    pub(super) feedback_times: Vec<UnixMillis>,
    pub(super) skip_log: SkipLog,
}

impl Trainer<'_> {
    /// Runs until a stop command: commands first, then rollbacks, then at most one step.
    pub(super) fn run(
        &mut self,
        commands: &Receiver<TrainCommand>,
        gate: &mut StepGate,
    ) -> Result<(), TrainError> {
        let mut wait = Duration::ZERO;
        while self.handle_commands(commands, gate, wait)? {
            self.follow_rollback()?;
            if self.publication.as_ref().is_some_and(Publication::is_finished) {
                self.finish_publish()?;
            }
            let state = self.state_without_step(gate);
            let batch = match state {
                TrainState::Waiting => self.next_batch(self.setup.config.samples_per_step)?,
                _ => None,
            };
            if let Some(batch) = batch {
                self.step(batch)?;
                wait = Duration::ZERO;
            } else {
                self.finish_publish()?;
                self.status.set_state(state);
                self.report();
                wait = POLL_INTERVAL;
            }
        }
        self.finish_publish()?;
        Ok(())
    }

    /// Handles all queued commands, waiting up to `wait` for the first. Returns false after a stop.
    ///
    /// The queue is emptied before the next step, because every ready group has sent a wake-up: a
    /// pause queued after them must not wait for as many steps.
    fn handle_commands(
        &mut self,
        commands: &Receiver<TrainCommand>,
        gate: &mut StepGate,
        mut wait: Duration,
    ) -> Result<bool, TrainError> {
        loop {
            if std::mem::take(&mut gate.resumed) {
                // The activation that the resume is for comes first.
                self.follow_rollback()?;
                if self.progress.hold.take().is_some() {
                    self.checkpoint()?;
                }
            }
            match commands.recv_timeout(wait).map(|command| gate.apply(command)) {
                Ok(Some(TrainCommand::Step(reply))) => self.step_on_request(reply)?,
                Ok(Some(TrainCommand::Stop)) | Err(RecvTimeoutError::Disconnected) => {
                    return Ok(false);
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(true),
            }
            wait = Duration::ZERO;
        }
    }

    /// The state unless a batch is ready; only [`TrainState::Waiting`] permits a step.
    fn state_without_step(&mut self, gate: &StepGate) -> TrainState {
        let (steps, max_steps) = (self.learner.step_count(), self.setup.config.max_steps);
        if max_steps > 0 && steps >= max_steps {
            TrainState::Finished
        } else if gate.is_closed(steps) || self.progress.is_held(now_ms()) {
            TrainState::Paused
        } else {
            TrainState::Waiting
        }
    }

    /// Takes one step on the groups that are ready, publishes it, and replies with the status.
    fn step_on_request(&mut self, reply: StepReply) -> Result<(), TrainError> {
        self.finish_publish()?;
        self.follow_rollback()?;
        let outcome = match self.next_batch(1)? {
            Some(batch) => {
                let step = self.step(batch).and_then(|()| self.finish_publish());
                step.map(|_| self.status.read()).map_err(TrainError::from)
            }
            None => Err(TrainError::NothingReady),
        };
        let failure =
            outcome.as_ref().err().filter(|e| matches!(e, TrainError::Failed(_))).cloned();
        // Fails only if the caller no longer waits.
        let _hung_up = reply.send(outcome);
        failure.map_or(Ok(()), Err)
    }

    /// The oldest ready groups, once they hold `wanted` trainable samples. Drops stale groups.
    fn next_batch(&self, wanted: usize) -> Result<Option<TrainBatch>, TrainFailure> {
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
        if let Some(batch) = &mut batch {
            feedback_cap::cap(batch, &setup.routes, &setup.metrics);
        }
        Ok(batch)
    }

    /// One step: prepare, optimize, record, maybe publish. It ends early in two cases:
    /// - the batch cannot be stepped on: the weights stay, and its groups are dropped
    /// - the previous step's version is not served: this step is undone, and its groups stay ready
    fn step(&mut self, batch: TrainBatch) -> Result<(), TrainFailure> {
        self.status.set_state(TrainState::Training);
        let started = Instant::now();
        let prepared = self.prepare(batch);
        let stats = match self.optimize(&prepared)? {
            Ok(stats) => stats,
            Err(skipped) => return self.drop_groups(skipped),
        };
        // Nothing of this step may be durable before the version it starts from is served.
        if !self.finish_publish()? {
            return Ok(());
        }
        self.record(prepared, stats, started)?;
        self.maybe_publish()
    }

    /// Computes advantages and selects the samples to train on.
    fn prepare(&self, mut batch: TrainBatch) -> PreparedBatch {
        self.progress.weights.apply(&self.setup.routes, &mut batch);
        let staleness = batch.staleness(&self.version_ages());
        let mut baselines = self.progress.baselines.clone();
        let advantages = baselines.advantages(&batch.rewards(), &self.setup.config);
        let samples = batch.train_samples(&advantages);
        PreparedBatch { batch, advantages, samples, baselines, staleness }
    }

    /// Updates the weights. The inner error is a batch that cannot be stepped on; the weights then
    /// stay as they were.
    fn optimize(
        &mut self,
        prepared: &PreparedBatch,
    ) -> Result<Result<StepStats, SkippedBatch>, TrainFailure> {
        self.learner.set_peak_rate(self.setup.peak_rate(self.learner.step_count() + 1));
        // Unpublished weights have no version; `u64::MAX` matches no sample.
        let version = self.progress.current_version().map_or(u64::MAX, |v| v.0);
        let max_tokens = self.setup.max_completion_tokens;
        let learner = &mut self.learner;
        let stats =
            self.pools.train.install(|| learner.step(&prepared.samples, version, max_tokens));
        match stats {
            Ok(StepStats { skipped: Some(reason), faded, .. }) => {
                let (ops, left) = self.faded(prepared, &faded);
                self.setup.store.commit_blocking(ops)?;
                let mut skipped = prepared.skip(reason);
                skipped.groups.retain(|id| left.contains(id));
                Ok(Err(skipped))
            }
            Ok(stats) => Ok(Ok(stats)),
            // A restart would meet the same sample again, so its group is dropped instead.
            Err(LearnError::Sample { index, reason }) => {
                Ok(Err(prepared.skip_sample(index, reason)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The operations that drop the members with faded samples, which are counted, and the ids of the
    /// groups that have other members.
    fn faded(&self, prepared: &PreparedBatch, samples: &[usize]) -> (Vec<Op>, Vec<GroupId>) {
        let (ops, left) = prepared.batch.without(&prepared.advantages, samples);
        let dropped = &self.setup.metrics.train.dropped_groups;
        dropped.with_label_values(&[STALE]).inc_by(ops.len() as u64);
        (ops, left)
    }

    /// Makes the step durable: the checkpoint first, then the ledger's step record, which marks the
    /// groups as trained. After a crash between the two, [`Self::restore`] writes the record from
    /// the checkpoint; in the other order, the groups would be lost.
    fn record(
        &mut self,
        prepared: PreparedBatch,
        stats: StepStats,
        started: Instant,
    ) -> Result<(), TrainFailure> {
        let setup = self.setup;
        self.progress.weights.observe(&setup.routes, &prepared.batch);
        if !stats.refused.is_empty() {
            tracing::warn!(
                samples = stats.refused.len(),
                "sampler and trainer differ by more than train.max_sampler_difference"
            );
        }
        let (mut ops, groups) = self.faded(&prepared, &stats.faded);
        let weights = &self.progress.weights;
        let record = StepRecord {
            step: self.learner.step_count(),
            groups,
            metrics: step_metrics::collect(stats.metrics, &prepared, weights, started.elapsed()),
            created: now_ms(),
        };
        self.progress.baselines = prepared.baselines;
        self.progress.add_step(record.clone());
        self.checkpoint()?;
        ops.push(Op::Step(Box::new(record.clone())));
        setup.store.commit_blocking(ops)?;
        step_metrics::export(&setup.metrics, &record, &prepared.advantages, started.elapsed());
        self.skip_log.stepped();
        self.feedback_times.extend(prepared.batch.feedback_times());
        self.report();
        Ok(())
    }

    /// Starts to publish the weights every `policy.publish_every` steps. Does not if an operator
    /// activated another version during the step: the trainer continues from that one.
    fn maybe_publish(&mut self) -> Result<(), TrainFailure> {
        let is_due = self.progress.unpublished_steps >= self.setup.publish_every;
        if is_due && !self.has_new_rollback() { self.begin_publish() } else { Ok(()) }
    }

    /// Drops the groups of a skipped batch and counts it.
    fn drop_groups(&mut self, skipped: SkippedBatch) -> Result<(), TrainFailure> {
        self.skip_log.skipped(&skipped);
        let label = skipped.reason.label();
        self.setup.metrics.train.skipped_steps.with_label_values(&[label]).inc();
        self.status.update(|s| {
            s.last_error = Some(skipped.message);
            s.skipped_batches += 1;
        });
        let groups = skipped.groups.into_iter().map(|id| (id, label.to_owned()));
        let counter = &self.setup.metrics.train.dropped_groups;
        Ok(batch_builder::drop_groups(&self.setup.store, groups, counter)?)
    }

    /// Publishes the weights and waits for the outcome.
    pub(super) fn publish(&mut self) -> Result<(), TrainFailure> {
        self.begin_publish()?;
        self.finish_publish().map(drop)
    }

    /// Starts to publish the weights. No other publication may be in progress.
    pub(super) fn begin_publish(&mut self) -> Result<(), TrainFailure> {
        self.publication = Some(Publication::start(
            self.setup,
            self.runtime,
            &self.pools.probe,
            self.learner.snapshot()?,
            &self.progress,
            std::mem::take(&mut self.feedback_times),
        )?);
        Ok(())
    }

    /// Waits for the publication in progress, if any. Returns false if its weights are not served:
    /// the learner then has the active version's weights again, and a step that it took meanwhile
    /// is undone.
    pub(super) fn finish_publish(&mut self) -> Result<bool, TrainFailure> {
        let Some(mut publication) = self.publication.take() else { return Ok(true) };
        if !publication.is_finished() {
            self.status.set_state(TrainState::Publishing);
        }
        let (outcome, finished) = publication.wait()?;
        let is_served = match outcome {
            PublishOutcome::Published(record) => {
                self.progress.set_published(record.version);
                self.keep_state(record.version, publication.step)?;
                self.observe_feedback_delay(&publication.feedback_times, finished);
                true
            }
            PublishOutcome::Rejected(record) => {
                self.status.update(|s| s.last_error = record.reason);
                false
            }
            PublishOutcome::Superseded => false,
        };
        if !is_served {
            self.undo(&mut publication)?;
        }
        self.report();
        Ok(is_served)
    }

    /// Returns to the active version. If the learner took another step meanwhile, its step count and
    /// random stream return to those of the checkpoint that was published.
    fn undo(&mut self, publication: &mut Publication) -> Result<(), TrainFailure> {
        // The feedback still waits for a version that is served.
        self.feedback_times.append(&mut publication.feedback_times);
        if self.learner.step_count() > publication.step {
            let dir = checkpoint::step_dir(&self.setup.checkpoints, publication.step);
            self.learner.load(&dir)?;
        }
        self.reset_to_active()?;
        self.checkpoint()
    }

    fn observe_feedback_delay(&self, arrivals: &[UnixMillis], finished: UnixMillis) {
        for arrived in arrivals {
            #[expect(clippy::cast_precision_loss, reason = "milliseconds of waiting")]
            let seconds = finished.saturating_sub(*arrived) as f64 / 1000.0;
            self.setup.metrics.feedback_to_policy.observe(seconds);
        }
    }

    /// The ages of versions once the publication in progress succeeds.
    fn version_ages(&self) -> VersionAges {
        let is_running = self.publication.as_ref().is_some_and(|p| !p.is_finished());
        let head = self.setup.policies.active();
        VersionAges { lineage: self.setup.store.lineage(), head, ahead: u64::from(is_running) }
    }

    /// Copies the progress to the status.
    pub(super) fn report(&self) {
        self.status.update(|s| {
            // The learner's count may include a step that can still be undone.
            s.step = self.progress.steps();
            s.policy_version = self.progress.parent.0;
            s.hold = self.progress.hold.as_ref().map(Hold::text);
            if let Some(step) = &self.progress.last_step {
                s.metrics.clone_from(&step.metrics);
            }
        });
    }
}
