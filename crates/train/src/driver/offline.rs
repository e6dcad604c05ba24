//! Training on groups that another process recorded, without an engine. A step is that of the live trainer, but
//! the caller chooses the groups, every sample has the weight of late feedback, and nothing is durable before
//! [`OfflineTrainer::save`].

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rayon::ThreadPool;

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, StepRecord, now_ms};
use hone_engine::ModelDir;
use hone_model::device::CudaDevice;
use hone_model::weights::LoadOptions;
use hone_reward::Routes;
use hone_store::{Op, Store};

use super::progress::TrainProgress;
use super::report::{SkippedBatch, collect};
use super::{ThreadPools, TrainFailure};
use crate::config::TrainConfig;
use crate::data::batch_builder::TrainBatch;
use crate::data::{RecordedGroup, RecordedSample, feedback_cap};
use crate::error::{LearnError, Result as LearnResult};
use crate::learning::checkpoint;
use crate::learning::learner::Learner;
use crate::learning::map_shards;
use crate::policy::{base_record, relative_dir, write_version};

/// A version that no sample has, so that no recorded log-probability has to equal the trainer's.
const NO_VERSION: u64 = u64::MAX;

/// What an [`OfflineTrainer`] trains, and how.
pub struct OfflineSetup {
    /// The keys of `[train]`.
    pub config: TrainConfig,
    /// Token limit of a completion, the divisor of the `dr_grpo` loss.
    pub max_completion_tokens: usize,
    /// The base model's directory.
    pub model: ModelDir,
    /// How the base model's weights are held in memory.
    pub load: LoadOptions,
    /// The longest sample in tokens, prompt and completion together, for which there is memory.
    pub longest_sample: usize,
    /// The GPU that computes the passes of steps; `None` is the processor.
    pub device: Option<CudaDevice>,
    /// The routes, which define the weight of each reward part.
    pub routes: Arc<Routes>,
    /// The process's metrics.
    pub metrics: Arc<Metrics>,
}

/// A learner that takes steps on recorded groups.
pub struct OfflineTrainer {
    setup: OfflineSetup,
    pool: ThreadPool,
    learner: Learner,
    progress: TrainProgress,
    /// The records of all steps, oldest first.
    pub records: Vec<StepRecord>,
    /// Number of samples that steps left out because the policy has moved too far away, once for each step.
    pub left_out: u64,
}

impl OfflineTrainer {
    /// Loads the model, and starts from a fresh adapter or from `train.lora.init_adapter`.
    ///
    /// # Errors
    /// If the model or the adapter cannot be read or trained.
    pub fn new(setup: OfflineSetup) -> Result<Self, TrainFailure> {
        let ThreadPools { train: pool, .. } = ThreadPools::new(setup.config.threads)?;
        let mut learner = pool.install(|| Learner::new(&setup.model, setup.load, &setup.config))?;
        learner.set_longest_shard(setup.longest_sample);
        if let Some(device) = &setup.device {
            let (model, compute) = (learner.model(), setup.config.compute);
            let base =
                device.load(model, compute, setup.model.context()).map_err(LearnError::from)?;
            learner.use_device(&base, setup.longest_sample)?;
        }
        let progress = TrainProgress::default();
        Ok(Self { setup, pool, learner, progress, records: Vec::new(), left_out: 0 })
    }

    /// One optimizer step on groups. The inner error is why there was none: the weights are as before.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn step(
        &mut self,
        groups: &[&RecordedGroup],
    ) -> Result<Result<StepRecord, String>, TrainFailure> {
        let started = Instant::now();
        let OfflineSetup { routes, metrics, config, .. } = &self.setup;
        let groups = groups.iter().map(|group| group.batch.clone()).collect();
        let mut batch = TrainBatch { groups, ..TrainBatch::default() };
        feedback_cap::cap(&mut batch, routes, Some(metrics));
        let (progress, base) = (&mut self.progress, self.learner.model());
        self.pool.install(|| progress.learned.learn(routes, base, &batch))?;
        let prepared = progress.prepare(batch, routes, config, 0.0);
        let (learner, samples) = (&mut self.learner, &prepared.samples);
        let max_tokens = self.setup.max_completion_tokens;
        let stats = self.pool.install(|| learner.step(samples, NO_VERSION, max_tokens));
        let stats = match stats {
            Ok(stats) => stats,
            Err(error @ LearnError::Sample { .. }) => return Ok(Err(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        self.left_out += stats.faded.len() as u64;
        if let Some(reason) = stats.skipped {
            return Ok(Err(SkippedBatch::of(&prepared, reason).message));
        }
        let weights = &mut self.progress.weights;
        weights.observe(routes, &prepared.batch);
        let elapsed = started.elapsed();
        let mut metrics = collect(stats.metrics, &prepared, weights, elapsed);
        // The versions are those of another ledger.
        metrics.remove("staleness_versions");
        let step = self.learner.step_count();
        // The groups are in another ledger, too.
        let record = StepRecord { step, groups: Vec::new(), metrics, created: now_ms() };
        self.progress.baselines = prepared.baselines;
        self.progress.add_step(record.clone());
        self.records.push(record.clone());
        Ok(Ok(record))
    }

    /// Natural-log probability of each sampled token under the policy that would be served, sample by
    /// sample.
    ///
    /// # Errors
    /// If a sample is malformed or a tensor operation fails.
    pub fn score(&self, samples: &[RecordedSample<'_>]) -> Result<Vec<Vec<f32>>, TrainFailure> {
        let policy = self.learner.snapshot()?;
        let score = |RecordedSample { sample, .. }: &RecordedSample<'_>| {
            policy.score(&sample.prompt_ids, &sample.ids, sample.temperature)
        };
        let scored = self.pool.install(|| map_shards(self.learner.spec(), samples, score));
        Ok(scored.into_iter().collect::<LearnResult<_>>()?)
    }

    /// Writes what a data directory of `hone train` has: the checkpoint of the last step, the adapter as
    /// policy version 1, and in `store` the steps and the version, which is the active one. `None`
    /// without a step.
    ///
    /// # Errors
    /// If a file or the ledger cannot be written.
    pub fn save(
        &mut self,
        data: &Path,
        store: &Store,
    ) -> Result<Option<PolicyRecord>, TrainFailure> {
        let Some(last) = self.records.last() else { return Ok(None) };
        let version = PolicyVersion(1);
        let base = PolicyRecord { state: PolicyState::Retired, ..base_record() };
        let mut record = PolicyRecord {
            version,
            parent: Some(PolicyVersion::BASE),
            step: last.step,
            adapter: Some(relative_dir(version)),
            metrics: last.metrics.clone(),
            state: PolicyState::Active,
            ..base.clone()
        };
        let checkpoints = data.join("checkpoints");
        let dir = checkpoint::step_dir(&checkpoints, last.step);
        self.progress.set_published(version);
        self.learner.save(&dir, &self.progress)?;
        let (policy, name) = (self.learner.snapshot()?, &self.setup.model.name);
        let adapter = data.join(relative_dir(version));
        record.sha256 = Some(write_version(&adapter, |new| policy.write(new, name), &record)?);
        let steps = self.records.iter().map(|step| Op::Step(Box::new(step.clone())));
        let mut ops = vec![Op::Policy(Box::new(base))];
        ops.extend(steps);
        ops.push(Op::Policy(Box::new(record.clone())));
        store.commit_blocking(ops)?;
        Ok(Some(record))
    }
}
