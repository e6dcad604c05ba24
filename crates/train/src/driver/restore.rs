//! Recovery: from a checkpoint after a start, and to the version that an operator activated.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::Instant;

use tokio::runtime::Handle;

use hone_core::files::remove_any;
use hone_core::types::{GroupState, PolicyRecord, PolicyState, PolicyVersion, StepRecord, now_ms};
use hone_store::Op;

use super::progress::{AttemptMarker, Hold, Marker, TrainProgress};
use super::report::{SkipLog, StatusCell};
use super::trainer::{TrainPhase, Trainer};
use super::{ThreadPools, TrainCommand, TrainFailure, TrainSetup};
use crate::data::AdaptiveWeights;
use crate::data::advantage::Baselines;
use crate::error::LearnError;
use crate::learning::checkpoint;
use crate::learning::learner::Learner;
use crate::policy::{RELEARN, is_activated, recalled, version_name};

/// The newest checkpoint, and the one before it, should the newest be damaged.
const KEPT_CHECKPOINTS: usize = 2;

impl<'a> Trainer<'a> {
    /// Loads model and newest checkpoint and reconciles them with the ledger. Returns what is in progress then.
    pub(super) fn restore(
        setup: &'a TrainSetup,
        status: &'a StatusCell,
        runtime: &'a Handle,
        pools: &'a ThreadPools,
        wake: &Sender<TrainCommand>,
    ) -> Result<(Self, TrainPhase), TrainFailure> {
        let learner = pools.train.install(|| match &setup.base {
            Some(base) => Learner::with_model(base.clone(), &setup.config),
            None => Learner::new(&setup.model, setup.config.base_dtype, &setup.config),
        })?;
        let mut trainer = Self {
            setup,
            status,
            runtime,
            pools,
            learner,
            progress: TrainProgress::default(),
            marker: AttemptMarker::new(&setup.checkpoints),
            wake: wake.clone(),
            has_rested: true,
            ready_learned: 0,
            activations: setup.policies.watch_rollback().borrow().count,
            activation: Marker::of_activation(&setup.checkpoints),
            feedback_times: Vec::new(),
            skip_log: SkipLog::default(),
            step_span: tracing::Span::none(),
        };
        let is_resumed = trainer.load_newest()?;
        trainer.learner.set_longest_shard(setup.longest_sample);
        if let Some(base) = &setup.device {
            trainer.learner.use_device(base, setup.longest_sample)?;
        }
        status.update(|s| s.max_sample_tokens = trainer.learner.longest_shard());
        trainer.examine_interrupted()?;
        let mut phase = trainer.reconcile()?;
        // Published before the first step, because the base's samples are not samples of the adapter.
        let has_adapter = !setup.config.lora.init_adapter.as_os_str().is_empty();
        let is_new = !is_resumed && setup.policies.active() == PolicyVersion::BASE;
        if has_adapter && is_new && matches!(phase, TrainPhase::Idle) {
            phase = match trainer.publish()? {
                TrainPhase::Publishing(publication) => TrainPhase::Starting(publication),
                phase => phase,
            };
        }
        trainer.report();
        Ok((trainer, phase))
    }

    /// Loads the newest readable checkpoint, of those of steps and then of versions, and returns whether
    /// there is one. Newer ones are damaged and are set aside.
    fn load_newest(&mut self) -> Result<bool, TrainFailure> {
        let root = &self.setup.checkpoints;
        let of_steps = checkpoint::list(root)?;
        let mut candidates = checkpoint::entries(&self.states())?;
        candidates.extend(of_steps);
        let mut damaged = Vec::new();
        for dir in candidates.iter().rev() {
            match self.load(dir) {
                Ok(()) => {
                    for (dir, error) in damaged {
                        let aside = checkpoint::set_aside(root, dir)?;
                        self.setup.metrics.train.damaged_checkpoints.inc();
                        tracing::error!(%error, aside = %aside.display(), "a checkpoint is damaged: training continues from an older one");
                    }
                    return Ok(true);
                }
                Err(error) => damaged.push((dir, error)),
            }
        }
        match damaged.into_iter().next() {
            // Each may be of another model or configuration, so nothing is set aside.
            Some((_, error)) => Err(error.into()),
            None => Ok(false),
        }
    }

    fn load(&mut self, dir: &Path) -> Result<(), LearnError> {
        let extra = self.learner.load(dir)?;
        self.progress = TrainProgress::from_json(extra, dir)?;
        self.adopt_baselines();
        self.share_learned();
        Ok(())
    }

    fn adopt_baselines(&mut self) {
        let (setup, baselines) = (self.setup, &mut self.progress.baselines);
        baselines.limit(|route, part| setup.routes.get(route)?.feedback(part)?.bounds());
    }

    /// Has the groups of a step that ended the process trained once more, and drops those of a second such
    /// step.
    fn examine_interrupted(&mut self) -> Result<(), TrainFailure> {
        let Some(attempt) = self.marker.read()? else { return Ok(()) };
        let (mut drops, mut suspects) = (Vec::new(), Vec::new());
        for id in attempt.groups {
            let group = self.setup.store.group(id)?;
            if group.is_none_or(|group| group.state != GroupState::Ready) {
                continue;
            }
            if attempt.repeated.contains(&id) {
                drops.push((id, INTERRUPTED.to_owned()));
            } else {
                suspects.push(id);
            }
        }
        if !suspects.is_empty() {
            tracing::warn!(
                groups = suspects.len(),
                "a step ended the process and is repeated once"
            );
            self.marker.suspects = suspects;
            // The marker stays, so that a start without a step in between finds the groups too.
            if drops.is_empty() {
                return Ok(());
            }
        }
        if !drops.is_empty() {
            let samples: Vec<String> = attempt.samples.iter().map(ToString::to_string).collect();
            let message = format!(
                "a step ended the process twice and is not repeated: {} groups are dropped, the \
                 longest sample has {} tokens; samples {}",
                drops.len(),
                attempt.longest,
                samples.join(", ")
            );
            tracing::error!("{message}");
            self.status.update(|s| s.last_error = Some(message));
        }
        self.drop_groups(drops)?;
        Ok(self.marker.clear()?)
    }

    /// Repeats what a crash after the last checkpoint prevented: the ledger's step record and the
    /// publication. Returns to the active version if the checkpoint does not lead to it.
    fn reconcile(&mut self) -> Result<TrainPhase, TrainFailure> {
        let (store, policies) = (&self.setup.store, &self.setup.policies);
        let step = self.learner.step_count();
        let recorded = store.last_step()?.map_or(0, |s| s.step);
        if let Some(record) = self.progress.last_step.clone()
            && recorded < step
        {
            store.commit_blocking(vec![Op::Step(Box::new(record))])?;
        }
        let active = policies.active();
        let versions = policies.list()?;
        let of_step = versions.iter().rev().find(|p| p.step == step && p.adapter.is_some());
        if self.activation.is_set() {
            self.hold();
            // The checkpoint may be older than the end of the publication, whose groups stay consumed.
            if let Some(policy) = of_step.filter(|policy| policy.state.was_promoted()) {
                self.progress.set_published(policy.version);
                self.keep_state(policy.version, step)?;
            }
            self.follow_active()?;
            return Ok(TrainPhase::Idle);
        }
        match of_step {
            Some(policy) if policy.version == active => {
                self.progress.set_published(active);
                self.keep_state(active, step)?;
            }
            // The same check would fail again.
            Some(policy)
                if policy.parent == Some(active)
                    && matches!(policy.state, PolicyState::Rejected | PolicyState::RolledBack)
                    && policy.checks.iter().any(|check| !check.passed) =>
            {
                let policy = policy.clone();
                self.return_groups(Some(&policy))?;
                self.reset_to_active()?;
                self.checkpoint()?;
            }
            // The end of the last process suspended it.
            Some(policy)
                if policy.parent == Some(active) && policy.state == PolicyState::Canary =>
            {
                return self.publish();
            }
            _ if self.progress.parent != active => {
                // A crash came between an operator's activation and the checkpoint that follows it.
                let record = versions.iter().find(|p| p.version == active);
                if record.is_some_and(is_activated) {
                    self.hold();
                }
                self.hold_after_recall()?;
                self.reset_to_active()?;
                self.checkpoint()?;
            }
            _ if self.progress.unpublished_steps >= self.setup.policy.publish_every => {
                return self.publish();
            }
            _ => {}
        }
        Ok(TrainPhase::Idle)
    }

    /// Returns the learner to the active version: its weights, and moments, baselines and adaptive weights if
    /// they were kept; those of another branch do not apply. The step count and the schedule continue.
    pub(super) fn reset_to_active(&mut self) -> Result<(), TrainFailure> {
        self.return_groups(None)?;
        let active = self.setup.policies.active();
        let state = self.state_dir(active);
        let mut restored = state.exists();
        if restored && let Err(error) = self.return_to(&state) {
            tracing::warn!(%error, version = %active, "the trainer's state of this version is lost");
            restored = false;
        }
        if !restored {
            let adapter = self.setup.policies.active_adapter()?;
            let (learner, pool) = (&mut self.learner, &self.pools.train);
            pool.install(|| learner.reset_to(adapter.as_deref()))?;
            self.progress.baselines = Baselines::default();
            self.progress.weights = AdaptiveWeights::default();
        }
        self.share_learned();
        self.progress.set_published(active);
        tracing::info!(version = %active, restored, "trainer continues from the active policy version");
        Ok(())
    }

    /// Makes the groups of the unpublished, undone steps ready again. Groups that a check rejected for the
    /// second time are dropped instead, unless it says nothing about them; too many rejections in a row pause
    /// training.
    pub(super) fn return_groups(
        &mut self,
        rejected: Option<&PolicyRecord>,
    ) -> Result<(), TrainFailure> {
        let groups = std::mem::take(&mut self.progress.unpublished_groups);
        let failed = rejected.and_then(|r| r.checks.iter().find(|check| !check.passed));
        // A disagreement of engine and trainer is not the samples' fault.
        let blames_groups = failed.is_some_and(|check| !check.name.starts_with("parity"));
        let (mut ready, mut drops) = (Vec::new(), Vec::new());
        for group in groups {
            let again = blames_groups && !self.progress.returned_groups.insert(group);
            if again {
                self.progress.returned_groups.remove(&group);
                drops.push((group, "rejected".to_owned()));
            } else {
                ready.push(Op::GroupState(group, GroupState::Ready));
            }
        }
        self.setup.store.commit_blocking(ready)?;
        self.drop_groups(drops)?;
        if let Some(record) = rejected {
            self.count_rejection(record.reason.as_deref().unwrap_or("unknown"));
        }
        Ok(())
    }

    /// Counts a version that was not promoted, or was rolled back; pauses training after too many.
    fn count_rejection(&mut self, last: &str) {
        self.progress.rejections += 1;
        let (count, limit) = (self.progress.rejections, self.setup.policy.max_rejections);
        if limit > 0 && count >= limit {
            let reason = format!(
                "{count} versions in a row were not promoted, the last one because of {last}"
            );
            tracing::error!(reason, "training pauses");
            let version = self.setup.policies.active();
            self.progress.hold = Some(Hold { version, until: None, reason: Some(reason) });
            self.progress.rejections = 0;
        }
    }

    fn return_to(&mut self, state: &Path) -> Result<(), TrainFailure> {
        let (learner, pool) = (&mut self.learner, &self.pools.train);
        let extra = pool.install(|| learner.return_to(state))?;
        let kept = TrainProgress::from_json(extra, state)?;
        self.progress.baselines = kept.baselines;
        self.adopt_baselines();
        self.progress.weights = kept.weights;
        Ok(())
    }

    /// The directory of the trainer's state right after `version` was trained.
    fn state_dir(&self, version: PolicyVersion) -> PathBuf {
        self.states().join(version_name(version))
    }

    fn states(&self) -> PathBuf {
        self.setup.checkpoints.join("versions")
    }

    /// Keeps the checkpoint of the step that made `version`, and deletes states of versions without files.
    pub(super) fn keep_state(&self, version: PolicyVersion, step: u64) -> Result<(), TrainFailure> {
        let from = checkpoint::step_dir(&self.setup.checkpoints, step);
        let to = self.state_dir(version);
        // An initial adapter has no step, and a restart finds what was kept before it.
        if !from.exists() || to.exists() {
            return Ok(());
        }
        checkpoint::keep(&from, &to)?;
        for state in checkpoint::entries(&self.states())? {
            if !self.setup.policies.has_files(state.file_name().unwrap_or_default()) {
                remove_any(&state).map_err(LearnError::from)?;
            }
        }
        Ok(())
    }

    fn hold(&mut self) {
        let version = self.setup.policies.active();
        let seconds = self.setup.policy.hold_seconds;
        let until = (seconds > 0).then(|| now_ms().saturating_add(1000 * seconds));
        self.progress.hold = Some(Hold { version, until, reason: None });
    }

    /// Pauses training if what came after the active version was found worse: learning does harm.
    fn hold_after_recall(&mut self) -> Result<bool, TrainFailure> {
        let active = self.setup.store.policy(self.setup.policies.active())?;
        let Some((version, reason)) =
            active.as_ref().and_then(|record| Some((record.version, recalled(record)?.to_owned())))
        else {
            return Ok(false);
        };
        tracing::error!(reason, "training pauses");
        self.progress.hold = Some(Hold { version, until: None, reason: Some(reason) });
        Ok(true)
    }

    /// Notices that an existing version was activated, which ends a publication in progress. After an
    /// operator's activation training pauses, and the weights follow later, because further activations may
    /// come. They follow at once if a warning withdrew the version before.
    pub(super) fn notice_activation(
        &mut self,
        phase: TrainPhase,
    ) -> Result<TrainPhase, TrainFailure> {
        let rollback = self.setup.policies.watch_rollback().borrow().clone();
        if rollback.count == self.activations {
            return Ok(phase);
        }
        // Its version is either already served or superseded.
        self.end_publication(phase)?;
        self.activations = rollback.count;
        if !rollback.by_operator {
            if !self.hold_after_recall()? {
                self.count_rejection("the active version was rolled back");
            }
            self.follow_active()?;
            return Ok(TrainPhase::Idle);
        }
        if !self.activation.is_set() {
            self.activation.set(b"")?;
        }
        self.hold();
        self.report();
        Ok(TrainPhase::Activated(Instant::now()))
    }

    /// Continues from the version that was activated last, if the weights do not follow it yet.
    pub(super) fn follow(&mut self, phase: TrainPhase) -> Result<TrainPhase, TrainFailure> {
        match self.notice_activation(phase)? {
            TrainPhase::Activated(_) => self.follow_active().map(|()| TrainPhase::Idle),
            phase => Ok(phase),
        }
    }

    pub(super) fn follow_active(&mut self) -> Result<(), TrainFailure> {
        self.reset_to_active()?;
        self.relearn()?;
        self.checkpoint()?;
        Ok(self.activation.clear()?)
    }

    /// Makes groups ready again that only versions after the active one learned from, if an operator wants that. Ratings of
    /// quarantined raters are left out of the batch that they are in.
    fn relearn(&self) -> Result<(), TrainFailure> {
        let store = &self.setup.store;
        let active = store.policy(self.setup.policies.active())?;
        let wanted = active.filter(|record| record.reason.as_deref() == Some(RELEARN));
        let Some(active) = wanted else { return Ok(()) };
        let mut ready = Vec::new();
        for StepRecord { step, groups, .. } in store.steps(active.step + 1, usize::MAX)? {
            for id in groups {
                let state = store.group(id)?.map(|group| group.state);
                if state == Some(GroupState::Trained(step)) {
                    ready.push(Op::GroupState(id, GroupState::Ready));
                }
            }
        }
        tracing::info!(groups = ready.len(), version = %active.version, "groups are learned from again");
        store.commit_blocking(ready)?;
        Ok(())
    }

    /// Writes a checkpoint of the learner and the progress, and deletes old ones.
    pub(super) fn checkpoint(&self) -> Result<(), TrainFailure> {
        let dir = checkpoint::step_dir(&self.setup.checkpoints, self.learner.step_count());
        self.pools.train.install(|| self.learner.save(&dir, &self.progress))?;
        Ok(checkpoint::prune(&self.setup.checkpoints, KEPT_CHECKPOINTS)?)
    }
}

const INTERRUPTED: &str = "interrupted";
