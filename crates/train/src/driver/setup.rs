//! The inputs of the trainer: settings, model, ledger and thread pools.

use std::path::PathBuf;
use std::sync::Arc;

use rayon::ThreadPool;

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_engine::ModelDir;
use hone_model::Model;
use hone_reward::Routes;
use hone_store::Store;

use super::error::TrainFailure;
use crate::config::TrainConfig;
use crate::policy::{Policies, PolicyConfig};

/// Everything that the trainer's thread needs.
pub struct TrainSetup {
    /// The keys of `[train]`.
    pub config: TrainConfig,
    /// The keys of `[policy]` that decide when a version is published and when training pauses.
    pub policy: PolicyConfig,
    /// The last step to take until [`TrainHandle::set_step_limit`] changes it; `None` is no limit.
    ///
    /// [`TrainHandle::set_step_limit`]: crate::TrainHandle::set_step_limit
    pub step_limit: Option<u64>,
    /// Peak learning rates of a curriculum: `(first step, rate)` in ascending order, steps counted
    /// from 1. `train.learning_rate` applies before the first entry.
    pub peak_rates: Vec<(u64, f64)>,
    /// Token limit of a completion, the divisor of the `dr_grpo` loss.
    pub max_completion_tokens: usize,
    /// The base model's directory.
    pub model: ModelDir,
    /// The longest sample, and shard, in tokens that a step may compute, from
    /// [`MemoryPlanner::longest_sample`](crate::memory::MemoryPlanner::longest_sample).
    pub longest_sample: usize,
    /// Whether no client's request runs or waits, for `train.when = "idle"`.
    pub is_idle: Arc<dyn Fn() -> bool + Send + Sync>,
    /// The base model's weights if they are already loaded, so that they are not loaded twice.
    pub base: Option<Model>,
    /// The base model's name, written to `base_model_name_or_path` of each adapter.
    pub model_name: String,
    /// The directory that holds the checkpoints.
    pub checkpoints: PathBuf,
    /// The ledger, source of ready groups and destination of step records.
    pub store: Store,
    /// The routes, which define the weight of each reward part.
    pub routes: Arc<Routes>,
    /// The registry that new versions are published to.
    pub policies: Arc<Policies>,
    /// The process's Prometheus metrics.
    pub metrics: Arc<Metrics>,
}

impl TrainSetup {
    /// The peak learning rate of the schedule at `step`, counted from 1, for a model with so many parameters.
    pub(super) fn peak_rate(&self, step: u64, parameters: usize) -> f64 {
        let stage = self.peak_rates.iter().rev().find(|(first, _)| *first <= step);
        let usual = || self.config.learning_rate.of(parameters);
        stage.map_or_else(usual, |(_, rate)| *rate)
    }
}

/// The thread pools of the trainer. Usually only one of them is busy.
pub(super) struct ThreadPools {
    /// Computes steps.
    pub(super) train: ThreadPool,
    /// Scores the parity probe of a publication, which must not wait for the next step.
    pub(super) probe: Arc<ThreadPool>,
}

impl ThreadPools {
    /// Two pools of `threads` threads each; 0 is one per core.
    pub(super) fn new(threads: usize) -> Result<Self, TrainFailure> {
        let pool = |name: &'static str| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |i| format!("hone-{name}-{i}"))
                .start_handler(|_| to_background())
                .build()
        };
        Ok(Self { train: pool("train")?, probe: Arc::new(pool("probe")?) })
    }
}
