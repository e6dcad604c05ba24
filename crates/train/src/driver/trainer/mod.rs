//! The loop of the trainer's thread, and one optimizer step from batch to publication.

mod batch;
mod offline;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use hone_core::types::{StepRecord, UnixMillis, now_ms};
use hone_store::Op;

use crate::data::batch_builder::{BatchGroup, TrainBatch, VersionAges};
use crate::data::{batch_builder, feedback_cap};
use crate::driver::error::{TrainError, TrainFailure};
use crate::driver::markers::{ActivationMarker, AttemptMarker, StepAttempt};
use crate::driver::progress::{Hold, TrainProgress};
use crate::driver::publication::Publication;
use crate::driver::setup::{ThreadPools, TrainSetup};
use crate::driver::status::{StatusCell, TrainState};
use crate::driver::{PreparedBatch, SkipLog, SkippedBatch, StepGate, StepReply, TrainCommand};
use crate::error::LearnError;
use crate::learning::checkpoint;
use crate::learning::learner::{Learner, StepStats};
use crate::policy::PublishOutcome;

pub use offline::{OfflineSetup, OfflineTrainer};

/// How long an idle trainer waits for a command before it looks for ready groups anyway.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often a requested step looks whether a publication has ended.
const AWAIT_INTERVAL: Duration = Duration::from_millis(2);

/// How long no further version must be activated before the weights of a pausing trainer follow.
pub(in crate::driver) const SETTLE_TIME: Duration = Duration::from_millis(250);

/// The learner and everything that a step reads or changes.
pub(in crate::driver) struct Trainer<'a> {
    pub(in crate::driver) setup: &'a TrainSetup,
    pub(in crate::driver) status: &'a StatusCell,
    /// Runs the asynchronous part of a publication.
    pub(in crate::driver) runtime: &'a Handle,
    pub(in crate::driver) pools: &'a ThreadPools,
    pub(in crate::driver) learner: Learner,
    pub(in crate::driver) progress: TrainProgress,
    /// The publication in progress. The learner is at most one step ahead of it.
    pub(in crate::driver) publication: Option<Publication>,
    /// That step, which is recorded once the publication's version is served.
    pub(in crate::driver) ahead: Option<AheadStep>,
    /// When the last publication began, or the trainer started.
    pub(in crate::driver) last_publication: Instant,
    /// Wakes this thread at the end of a publication.
    pub(in crate::driver) wake: Sender<TrainCommand>,
    /// Marks the step that is being computed.
    pub(in crate::driver) marker: AttemptMarker,
    /// Activations of existing versions that the trainer has noticed.
    pub(in crate::driver) rollbacks: u64,
    /// When it noticed the last one, while the weights do not follow it.
    pub(in crate::driver) unfollowed: Option<Instant>,
    /// Marks that they do not.
    pub(in crate::driver) activation: ActivationMarker,
    /// Arrival times of feedback that was trained on, but not yet in a published version.
    pub(in crate::driver) feedback_times: Vec<UnixMillis>,
    pub(in crate::driver) skip_log: SkipLog,
}

/// A computed step that is not recorded yet.
pub(in crate::driver) struct AheadStep {
    prepared: PreparedBatch,
    stats: StepStats,
    started: Instant,
}

impl Trainer<'_> {
    /// Runs until a stop command: commands first, then rollbacks, then at most one step.
    pub(in crate::driver) fn run(
        &mut self,
        commands: &Receiver<TrainCommand>,
        gate: &mut StepGate,
    ) -> Result<(), TrainError> {
        let mut wait = Duration::ZERO;
        while self.handle_commands(commands, gate, wait)? {
            self.notice_rollback()?;
            if self.publication.as_ref().is_some_and(Publication::is_finished) {
                self.finish_publish()?;
            }
            let mut state = self.state_without_step(gate);
            let is_settled = self.unfollowed.is_some_and(|since| since.elapsed() >= SETTLE_TIME);
            if is_settled || state == TrainState::Waiting {
                self.follow_rollback()?;
                state = self.state_without_step(gate);
            }
            let batch = match state {
                TrainState::Waiting => self.next_batch(self.setup.config.samples_per_step)?,
                _ => None,
            };
            if let Some(batch) = batch {
                self.step(batch)?;
                wait = Duration::ZERO;
            } else {
                self.maybe_publish(state != TrainState::Waiting)?;
                self.status.set_state(state);
                self.report();
                wait = if self.unfollowed.is_some() { SETTLE_TIME } else { POLL_INTERVAL };
            }
        }
        // A canary would take hours. The next start continues it.
        let policies = Arc::clone(&self.setup.policies);
        let _suspension = policies.suspend();
        // The next start follows the activation.
        self.notice_rollback()?;
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
                let lowered = std::mem::take(&mut self.progress.rate_halvings) > 0;
                if self.progress.hold.take().is_some() || lowered {
                    self.checkpoint()?;
                }
            }
            match commands.recv_timeout(wait).map(|command| gate.apply(command)) {
                Ok(Some(TrainCommand::Step(reply))) => self.step_on_request(reply)?,
                Ok(Some(TrainCommand::LowerRate)) => {
                    self.progress.rate_halvings += 1;
                    tracing::warn!(
                        factor = self.progress.rate_factor(),
                        "the learning rate is lowered"
                    );
                }
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
        let blocks = self.publication.as_ref().is_some_and(|p| p.blocks_steps);
        let schedule = self.closed_by_schedule();
        let is_scheduled = schedule.is_some();
        self.status.update(|s| s.schedule = schedule);
        let closed = if max_steps > 0 && steps >= max_steps {
            Some(TrainState::Finished)
        } else if gate.is_closed(steps) || self.progress.is_held(now_ms()) {
            Some(TrainState::Paused)
        } else if is_scheduled {
            Some(TrainState::Scheduled)
        } else {
            None
        };
        match closed {
            _ if self.ahead.is_some() || blocks => TrainState::Publishing,
            // A canary can take hours, which must not look like a step that still runs.
            Some(_) if self.publication.is_some() && self.setup.policies.canary().is_none() => {
                TrainState::Publishing
            }
            Some(state) => state,
            None => TrainState::Waiting,
        }
    }

    /// Why `train.when` or `train.max_steps_per_day` permits no step now.
    fn closed_by_schedule(&self) -> Option<String> {
        let (config, now) = (&self.setup.config, now_ms());
        let most = config.max_steps_per_day;
        if most > 0 && self.progress.steps_today(now) >= most {
            return Some(format!("train.max_steps_per_day ({most}) is reached"));
        }
        config.when.closed(now, || (self.setup.is_idle)())
    }

    /// Takes one step on the groups that are ready, publishes it, and replies with the status.
    fn step_on_request(&mut self, reply: StepReply) -> Result<(), TrainError> {
        self.await_publication()?;
        self.follow_rollback()?;
        if let Some(version) = self.setup.policies.canary() {
            // Fails only if the caller no longer waits.
            let _hung_up = reply.send(Err(TrainError::CanaryRunning(version)));
            return Ok(());
        }
        let outcome = match self.next_batch(1)? {
            Some(batch) => {
                let step = self.step(batch).and_then(|()| self.maybe_publish(true));
                let step = step.and_then(|()| self.await_publication());
                step.map(|()| self.status.read()).map_err(TrainError::from)
            }
            None => Err(TrainError::NothingReady),
        };
        let failure =
            outcome.as_ref().err().filter(|e| matches!(e, TrainError::Failed(_))).cloned();
        // Fails only if the caller no longer waits.
        let _hung_up = reply.send(outcome);
        failure.map_or(Ok(()), Err)
    }

    /// One step: prepare, optimize, record, maybe publish. It ends early in two cases:
    /// - the batch cannot be stepped on: the weights stay, and its groups are dropped
    /// - a publication is in progress: the step is recorded once its version is served, or undone
    fn step(&mut self, batch: TrainBatch) -> Result<(), TrainFailure> {
        self.status.set_state(TrainState::Training);
        let started = Instant::now();
        let mut prepared = self.prepare(batch);
        self.add_replay(&mut prepared)?;
        match self.optimize(&mut prepared)? {
            Ok(stats) => self.ahead = Some(AheadStep { prepared, stats, started }),
            Err(skipped) => return self.drop_groups(skipped),
        }
        // Nothing of this step may be durable before the version it starts from is served.
        match &self.publication {
            Some(publication) if publication.is_finished() => self.finish_publish().map(drop),
            Some(_) => Ok(()),
            None => self.record_ahead(),
        }
    }

    /// Records the step that was computed during a publication, if there is one.
    fn record_ahead(&mut self) -> Result<(), TrainFailure> {
        if let Some(AheadStep { prepared, stats, started }) = self.ahead.take() {
            self.record(prepared, stats, started)?;
            self.maybe_publish(false)?;
        }
        Ok(())
    }

    /// Computes advantages and selects the samples to train on.
    fn prepare(&self, mut batch: TrainBatch) -> PreparedBatch {
        self.progress.weights.apply(&self.setup.routes, &mut batch);
        let staleness = batch.staleness(&self.version_ages());
        let mut baselines = self.progress.baselines.clone();
        let advantages = baselines.advantages(&batch.rewards(), &self.setup.config);
        let samples = batch.train_samples(&advantages);
        PreparedBatch { batch, advantages, samples, replayed: 0, baselines, staleness }
    }

    /// Updates the weights. The inner error is a batch that cannot be stepped on; the weights then
    /// stay as they were.
    fn optimize(
        &mut self,
        prepared: &mut PreparedBatch,
    ) -> Result<Result<StepStats, SkippedBatch>, TrainFailure> {
        let parameters = self.learner.spec().parameters();
        let peak = self.setup.peak_rate(self.learner.step_count() + 1, parameters);
        self.learner.set_peak_rate(peak * self.progress.rate_factor());
        // Unpublished weights have no version; `u64::MAX` matches no sample.
        let version = self.progress.current_version().map_or(u64::MAX, |v| v.0);
        let max_tokens = self.setup.max_completion_tokens;
        self.marker.set(StepAttempt::of(&prepared.batch))?;
        let learner = &mut self.learner;
        let stats =
            self.pools.train.install(|| learner.step(&prepared.samples, version, max_tokens));
        self.marker.clear()?;
        match stats {
            Ok(StepStats { skipped: Some(reason), faded, .. }) => {
                let (ops, left) = self.faded(prepared, &faded);
                self.setup.store.commit_blocking(ops)?;
                let mut skipped = prepared.skip(reason);
                skipped.groups.retain(|id| left.contains(id));
                Ok(Err(skipped))
            }
            Ok(stats) => Ok(Ok(stats)),
            Err(LearnError::Sample { index, reason }) => {
                if prepared.without_replay_of(index) {
                    tracing::warn!(reason, "samples of earlier steps cannot be trained on again");
                    return self.optimize(prepared);
                }
                // A restart would meet the same sample again, so its group is dropped instead.
                Ok(Err(prepared.skip_sample(index, reason)))
            }
            Err(error) => Err(error.into()),
        }
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
            metrics: super::collect(stats.metrics, &prepared, weights, started.elapsed()),
            created: now_ms(),
        };
        self.progress.baselines = prepared.baselines;
        self.progress.add_step(record.clone());
        self.checkpoint()?;
        ops.push(Op::Step(Box::new(record.clone())));
        setup.store.commit_blocking(ops)?;
        super::export(&setup.metrics, &record, &prepared.advantages, started.elapsed());
        self.skip_log.stepped();
        self.feedback_times.extend(prepared.batch.feedback_times());
        self.report();
        Ok(())
    }

    /// Starts to publish the weights every `policy.publish_every` steps or `policy.publish_seconds`, and
    /// if no step follows (`is_last`). Does not if another version was activated during the step: the
    /// trainer continues from that one.
    fn maybe_publish(&mut self, is_last: bool) -> Result<(), TrainFailure> {
        let policy = &self.setup.policy;
        let steps = self.progress.unpublished_steps;
        let limit = Duration::from_secs(policy.publish_seconds);
        let is_late = !limit.is_zero() && self.last_publication.elapsed() >= limit;
        let is_due = steps >= policy.publish_every || steps > 0 && (is_last || is_late);
        let is_free = self.publication.is_none() && self.progress.hold.is_none();
        if is_due && is_free && !self.has_new_rollback() { self.begin_publish() } else { Ok(()) }
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

    /// Starts to publish the weights. No other publication may be in progress.
    pub(in crate::driver) fn begin_publish(&mut self) -> Result<(), TrainFailure> {
        self.last_publication = Instant::now();
        self.publication = Some(Publication::start(
            self.setup,
            (self.runtime, &self.pools.probe, self.wake.clone()),
            self.learner.snapshot()?,
            &self.progress,
            std::mem::take(&mut self.feedback_times),
        )?);
        Ok(())
    }

    /// Waits for the publication in progress until it ends or becomes a canary.
    fn await_publication(&mut self) -> Result<(), TrainFailure> {
        while let Some(publication) = &self.publication {
            if publication.is_finished() {
                self.finish_publish()?;
            } else if self.setup.policies.canary().is_some() {
                break;
            } else {
                self.status.set_state(TrainState::Publishing);
                std::thread::sleep(AWAIT_INTERVAL);
            }
        }
        Ok(())
    }

    /// Waits for the publication in progress, if any. If its weights are served, the step that was
    /// computed meanwhile is recorded. Otherwise that step is undone, and the learner has the active
    /// version's weights again. Returns whether they are served.
    pub(in crate::driver) fn finish_publish(&mut self) -> Result<bool, TrainFailure> {
        let Some(mut publication) = self.publication.take() else { return Ok(true) };
        if !publication.is_finished() {
            self.status.set_state(TrainState::Publishing);
        }
        let (outcome, finished) = publication.wait()?;
        match outcome {
            PublishOutcome::Published(record) => {
                self.progress.set_published(record.version);
                self.progress.rejections = 0;
                self.keep_state(record.version, publication.step)?;
                self.observe_feedback_delay(&publication.feedback_times, finished);
                self.report();
                self.record_ahead()?;
                return Ok(true);
            }
            PublishOutcome::Rejected(record) => {
                self.status.update(|s| s.last_error.clone_from(&record.reason));
                self.return_groups(Some(&record))?;
                self.undo(&publication)?;
            }
            PublishOutcome::Superseded => self.undo(&publication)?,
            // The process ends. The step that was computed meanwhile is lost; its groups stay ready.
            PublishOutcome::Suspended => self.ahead = None,
        }
        self.report();
        Ok(false)
    }

    /// Returns to the active version. If the learner took another step meanwhile, its step count and
    /// random stream return to those of the checkpoint that was published.
    fn undo(&mut self, publication: &Publication) -> Result<(), TrainFailure> {
        self.ahead = None;
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

    /// The ages of versions once the publication in progress succeeds. A canary has its version
    /// already, and its samples are those of the current weights.
    fn version_ages(&self) -> VersionAges {
        let is_running = self.publication.as_ref().is_some_and(|p| !p.is_finished());
        let canary = self.setup.policies.canary().filter(|_| is_running);
        let head = canary.unwrap_or_else(|| self.setup.policies.active());
        let ahead = u64::from(is_running && canary.is_none());
        VersionAges { lineage: self.setup.store.lineage(), head, ahead }
    }

    /// Copies the progress to the status.
    pub(in crate::driver) fn report(&self) {
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

// Samples of earlier steps in a step.

impl Trainer<'_> {
    /// Adds samples of earlier steps to those of the batch, at most `train.replay.share` of all. They are
    /// used for their gradient alone: baselines, adaptive weights, the ledger and the metrics of rewards and
    /// feedback have had them before.
    fn add_replay(&self, prepared: &mut PreparedBatch) -> Result<(), TrainFailure> {
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
        let mut batch = crate::data::draw_replayed(
            &setup.store,
            &setup.routes,
            &ages,
            config,
            steps,
            most,
            fits,
        )?;
        feedback_cap::cap(&mut batch, &setup.routes, None);
        self.progress.weights.apply(&setup.routes, &mut batch);
        let advantages = self.progress.baselines.clone().advantages(&batch.rewards(), config);
        let samples = batch.train_samples(&advantages);
        prepared.replayed = samples.len();
        prepared.samples.extend(samples);
        Ok(())
    }
}
