//! The trainer's state machine, and one optimizer step from batch to proposed version.

use std::ops::{ControlFlow, RangeInclusive};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tracing::field::Empty;
use tracing::{Span, info_span};

use hone_core::metrics::SPANS;
use hone_core::types::{GroupId, PolicyVersion, StepRecord, TokenId, UnixMillis, now_ms};
use hone_store::Op;

use super::progress::{AttemptMarker, Hold, Marker, PreparedBatch, StepAttempt, TrainProgress};
use super::publication::Publication;
use super::report::{self, SkipLog, SkippedBatch, StatusCell, TrainState};
use super::{StepGate, StepReply, ThreadPools, TrainCommand, TrainSetup};
use super::{TrainError, TrainFailure};
use crate::data::batch_builder::{BatchGroup, STALE, TrainBatch, VersionAges};
use crate::data::head::learned::Judgement;
use crate::data::{batch_builder, draw_replayed, feedback_cap, packing};
use crate::error::LearnError;
use crate::learning::StepTiming;
use crate::learning::checkpoint;
use crate::learning::learner::{Learner, StepStats};
use crate::memory;
use crate::policy::{Promotion, PublishOutcome};

/// How long an idle trainer waits for a command before it looks for ready groups anyway.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often a requested step looks whether a publication has ended.
const AWAIT_INTERVAL: Duration = Duration::from_millis(2);

/// How long no further version must be activated before the weights of a pausing trainer follow.
pub(super) const SETTLE_TIME: Duration = Duration::from_millis(250);

/// Number of the newest steps whose groups may be replayed.
const REPLAY_WINDOW: u64 = 50;

/// The steps whose groups may be replayed after step `last`: the newest ones.
pub(super) fn replayable(last: u64) -> RangeInclusive<u64> {
    last.saturating_sub(REPLAY_WINDOW) + 1..=last
}

/// Most steps of a version while ratings wait, as a multiple of `policy.publish_every`.
const BACKLOG_STEPS: u64 = 4;

/// Share of clipped importance ratios from which on a backlog makes no further step of a version: the samples are of a
/// policy that is too far away.
const BACKLOG_CLIPPED: f64 = 0.1;

/// Reason of a dropped correction that has no weight in the loss.
const NO_CORRECTION_WEIGHT: &str = "correction_weight";
/// Reason of a dropped group with a sample that does not fit in the memory.
const TOO_LONG: &str = "too_long";

/// New ratings that learned parts learn at once while no step is taken.
const LEARNED_TOGETHER: usize = 16;

/// What is in progress between two turns of [`Trainer::tick`].
pub(super) enum TrainPhase {
    /// Nothing: every step is recorded. The next batch makes a step, unless the gate, a hold, the
    /// timetable or `train.max_steps` closes training.
    Idle,
    /// The adapter to start from is published. No step is taken, because no sample of it exists yet.
    Starting(Publication),
    /// A version is published. The next step may be computed meanwhile.
    Publishing(Publication),
    /// A version is published, and the next step is computed: it is recorded if the version is served, else
    /// undone.
    Ahead(Publication, Box<ComputedStep>),
    /// An operator activated a version at this time, and the weights do not follow it yet.
    Activated(Instant),
}

impl TrainPhase {
    pub(super) fn publication(&self) -> Option<&Publication> {
        match self {
            Self::Starting(publication)
            | Self::Publishing(publication)
            | Self::Ahead(publication, _) => Some(publication),
            Self::Idle | Self::Activated(_) => None,
        }
    }
}

pub(super) struct ComputedStep {
    prepared: PreparedBatch,
    stats: StepStats,
    started: Instant,
    span: Span,
}

pub(super) struct Trainer<'a> {
    pub(super) setup: &'a TrainSetup,
    pub(super) status: &'a StatusCell,
    pub(super) runtime: &'a Handle,
    pub(super) pools: &'a ThreadPools,
    pub(super) learner: Learner,
    pub(super) progress: TrainProgress,
    /// Wakes this thread at the end of a publication.
    pub(super) wake: Sender<TrainCommand>,
    pub(super) marker: AttemptMarker,
    /// Whether it has waited for samples since the last step.
    pub(super) has_rested: bool,
    /// Ready groups when learned parts last learned from them during a canary, or fewer since.
    pub(super) ready_learned: usize,
    /// Activations of existing versions that the trainer has noticed.
    pub(super) activations: u64,
    /// Marks that the weights do not follow one yet.
    pub(super) activation: Marker,
    /// Arrival times of feedback that was trained on, but not yet in a published version.
    pub(super) feedback_times: Vec<UnixMillis>,
    pub(super) skip_log: SkipLog,
    /// The span of the step that was recorded last, until it is published or waits for further steps.
    pub(super) step_span: Span,
}

// The state machine.

impl Trainer<'_> {
    /// Runs until a stop command: in each turn all commands first, then one transition.
    pub(super) fn run(
        &mut self,
        mut phase: TrainPhase,
        commands: &Receiver<TrainCommand>,
        gate: &mut StepGate,
    ) -> Result<(), TrainError> {
        let mut wait = Duration::ZERO;
        loop {
            phase = match self.handle_commands(phase, commands, gate, wait)? {
                ControlFlow::Continue(phase) => phase,
                ControlFlow::Break(phase) => break self.finish(phase).map_err(TrainError::from),
            };
            (phase, wait) = self.tick(phase, gate)?;
        }
    }

    /// One turn: the phase that follows, from what has happened since the last turn, and the time until the next
    /// turn, which a command ends; none after a transition.
    ///
    /// | phase | condition | next |
    /// | --- | --- | --- |
    /// | any | an operator activated a version: a publication ends first | `Activated` |
    /// | any | a warning withdrew the active version: the weights follow at once | `Idle` |
    /// | `Starting`, `Publishing` | the publication ended | `Idle` |
    /// | `Ahead` | it ended, and its version is served: the step is recorded | `Idle`, `Publishing` |
    /// | `Ahead` | it ended otherwise: the step is undone | `Idle` |
    /// | `Idle` | a batch is ready: a step is recorded | `Idle`, `Publishing` |
    /// | `Idle` | steps wait for a publication, and it is due or no step may follow | `Publishing` |
    /// | `Publishing` | a batch is ready: a step is computed | `Ahead` |
    /// | `Activated` | no other activation came for [`SETTLE_TIME`], or a step may be taken | `Idle` |
    pub(super) fn tick(
        &mut self,
        phase: TrainPhase,
        gate: &StepGate,
    ) -> Result<(TrainPhase, Duration), TrainFailure> {
        use TrainPhase::{Activated, Ahead, Idle, Publishing, Starting};
        let phase = self.notice_activation(phase)?;
        let closed = self.closed(gate);
        self.learn_waiting_ratings(&phase, closed.is_some())?;
        let wanted = self.setup.config.samples_per_step;
        let next = match (phase, closed) {
            (phase, _) if phase.publication().is_some_and(Publication::is_finished) => {
                self.end_publication(phase)?
            }
            (Activated(since), closed) if closed.is_none() || since.elapsed() >= SETTLE_TIME => {
                self.follow_active()?;
                Idle
            }
            (Idle, None) => match self.next_batch(wanted, None)? {
                Some(batch) => self.step(batch, None)?,
                None => match self.propose(self.has_steps())? {
                    Idle => return Ok(self.rest(Idle, TrainState::Waiting)),
                    next => next,
                },
            },
            (Idle, Some(state)) => match self.propose(true)? {
                Idle => return Ok(self.rest(Idle, state)),
                next => next,
            },
            (Publishing(publication), None) => match self.next_batch(wanted, Some(&publication))? {
                Some(batch) => self.step(batch, Some(publication))?,
                None => return Ok(self.rest(Publishing(publication), TrainState::Waiting)),
            },
            // A canary can take hours, which must not look like a step that still runs.
            (Publishing(publication), Some(state)) if self.setup.policies.canary().is_some() => {
                return Ok(self.rest(Publishing(publication), state));
            }
            (phase @ (Starting(_) | Publishing(_) | Ahead(..)), _) => {
                return Ok(self.rest(phase, TrainState::Publishing));
            }
            (phase @ Activated(_), closed) => {
                return Ok(self.rest(phase, closed.unwrap_or_default()));
            }
        };
        Ok((next, Duration::ZERO))
    }

    fn rest(&mut self, phase: TrainPhase, state: TrainState) -> (TrainPhase, Duration) {
        self.has_rested |= state != TrainState::Publishing;
        self.status.set_state(state);
        self.report();
        let settles = matches!(phase, TrainPhase::Activated(_));
        (phase, if settles { SETTLE_TIME } else { POLL_INTERVAL })
    }

    /// Why no step may be taken on its own; `None` if one may.
    fn closed(&mut self, gate: &StepGate) -> Option<TrainState> {
        let (steps, config, now) = (self.learner.step_count(), &self.setup.config, now_ms());
        let most = config.max_steps_per_day;
        let schedule = if most > 0 && self.progress.steps_today(now) >= most {
            Some(format!("train.max_steps_per_day ({most}) is reached"))
        } else {
            config.when.closed(now, || (self.setup.is_idle)())
        };
        let is_scheduled = schedule.is_some();
        self.status.update(|s| s.schedule = schedule);
        if config.max_steps > 0 && steps >= config.max_steps {
            Some(TrainState::Finished)
        } else if gate.is_closed(steps) || self.progress.is_held(now) {
            Some(TrainState::Paused)
        } else {
            is_scheduled.then_some(TrainState::Scheduled)
        }
    }

    /// Handles all queued commands, waiting up to `wait` for the first. Breaks after a stop.
    ///
    /// The queue is emptied before the next step, because every ready group has sent a wake-up: a
    /// pause queued after them must not wait for as many steps.
    fn handle_commands(
        &mut self,
        mut phase: TrainPhase,
        commands: &Receiver<TrainCommand>,
        gate: &mut StepGate,
        mut wait: Duration,
    ) -> Result<ControlFlow<TrainPhase, TrainPhase>, TrainError> {
        loop {
            if std::mem::take(&mut gate.resumed) {
                phase = self.resume(phase)?;
            }
            match commands.recv_timeout(wait).map(|command| gate.apply(command)) {
                Ok(Some(TrainCommand::Step(reply))) => {
                    phase = self.step_on_request(phase, reply)?
                }
                Ok(Some(TrainCommand::LowerRate(halvings))) => {
                    self.progress.rate_halvings = halvings;
                    let factor = self.progress.rate_factor();
                    tracing::warn!(factor, "the learning rate is lowered or restored");
                }
                Ok(Some(TrainCommand::Stop)) | Err(RecvTimeoutError::Disconnected) => {
                    return Ok(ControlFlow::Break(phase));
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(ControlFlow::Continue(phase)),
            }
            wait = Duration::ZERO;
        }
    }

    /// Ends a hold and restores a lowered learning rate.
    pub(super) fn resume(&mut self, phase: TrainPhase) -> Result<TrainPhase, TrainFailure> {
        // The activation that the resume is for comes first.
        let phase = self.follow(phase)?;
        let lowered = std::mem::take(&mut self.progress.rate_halvings) > 0;
        let changed = self.progress.hold.take().is_some() || lowered;
        // Nothing of a computed step may be durable before its record, which writes the checkpoint then.
        if changed && !matches!(phase, TrainPhase::Ahead(..)) {
            self.checkpoint()?;
        }
        Ok(phase)
    }

    /// Takes one step on the groups that are ready, publishes it, and replies with the status.
    fn step_on_request(
        &mut self,
        phase: TrainPhase,
        reply: StepReply,
    ) -> Result<TrainPhase, TrainError> {
        let (phase, canary) = self.await_publication(phase)?;
        let phase = self.follow(phase)?;
        // Replies fail only if the caller no longer waits.
        if let Some(version) = canary.filter(|_| phase.publication().is_some()) {
            let _hung_up = reply.send(Err(TrainError::CanaryRunning(version)));
            return Ok(phase);
        }
        let Some(batch) = self.next_batch(1, None)? else {
            let _hung_up = reply.send(Err(TrainError::NothingReady));
            return Ok(phase);
        };
        match self.step_and_publish(batch) {
            Ok(phase) => {
                let _hung_up = reply.send(Ok(self.status.read()));
                Ok(phase)
            }
            Err(failure) => {
                let error = TrainError::from(failure);
                let _hung_up = reply.send(Err(error.clone()));
                Err(error)
            }
        }
    }

    fn step_and_publish(&mut self, batch: TrainBatch) -> Result<TrainPhase, TrainFailure> {
        let phase = match self.step(batch, None)? {
            TrainPhase::Idle => self.propose(true)?,
            phase => phase,
        };
        Ok(self.await_publication(phase)?.0)
    }

    /// Ends what is in progress. A canary would take hours: the next start continues it.
    pub(super) fn finish(&mut self, phase: TrainPhase) -> Result<(), TrainFailure> {
        let policies = Arc::clone(&self.setup.policies);
        let _suspension = policies.suspend();
        // The next start follows an activation.
        let phase = self.notice_activation(phase)?;
        self.end_publication(phase).map(drop)
    }
}

// A step.

impl Trainer<'_> {
    /// One step on a batch: advantages, forward and backward passes, update, record, propose.
    ///
    /// It ends early if the batch cannot be stepped on: the weights stay, and its groups are dropped. During
    /// a publication it ends before the record, because nothing of it may be durable before the version
    /// that it starts from is served.
    fn step(
        &mut self,
        batch: TrainBatch,
        during: Option<Publication>,
    ) -> Result<TrainPhase, TrainFailure> {
        self.status.set_state(TrainState::Training);
        let started = Instant::now();
        let span = info_span!(
            target: SPANS, "step",
            hone.step = self.learner.step_count() + 1, hone.groups = batch.groups.len(),
            hone.samples = batch.sample_count(), hone.reward_mean = Empty, hone.kl = Empty,
        );
        let entered = span.enter();
        let advantages = info_span!(target: SPANS, "advantages");
        self.learn_ratings(&batch)?;
        let mut prepared = advantages.in_scope(|| self.advantages(batch, during.as_ref()))?;
        self.has_rested = false;
        self.set_learning_rate();
        let update = info_span!(target: SPANS, "forward_backward");
        let stats = update.in_scope(|| self.forward_backward_and_update(&mut prepared))?;
        drop(entered);
        let step = match stats {
            Ok(stats) => Some(ComputedStep { prepared, stats, started, span }),
            Err(skipped) => self.skip(skipped).map(|()| None)?,
        };
        match (during, step) {
            (Some(publication), Some(step)) => Ok(TrainPhase::Ahead(publication, Box::new(step))),
            (Some(publication), None) => Ok(TrainPhase::Publishing(publication)),
            (None, Some(step)) => {
                self.record(step)?;
                self.propose(false)
            }
            (None, None) => Ok(TrainPhase::Idle),
        }
    }

    /// Ready groups, once they hold `wanted` trainable samples. Drops unusable ones.
    fn next_batch(
        &self,
        wanted: usize,
        during: Option<&Publication>,
    ) -> Result<Option<TrainBatch>, TrainFailure> {
        let setup = self.setup;
        let mut batch = loop {
            let built = batch_builder::build_batch(
                &setup.store,
                &setup.routes,
                &self.version_ages(during),
                &setup.config,
                wanted,
                &setup.metrics.train.dropped_groups,
            )?;
            let Some(mut batch) = built else { return Ok(None) };
            // What was dropped is no longer ready.
            if !self.drop_unusable(&mut batch)? {
                break batch;
            }
        };
        // The groups stay ready.
        if during.is_some() && self.may_have_long_shard(batch.completions()) {
            return Ok(None);
        }
        feedback_cap::cap(&mut batch, &setup.routes, Some(&setup.metrics));
        Ok(Some(batch))
    }

    /// Drops corrections without a weight, and groups with a sample that does not fit in memory. Returns
    /// whether any.
    fn drop_unusable(&self, batch: &mut TrainBatch) -> Result<bool, TrainFailure> {
        let limit = self.learner.longest_shard();
        let mut drops = Vec::new();
        if self.setup.config.correction_weight <= 0.0 {
            let unused = batch.corrections.drain(..);
            drops.extend(unused.map(|one| (one.group, NO_CORRECTION_WEIGHT.to_owned())));
        }
        let groups = batch.groups.extract_if(.., |group| group.longest_tokens() > limit);
        let mut long: Vec<_> = groups.map(|g| (g.group.id, g.longest_tokens())).collect();
        let corrections = batch.corrections.extract_if(.., |one| one.tokens() > limit);
        long.extend(corrections.map(|one| (one.group, one.tokens())));
        for (id, tokens) in long {
            tracing::warn!(group = %id, tokens, limit, "a sample is too long to be trained on");
            drops.push((id, TOO_LONG.to_owned()));
        }
        let is_smaller = !drops.is_empty();
        if is_smaller {
            self.drop_groups(drops)?;
        }
        Ok(is_smaller)
    }

    pub(super) fn drop_groups(
        &self,
        drops: impl IntoIterator<Item = (GroupId, String)>,
    ) -> Result<(), TrainFailure> {
        let counter = &self.setup.metrics.train.dropped_groups;
        Ok(batch_builder::drop_groups(&self.setup.store, drops, counter)?)
    }

    /// Whether a step on prompts and completions may have a longer shard than the memory plan has room for
    /// beside the copy that a publication loads, if it loads one.
    fn may_have_long_shard<'a>(
        &self,
        completions: impl Iterator<Item = (&'a [TokenId], &'a [TokenId])>,
    ) -> bool {
        self.setup.stages_weights
            && packing::may_exceed(memory::shard_tokens(self.learner.spec()), completions)
    }

    /// The ages of versions once the publication in progress succeeds. A canary has its version
    /// already, and its samples are those of the current weights.
    fn version_ages(&self, during: Option<&Publication>) -> VersionAges {
        let is_running = during.is_some_and(|publication| !publication.is_finished());
        let lineage = self.setup.store.lineage();
        let canary = lineage.canary().filter(|_| is_running);
        let head = canary.unwrap_or_else(|| self.setup.policies.active());
        let ahead = u64::from(is_running && canary.is_none());
        VersionAges { lineage, head, ahead }
    }

    /// Computes the advantages of a batch, and adds samples of earlier steps, at most `train.replay.share`
    /// of all. They are used for their gradient alone: baselines, adaptive weights, the ledger and the
    /// metrics of rewards and feedback have had them before.
    fn advantages(
        &self,
        batch: TrainBatch,
        during: Option<&Publication>,
    ) -> Result<PreparedBatch, TrainFailure> {
        let (setup, config) = (self.setup, &self.setup.config);
        let ages = self.version_ages(during);
        let staleness = batch.staleness(&ages);
        let prepare =
            |batch, staleness| self.progress.prepare(batch, &setup.routes, config, staleness);
        let mut prepared = prepare(batch, staleness);
        // The least that is worth a step, where all are rated and arrive faster than steps end: then many small steps
        // teach more than few large ones.
        let is_rated = prepared.batch.groups.iter().all(|group| group.is_rated);
        let parts = if is_rated && !self.has_rested { config.rated_factor } else { 1 };
        let most = config.samples_per_step.div_ceil(parts);
        prepared.select(most, config.seed, self.progress.steps());
        let most = config.replay.most(prepared.samples.len());
        if most == 0 {
            return Ok(prepared);
        }
        let fits = |group: &BatchGroup| {
            group.longest_tokens() <= self.learner.longest_shard()
                && (during.is_none() || !self.may_have_long_shard(group.completions()))
        };
        let steps = replayable(self.learner.step_count());
        let (store, routes) = (&setup.store, &setup.routes);
        let mut old = draw_replayed(store, routes, &ages, config.seed, steps, most, fits)?;
        feedback_cap::cap(&mut old, &setup.routes, None);
        let replayed = prepare(old, 0.0).samples;
        // They may share a prefix with the new samples.
        let all = prepared.samples.iter().chain(&replayed);
        let all = all.map(|sample| (sample.prompt_ids.as_slice(), sample.ids.as_slice()));
        if during.is_some() && self.may_have_long_shard(all) {
            return Ok(prepared);
        }
        prepared.replayed = replayed.len();
        prepared.samples.extend(replayed);
        Ok(prepared)
    }

    fn set_learning_rate(&mut self) {
        let parameters = self.learner.spec().parameters();
        let peak = self.setup.peak_rate(self.learner.step_count() + 1, parameters);
        self.learner.set_peak_rate(peak * self.progress.rate_factor());
    }

    /// Updates the weights. The inner error is a batch that cannot be stepped on, which changes nothing.
    fn forward_backward_and_update(
        &mut self,
        prepared: &mut PreparedBatch,
    ) -> Result<Result<StepStats, SkippedBatch>, TrainFailure> {
        // Unpublished weights have no version; `u64::MAX` matches no sample.
        let version = self.progress.current_version().map_or(u64::MAX, |v| v.0);
        let max_tokens = self.setup.max_completion_tokens;
        self.marker.set(StepAttempt::of(&prepared.batch))?;
        let learner = &mut self.learner;
        let stats =
            self.pools.train.install(|| learner.step(&prepared.samples, version, max_tokens));
        // A sample that is refused before the passes leaves the times of the last step.
        if self.setup.device.is_some() && stats.is_ok() {
            let StepTiming { forward, reference, backward, .. } = learner.timing();
            let busy = self.setup.metrics.device_busy.with_label_values(&["training"]);
            busy.inc_by(forward + reference + backward);
        }
        self.marker.clear()?;
        match stats {
            Ok(StepStats { skipped: Some(reason), faded, .. }) => {
                let (ops, left) = self.faded(prepared, &faded);
                self.setup.store.commit_blocking(ops)?;
                let mut skipped = SkippedBatch::of(prepared, reason);
                skipped.groups.retain(|id| left.contains(id));
                Ok(Err(skipped))
            }
            Ok(stats) => Ok(Ok(stats)),
            Err(LearnError::Sample { index, reason }) => {
                if prepared.without_replay_of(index) {
                    tracing::warn!(reason, "samples of earlier steps cannot be trained on again");
                    return self.forward_backward_and_update(prepared);
                }
                // A restart would meet the same sample again, so its group is dropped instead.
                Ok(Err(SkippedBatch::of_sample(prepared, index, reason)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The operations that drop members with faded samples, which are counted, and the groups that have others.
    fn faded(&self, prepared: &PreparedBatch, samples: &[usize]) -> (Vec<Op>, Vec<GroupId>) {
        let (ops, left) = prepared.batch.without(&prepared.advantages, samples);
        let dropped = &self.setup.metrics.train.dropped_groups;
        dropped.with_label_values(&[STALE]).inc_by(ops.len() as u64);
        (ops, left)
    }

    fn skip(&mut self, skipped: SkippedBatch) -> Result<(), TrainFailure> {
        let label = skipped.reason.label();
        if let Some(text) = self.skip_log.skipped(skipped.reason) {
            let (reason, groups) = (&skipped.message, skipped.groups.len());
            tracing::warn!(state = label, reason, groups, "{text}");
        }
        self.setup.metrics.train.skipped_steps.with_label_values(&[label]).inc();
        self.status.update(|s| {
            s.last_error = Some(skipped.message);
            s.skipped_batches += 1;
        });
        self.drop_groups(skipped.groups.into_iter().map(|id| (id, label.to_owned())))
    }

    /// Makes the step durable: the checkpoint first, then the ledger's step record, which marks the
    /// groups as trained. After a crash between the two, [`Self::restore`] writes the record from
    /// the checkpoint; in the other order, the groups would be lost.
    fn record(&mut self, step: ComputedStep) -> Result<(), TrainFailure> {
        let (setup, ComputedStep { prepared, stats, started, span }) = (self.setup, step);
        let recorded = info_span!(target: SPANS, parent: &span, "record").entered();
        self.progress.weights.observe(&setup.routes, &prepared.batch);
        if !stats.refused.is_empty() {
            tracing::warn!(
                samples = stats.refused.len(),
                "sampler and trainer differ by more than 0.05 nats"
            );
        }
        let (mut ops, groups) = self.faded(&prepared, &stats.faded);
        let weights = &self.progress.weights;
        let record = StepRecord {
            step: self.learner.step_count(),
            groups,
            metrics: report::collect(stats.metrics, &prepared, weights, started.elapsed()),
            created: now_ms(),
        };
        self.progress.baselines = prepared.baselines;
        self.progress.add_step(record.clone());
        self.checkpoint()?;
        ops.push(Op::Step(Box::new(record.clone())));
        setup.store.commit_blocking(ops)?;
        drop(recorded);
        span.record("hone.reward_mean", record.metrics.get("reward_mean").copied());
        span.record("hone.kl", record.metrics.get("kl").copied());
        self.step_span = span;
        report::export(&setup.metrics, &record, &prepared.advantages, started.elapsed());
        if let Some(batches) = self.skip_log.stepped() {
            tracing::info!(batches, "learning resumes after {batches} batches of equal rewards");
        }
        self.feedback_times.extend(prepared.batch.feedback_times());
        self.report();
        Ok(())
    }

    /// Lets learned parts learn the ratings of a batch that they have not seen.
    fn learn_ratings(&mut self, batch: &TrainBatch) -> Result<(), TrainFailure> {
        let (learned, routes) = (&mut self.progress.learned, &self.setup.routes);
        let base = self.learner.model();
        if self.pools.train.install(|| learned.learn(routes, base, batch))? {
            self.share_learned();
        }
        Ok(())
    }

    /// Lets learned parts learn from waiting ratings while a canary runs or no step may be taken, because the next
    /// step may be hours away.
    fn learn_waiting_ratings(
        &mut self,
        phase: &TrainPhase,
        is_closed: bool,
    ) -> Result<(), TrainFailure> {
        let setup = self.setup;
        let ready = *setup.store.watch_ready().borrow();
        self.ready_learned = self.ready_learned.min(ready);
        let during = phase.publication();
        let has_canary = during.is_some() && setup.policies.canary().is_some();
        let has_parts = || setup.routes.iter().any(|route| route.learned().next().is_some());
        if !(is_closed || has_canary)
            || ready < self.ready_learned + LEARNED_TOGETHER
            || !has_parts()
        {
            return Ok(());
        }
        self.ready_learned = ready;
        match self.next_batch(1, during)? {
            Some(batch) => self.learn_ratings(&batch),
            None => Ok(()),
        }
    }

    /// Gives the routes' learned parts the current predictions.
    pub(super) fn share_learned(&self) {
        let (setup, learned) = (self.setup, &self.progress.learned);
        learned.share(&setup.routes, self.learner.model(), &self.pools.probe);
        for (route, part, judgement) in learned.judgements() {
            let Judgement { concordance, excess, is_trusted } = judgement;
            let values = [concordance, excess, f64::from(u8::from(is_trusted))];
            for (stat, value) in ["concordance", "excess", "trusted"].into_iter().zip(values) {
                setup
                    .metrics
                    .train
                    .learned_reward
                    .with_label_values(&[route, part, stat])
                    .set(value);
            }
        }
    }

    /// Whether the steps since the last version are as many as a version needs.
    fn has_steps(&self) -> bool {
        self.progress.unpublished_steps >= self.setup.policy.publish_every
    }

    /// Whether further steps should be part of the next version: a canary takes more ratings than its version's steps,
    /// so that ever more would wait. The policy must still be near the active version.
    fn has_backlog(&self) -> bool {
        let (setup, steps) = (self.setup, self.progress.unpublished_steps);
        let last = self.progress.last_step.as_ref();
        let clipped = last.and_then(|step| step.metrics.get("clip_region"));
        setup.policy.promotion == Promotion::Canary
            && steps < setup.policy.publish_every.saturating_mul(BACKLOG_STEPS)
            && clipped.is_none_or(|clipped| *clipped < BACKLOG_CLIPPED)
            && *setup.store.watch_ready().borrow() >= setup.config.samples_per_step
    }

    /// Starts to publish the weights every `policy.publish_every` steps, later if a backlog waits, and if no step follows
    /// (`is_last`), unless another version was activated: the trainer continues from that one.
    fn propose(&mut self, is_last: bool) -> Result<TrainPhase, TrainFailure> {
        let step = std::mem::replace(&mut self.step_span, Span::none());
        let is_due = self.progress.unpublished_steps > 0 && is_last
            || self.has_steps() && !self.has_backlog();
        let activations = self.setup.policies.watch_rollback().borrow().count;
        let is_free = self.progress.hold.is_none() && activations == self.activations;
        if is_due && is_free { step.in_scope(|| self.publish()) } else { Ok(TrainPhase::Idle) }
    }

    pub(super) fn report(&self) {
        if let Ok(oldest) = self.setup.store.ready_groups(1) {
            let created = oldest.first().map_or_else(now_ms, |group| group.created);
            #[expect(clippy::cast_precision_loss, reason = "milliseconds of waiting")]
            let seconds = now_ms().saturating_sub(created) as f64 / 1000.0;
            self.setup.metrics.train.oldest_waiting.set(seconds);
        }
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

// Publications: their begin, and what follows from their end.

impl Trainer<'_> {
    /// Starts to publish the weights. No other publication may be in progress.
    pub(super) fn publish(&mut self) -> Result<TrainPhase, TrainFailure> {
        Ok(TrainPhase::Publishing(Publication::start(
            self.setup,
            (self.runtime, &self.pools.probe, self.wake.clone()),
            self.learner.snapshot()?,
            &self.progress,
            std::mem::take(&mut self.feedback_times),
        )?))
    }

    /// Waits for the publication in progress until it ends or becomes a canary, whose version it returns.
    fn await_publication(
        &mut self,
        mut phase: TrainPhase,
    ) -> Result<(TrainPhase, Option<PolicyVersion>), TrainFailure> {
        while let Some(publication) = phase.publication() {
            if publication.is_finished() {
                phase = self.end_publication(phase)?;
            } else if let Some(version) = self.setup.policies.canary() {
                return Ok((phase, Some(version)));
            } else {
                self.status.set_state(TrainState::Publishing);
                std::thread::sleep(AWAIT_INTERVAL);
            }
        }
        Ok((phase, None))
    }

    /// Waits for the publication in progress, if any. If its weights are served, the step that was computed
    /// meanwhile is recorded, else undone: the learner then has the active version's weights again.
    pub(super) fn end_publication(
        &mut self,
        phase: TrainPhase,
    ) -> Result<TrainPhase, TrainFailure> {
        let (mut publication, ahead) = match phase {
            TrainPhase::Starting(publication) | TrainPhase::Publishing(publication) => {
                (publication, None)
            }
            TrainPhase::Ahead(publication, step) => (publication, Some(step)),
            phase @ (TrainPhase::Idle | TrainPhase::Activated(_)) => return Ok(phase),
        };
        if !publication.is_finished() {
            self.status.set_state(TrainState::Publishing);
        }
        let (outcome, finished) = publication.wait()?;
        match outcome {
            PublishOutcome::Published(record) => {
                self.progress.set_published(record.version);
                self.progress.rejections = 0;
                self.keep_state(record.version, publication.step)?;
                for arrived in &publication.feedback_times {
                    #[expect(clippy::cast_precision_loss, reason = "milliseconds of waiting")]
                    let seconds = finished.saturating_sub(*arrived) as f64 / 1000.0;
                    self.setup.metrics.feedback_to_policy.observe(seconds);
                }
                self.report();
                if let Some(step) = ahead {
                    self.record(*step)?;
                    return self.propose(false);
                }
            }
            PublishOutcome::Rejected(record) => {
                self.status.update(|s| s.last_error.clone_from(&record.reason));
                self.return_groups(Some(&record))?;
                self.undo(publication.step)?;
            }
            PublishOutcome::Superseded => self.undo(publication.step)?,
            // The process ends. The step that was computed meanwhile is lost; its groups stay ready.
            PublishOutcome::Suspended => {}
        }
        self.report();
        Ok(TrainPhase::Idle)
    }

    /// Returns to the active version, and to the step count and random stream of step `published`.
    fn undo(&mut self, published: u64) -> Result<(), TrainFailure> {
        if self.learner.step_count() > published {
            let dir = checkpoint::step_dir(&self.setup.checkpoints, published);
            self.learner.load(&dir)?;
        }
        self.reset_to_active()?;
        self.checkpoint()
    }
}
