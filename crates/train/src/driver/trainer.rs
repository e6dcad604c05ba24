//! What the worker's thread does: gather, step, checkpoint, publish.
//!
//! Invariant: a step's checkpoint is durable before the ledger marks its groups trained, and both
//! before its version is served, so a crash anywhere repeats at most the publication.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use hone_core::types::{GroupId, GroupState, PolicyState, PolicyVersion, StepRecord, now_ms};
use hone_model::ModelSpec;
use hone_store::Op;

use super::handle::{StatusCell, StepGate, TrainCommand, TrainError, TrainState, TrainStatus};
use super::progress::LoopState;
use super::publication::Publication;
use super::reporting;
use super::worker::{Pools, TrainSetup};
use crate::data::batch_builder::TrainBatch;
use crate::data::{batch_builder, feedback_cap};
use crate::learning::checkpoint;
use crate::learning::learner::NO_SAMPLE;
use crate::learning::step_stats::completion_metrics;
use crate::memory::BaseMemory;
use crate::memory::memory_check::{available_memory, check_memory};
use crate::policy::PublishOutcome;
use crate::{LearnError, Learner};

/// How often an idle worker looks around by itself.
const TICK: Duration = Duration::from_secs(1);

/// The learner together with what it has done.
pub(crate) struct Trainer<'a> {
    parts: &'a TrainSetup,
    board: &'a StatusCell,
    runtime: &'a Handle,
    pools: &'a Pools,
    learner: Learner,
    progress: LoopState,
    /// A version on its way, which the weights are at most one step ahead of.
    offer: Option<Publication>,
    /// Activations by hand that have been followed.
    rollbacks: u64,
    /// When the feedback came in that no published version was trained on yet.
    feedback: Vec<u64>,
}

type Outcome<T> = Result<T, TrainError>;

/// Any error of a part, as the trainer's own.
fn failed(error: impl std::fmt::Display) -> TrainError {
    TrainError::Failed(error.to_string())
}

impl<'a> Trainer<'a> {
    /// Loads the model and the newest checkpoint and brings it to one opinion with the ledger.
    pub(crate) fn restore(
        parts: &'a TrainSetup,
        board: &'a StatusCell,
        runtime: &'a Handle,
        pools: &'a Pools,
    ) -> Outcome<Self> {
        let pool = &pools.train;
        if let Some(available) = available_memory() {
            let spec = ModelSpec::from_config(&parts.model.config).map_err(failed)?;
            let threads = pool.current_num_threads();
            let loaded = parts.base.is_some();
            let base = BaseMemory::read(&spec, &parts.model.weights, parts.config.base_dtype);
            let base = base.map_err(failed)?;
            check_memory(&spec, base, &parts.config, threads, available, loaded).map_err(failed)?;
        }
        let learner = pool.install(|| match &parts.base {
            Some(base) => Learner::with_model(base.clone(), &parts.config),
            None => Learner::new(&parts.model, &parts.config),
        });
        let learner = learner.map_err(failed)?;
        let rollbacks = parts.policies.watch_rollback().borrow().count;
        let mut trainer = Self {
            parts,
            board,
            runtime,
            pools,
            learner,
            offer: None,
            progress: LoopState::new(parts.config.baseline_window),
            rollbacks,
            feedback: Vec::new(),
        };
        let saved = checkpoint::latest(&parts.checkpoints).map_err(failed)?;
        if let Some(dir) = &saved {
            let extra = trainer.learner.load(dir).map_err(failed)?;
            trainer.progress = serde_json::from_value(extra)
                .map_err(|error| failed(format!("{}: {error}", dir.display())))?;
            trainer.progress.baselines.set_window(parts.config.baseline_window);
        }
        trainer.reconcile()?;
        // Samples of the base are none of the adapter that the run starts from.
        let adapter = &parts.config.lora.init_adapter;
        let begins = saved.is_none() && !adapter.as_os_str().is_empty();
        if begins && parts.policies.active() == PolicyVersion::BASE {
            trainer.publish()?;
        }
        trainer.report();
        Ok(trainer)
    }

    /// Repeats what a crash may have cut off after the checkpoint: the ledger's step record and
    /// the publication. Follows the ledger where somebody activated another version meanwhile.
    fn reconcile(&mut self) -> Outcome<()> {
        let step = self.learner.step_count();
        let recorded = self.parts.store.last_step().map_err(failed)?.map_or(0, |s| s.step);
        if let Some(record) = self.progress.last_step.clone()
            && recorded < step
        {
            self.parts.store.commit_blocking(vec![Op::Step(Box::new(record))]).map_err(failed)?;
        }
        let active = self.parts.policies.active();
        let made = self
            .parts
            .policies
            .list()
            .map_err(failed)?
            .into_iter()
            .rev()
            .find(|p| p.step == step && p.adapter.is_some());
        match made {
            Some(policy) if policy.version == active => self.progress.published(active),
            Some(policy)
                if policy.state == PolicyState::Rejected
                    && policy.parent == Some(active)
                    && policy.metrics.contains_key("parity_logprob_difference") =>
            {
                self.reset()?;
            }
            _ if self.progress.parent == active => {
                if self.progress.pending >= self.parts.publish_every {
                    self.publish()?;
                }
            }
            _ => self.reset()?,
        }
        Ok(())
    }

    /// Goes on from the version being served.
    fn reset(&mut self) -> Outcome<()> {
        let active = self.parts.policies.active();
        let adapter = self.parts.policies.active_adapter().map_err(failed)?;
        let (learner, pool) = (&mut self.learner, &self.pools.train);
        pool.install(|| learner.reset_to(adapter.as_deref())).map_err(failed)?;
        self.progress.published(active);
        tracing::info!(version = %active, "trainer goes on from the active policy version");
        Ok(())
    }

    /// The loop: commands first, then rollbacks, then steps.
    pub(crate) fn run(
        &mut self,
        commands: &Receiver<TrainCommand>,
        hold: &mut StepGate,
    ) -> Outcome<()> {
        let mut idle = false;
        loop {
            let wait = if idle { TICK } else { Duration::ZERO };
            let mut next = commands.recv_timeout(wait);
            // All that wait: there is a wake-up for each of a step's groups, and a pause or an end
            // behind them must not wait for as many steps.
            loop {
                match next.map(|command| hold.follow(command)) {
                    Ok(Some(TrainCommand::Step(reply))) => {
                        self.conclude()?;
                        self.follow_rollback()?;
                        self.step_now(reply)?;
                    }
                    Ok(Some(TrainCommand::Stop)) | Err(RecvTimeoutError::Disconnected) => {
                        return self.conclude().map(drop);
                    }
                    Ok(_) => {}
                    Err(RecvTimeoutError::Timeout) => break,
                }
                next = commands.recv_timeout(Duration::ZERO);
            }
            self.follow_rollback()?;
            if self.offer.as_ref().is_some_and(Publication::is_over) {
                self.conclude()?;
            }
            let max_steps = self.parts.config.max_steps;
            let state = if max_steps > 0 && self.learner.step_count() >= max_steps {
                TrainState::Finished
            } else if hold.holds(self.learner.step_count()) {
                TrainState::Paused
            } else {
                TrainState::Waiting
            };
            let batch = match state {
                TrainState::Waiting => self.gather(self.parts.config.samples_per_step)?,
                _ => None,
            };
            idle = batch.is_none();
            if let Some(mut batch) = batch {
                self.step(&mut batch)?;
            } else {
                self.conclude()?;
                self.board.state(state);
                self.report();
            }
        }
    }

    fn step_now(&mut self, reply: oneshot::Sender<Result<TrainStatus, TrainError>>) -> Outcome<()> {
        let outcome = match self.gather(1)? {
            Some(mut batch) => {
                self.step(&mut batch).and_then(|()| self.conclude()).map(|_| self.board.read())
            }
            None => Err(TrainError::NothingReady),
        };
        let fatal = match &outcome {
            Err(error @ TrainError::Failed(_)) => Err(error.clone()),
            _ => Ok(()),
        };
        // A caller that has gone away needs no answer.
        let _gone = reply.send(outcome);
        fatal
    }

    /// How often a version has been activated by hand.
    fn activations(&self) -> u64 {
        self.parts.policies.watch_rollback().borrow().count
    }

    fn follow_rollback(&mut self) -> Outcome<()> {
        let count = self.activations();
        if count != self.rollbacks {
            // It came before that activation or not at all: one publication at a time.
            self.conclude()?;
            self.rollbacks = count;
            self.reset()?;
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Enough trainable samples for a step, oldest groups first; stale groups are dropped.
    fn gather(&self, wanted: usize) -> Outcome<Option<TrainBatch>> {
        let mut batch = batch_builder::build_batch(
            &self.parts.store,
            &self.parts.routes,
            self.reached(),
            self.parts.config.max_staleness,
            wanted,
            self.parts.config.samples_per_step,
        )
        .map_err(failed)?;
        if let Some(batch) = &mut batch {
            feedback_cap::cap(batch, &self.parts.routes, &self.parts.metrics);
        }
        Ok(batch)
    }

    fn step(&mut self, batch: &mut TrainBatch) -> Outcome<()> {
        self.board.state(TrainState::Training);
        let started = Instant::now();
        self.progress.weights.apply(&self.parts.routes, batch);
        let batch = &*batch;
        let staleness = batch.staleness(self.reached());
        let mut baselines = self.progress.baselines.clone();
        let advantages = baselines.advantages(&batch.rewards(), &self.parts.config);
        let samples = batch.train_samples(&advantages);
        // No sample has this version: after a step that was not published the weights are nobody's.
        let current = self.progress.current_version().map_or(u64::MAX, |v| v.0);
        let limit = self.parts.max_completion_tokens;
        let next = self.learner.step_count() + 1;
        let rate = self.parts.peak_rates.iter().rev().find(|(first, _)| *first <= next);
        self.learner.set_peak_rate(rate.map_or(self.parts.config.learning_rate, |(_, r)| *r));
        let (learner, pool) = (&mut self.learner, &self.pools.train);
        let stats = match pool.install(|| learner.step(&samples, current, limit)) {
            Ok(stats) => stats,
            // Dropped, or the same step would fail again after every restart.
            Err(LearnError::Sample { index, reason }) => {
                return self.skip(batch.group_of(&advantages, index), "invalid", &reason);
            }
            Err(error) => return Err(failed(error)),
        };
        if let Some(reason) = &stats.skipped {
            let state = if reason == NO_SAMPLE { "no_sample" } else { "non_finite" };
            return self.skip(batch.group_ids(), state, reason);
        }
        // Nothing is written down of a step on weights that were rejected: its groups stay.
        if !self.conclude()? {
            return Ok(());
        }
        self.progress.baselines = baselines;
        self.progress.weights.observe(&self.parts.routes, batch);
        if !stats.refused.is_empty() {
            let samples = stats.refused.len();
            tracing::warn!(
                samples,
                "sampler and trainer disagree beyond train.max_sampler_difference"
            );
        }
        let mut metrics = stats.metrics;
        for (name, value) in [
            ("reward_mean", advantages.reward_mean),
            ("reward_std", advantages.reward_std),
            ("reward_batch_std", advantages.reward_batch_std),
            ("zero_std_groups_ratio", advantages.zero_std_groups_ratio),
        ] {
            metrics.extend(value.map(|v| (name.to_owned(), v)));
        }
        metrics.insert("staleness_versions".to_owned(), staleness);
        // Of all completions, those without an advantage included.
        metrics.extend(completion_metrics(batch.lengths()));
        metrics.insert("dropped_groups".to_owned(), advantages.dropped_groups as f64);
        metrics.extend(advantages.part_metrics());
        for (_, part, weight) in self.progress.weights.all() {
            metrics.insert(format!("weight/{part}"), weight);
        }
        metrics.insert("step_seconds".to_owned(), started.elapsed().as_secs_f64());
        let record = StepRecord {
            step: self.learner.step_count(),
            groups: batch.group_ids(),
            metrics,
            created: now_ms(),
        };
        self.progress.stepped(record.clone());
        self.checkpoint()?;
        self.parts
            .store
            .commit_blocking(vec![Op::Step(Box::new(record.clone()))])
            .map_err(failed)?;
        reporting::step(&self.parts.metrics, &record, &advantages, started.elapsed());
        self.feedback.extend(batch.feedback_times());
        self.report();
        // A version that was activated by hand during the step stays: it is followed next.
        let overruled = self.activations() != self.rollbacks;
        if self.progress.pending >= self.parts.publish_every && !overruled {
            self.offer()?;
        }
        Ok(())
    }

    /// The version of these weights, as far as it is known before it is served.
    fn reached(&self) -> PolicyVersion {
        let active = self.parts.policies.active();
        let coming = self.offer.as_ref().is_some_and(|offer| !offer.is_over());
        PolicyVersion(active.0 + u64::from(coming))
    }

    /// Drops groups that cannot be stepped on; the weights have not changed.
    fn skip(&self, groups: Vec<GroupId>, state: &str, reason: &str) -> Outcome<()> {
        tracing::warn!(state, reason, groups = groups.len(), "optimiser step skipped");
        self.parts.metrics.train.skipped_steps.with_label_values(&[state]).inc();
        self.board.update(|s| s.last_error = Some(reason.to_owned()));
        let dropped = |id| Op::GroupState(id, GroupState::Dropped(state.to_owned()));
        let drops = groups.into_iter().map(dropped).collect();
        self.parts.store.commit_blocking(drops).map_err(failed)?;
        Ok(())
    }

    fn checkpoint(&self) -> Outcome<()> {
        let extra = serde_json::to_value(&self.progress).map_err(failed)?;
        let dir = checkpoint::step_dir(&self.parts.checkpoints, self.learner.step_count());
        self.learner.save(&dir, &extra).map_err(failed)?;
        checkpoint::prune(&self.parts.checkpoints, self.parts.config.keep_checkpoints)
            .map_err(failed)
    }

    /// Publishes the weights and waits for it.
    fn publish(&mut self) -> Outcome<()> {
        self.offer()?;
        self.conclude().map(drop)
    }

    /// Begins to publish the weights; none is under way.
    fn offer(&mut self) -> Outcome<()> {
        self.offer = Some(Publication::begin(
            self.parts,
            self.runtime,
            &self.pools.probe,
            self.learner.snapshot().map_err(failed)?,
            &self.progress,
            std::mem::take(&mut self.feedback),
        )?);
        Ok(())
    }

    /// Waits for the publication under way, if there is one; false where the weights were rejected or
    /// overruled and the learner went back, a step taken meanwhile included.
    fn conclude(&mut self) -> Outcome<bool> {
        let Some(mut offer) = self.offer.take() else { return Ok(true) };
        if !offer.is_over() {
            self.board.state(TrainState::Publishing);
        }
        let (verdict, ended) = offer.end()?;
        let published = match verdict {
            PublishOutcome::Published(record) => {
                self.progress.published(record.version);
                #[expect(clippy::cast_precision_loss, reason = "milliseconds of waiting")]
                for arrived in &offer.feedback {
                    let waited = ended.saturating_sub(*arrived) as f64 / 1000.0;
                    self.parts.metrics.feedback_to_policy.observe(waited);
                }
                true
            }
            PublishOutcome::Rejected(_) | PublishOutcome::Overruled => {
                if let PublishOutcome::Rejected(record) = verdict {
                    self.board.update(|s| s.last_error = record.reason);
                }
                // Reaches the next version, as before.
                self.feedback.append(&mut offer.feedback);
                if self.learner.step_count() > offer.step {
                    let dir = checkpoint::step_dir(&self.parts.checkpoints, offer.step);
                    self.learner.load(&dir).map_err(failed)?;
                }
                self.reset()?;
                self.checkpoint()?;
                false
            }
        };
        self.report();
        Ok(published)
    }

    /// Brings the status up to date.
    fn report(&self) {
        self.board.update(|s| {
            // Not the learner's: its step may have to be undone until it is written down.
            s.step = self.progress.steps();
            s.policy_version = self.progress.parent.0;
            if let Some(step) = &self.progress.last_step {
                s.metrics.clone_from(&step.metrics);
            }
        });
    }
}
