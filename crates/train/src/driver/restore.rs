//! Recovery: from a checkpoint after a start, and to the version that an operator activated.

use std::path::Path;

use tokio::runtime::Handle;

use hone_core::files::at;
use hone_core::types::{PolicyState, PolicyVersion};
use hone_model::ModelSpec;
use hone_store::Op;

use super::error::TrainFailure;
use super::progress::TrainProgress;
use super::setup::{ThreadPools, TrainSetup};
use super::skipped::SkipLog;
use super::status::StatusCell;
use super::trainer::Trainer;
use crate::error::{LearnError, Result as LearnResult};
use crate::learning::checkpoint;
use crate::learning::learner::Learner;
use crate::memory::BaseMemory;
use crate::memory::memory_check::{self, available_memory};

impl<'a> Trainer<'a> {
    /// Loads the model and the newest checkpoint and reconciles them with the ledger.
    pub(super) fn restore(
        setup: &'a TrainSetup,
        status: &'a StatusCell,
        runtime: &'a Handle,
        pools: &'a ThreadPools,
    ) -> Result<Self, TrainFailure> {
        check_memory(setup, pools.train.current_num_threads())?;
        let learner = pools.train.install(|| match &setup.base {
            Some(base) => Learner::with_model(base.clone(), &setup.config),
            None => Learner::new(&setup.model, &setup.config),
        })?;
        let mut trainer = Self {
            setup,
            status,
            runtime,
            pools,
            learner,
            progress: TrainProgress::new(setup.config.baseline_window),
            publication: None,
            rollbacks: setup.policies.watch_rollback().borrow().count,
            feedback_times: Vec::new(),
            skip_log: SkipLog::default(),
        };
        let saved = checkpoint::latest(&setup.checkpoints)?;
        if let Some(dir) = &saved {
            let extra = trainer.learner.load(dir)?;
            trainer.progress =
                serde_json::from_value(extra).map_err(|error| json_error(dir, error))?;
            trainer.progress.baselines.set_window(setup.config.baseline_window);
        }
        trainer.reconcile()?;
        // An adapter to start from is published before the first step, because the base's samples
        // are not samples of the adapter.
        let has_adapter = !setup.config.lora.init_adapter.as_os_str().is_empty();
        let is_new = saved.is_none() && setup.policies.active() == PolicyVersion::BASE;
        if has_adapter && is_new {
            trainer.publish()?;
        }
        trainer.report();
        Ok(trainer)
    }

    /// Repeats what a crash after the last checkpoint prevented: the ledger's step record and the
    /// publication. Returns to the active version if the checkpoint does not lead to it.
    fn reconcile(&mut self) -> Result<(), TrainFailure> {
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
        match of_step {
            Some(policy) if policy.version == active => {
                self.progress.set_published(active);
                Ok(())
            }
            // The parity gate would reject the same weights again.
            Some(policy)
                if policy.state == PolicyState::Rejected
                    && policy.parent == Some(active)
                    && policy.metrics.contains_key("parity_logprob_difference") =>
            {
                self.reset_to_active()
            }
            _ if self.progress.parent != active => self.reset_to_active(),
            _ if self.progress.unpublished_steps >= self.setup.publish_every => self.publish(),
            _ => Ok(()),
        }
    }

    /// Gives the learner the active version's weights. Optimizer moments start from zero; the step
    /// count and the schedule continue.
    pub(super) fn reset_to_active(&mut self) -> Result<(), TrainFailure> {
        let active = self.setup.policies.active();
        let adapter = self.setup.policies.active_adapter()?;
        let (learner, pool) = (&mut self.learner, &self.pools.train);
        pool.install(|| learner.reset_to(adapter.as_deref()))?;
        self.progress.set_published(active);
        tracing::info!(version = %active, "trainer continues from the active policy version");
        Ok(())
    }

    /// Whether an operator activated a version that the weights do not follow yet.
    pub(super) fn has_new_rollback(&self) -> bool {
        self.setup.policies.watch_rollback().borrow().count != self.rollbacks
    }

    /// Continues from a version that an operator activated, if there is one.
    pub(super) fn follow_rollback(&mut self) -> Result<(), TrainFailure> {
        let count = self.setup.policies.watch_rollback().borrow().count;
        if count != self.rollbacks {
            // Versions are exchanged one at a time, so a publication in progress is either already
            // served or superseded.
            self.finish_publish()?;
            self.rollbacks = count;
            self.reset_to_active()?;
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Writes a checkpoint of the learner and the progress, and deletes old ones.
    pub(super) fn checkpoint(&self) -> Result<(), TrainFailure> {
        let dir = checkpoint::step_dir(&self.setup.checkpoints, self.learner.step_count());
        let extra =
            serde_json::to_value(&self.progress).map_err(|error| json_error(&dir, error))?;
        self.learner.save(&dir, &extra)?;
        Ok(checkpoint::prune(&self.setup.checkpoints, self.setup.config.keep_checkpoints)?)
    }
}

/// Adds the checkpoint's path to an error of the progress in it.
fn json_error(checkpoint: &Path, error: serde_json::Error) -> LearnError {
    at(checkpoint)(error.into()).into()
}

/// Refuses a run that does not fit in the available memory, before the model is loaded.
fn check_memory(setup: &TrainSetup, threads: usize) -> LearnResult<()> {
    let Some(available) = available_memory() else { return Ok(()) };
    let spec = ModelSpec::from_config(&setup.model.config).map_err(LearnError::from)?;
    let base = BaseMemory::read(&spec, &setup.model.weights, setup.config.base_dtype)?;
    memory_check::check_memory(&spec, base, &setup.config, threads, available, setup.base.is_some())
}
