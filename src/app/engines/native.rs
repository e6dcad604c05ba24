//! The native engine: its settings for each purpose, and the weights that it shares with the trainer.

use std::sync::Arc;

use anyhow::Context;
use candle_core::Device;

use hone_core::config::Compute;
use hone_core::metrics::Metrics;
use hone_core::threads::BackgroundPriority;
use hone_engine::{Codec, ModelDir};
use hone_model::{Model, ModelSpec};
use hone_sampler::{BatchedEngine, LiveTraffic, SamplerConfig};

use crate::config::Config;

/// Sequences that a judge's engine runs at once.
const JUDGE_SLOTS: usize = 16;

/// Positions of the cache of a judge's engine, unless `rollout.max_batch_tokens` is less.
const JUDGE_POSITIONS: usize = 8192;

/// Requests that wait for a judge. Rewards are computed in the background and have no deadline.
pub(super) const JUDGE_QUEUE: usize = 4096;

/// What a native engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::app) enum NativePurpose {
    /// Answers clients, and samples for the trainer in the same batches.
    Serving,
    /// Samples for the trainer, beside another engine that has the clients or without clients.
    Sampling,
    /// Answers a judge's questions with the base model.
    Judging,
}

impl NativePurpose {
    /// Sequences that the engine runs at once.
    pub fn slots(self, config: &Config) -> usize {
        match (self, config.rollout.max_concurrent) {
            (Self::Judging, _) => JUDGE_SLOTS,
            (Self::Sampling, slots @ 1..) => slots,
            (Self::Sampling, 0) | (Self::Serving, _) => config.engine.slots,
        }
    }

    /// Positions of the engine's cache of keys and values.
    pub fn cache_positions(self, config: &Config) -> usize {
        let positions = config.rollout.max_batch_tokens;
        if self == Self::Judging { positions.min(JUDGE_POSITIONS) } else { positions }
    }

    /// Adapters of the versions that the engine answers with, without the one that is being staged. With
    /// clients, the version before the active one, or a canary, still answers requests.
    pub fn versions(self) -> usize {
        match self {
            Self::Serving => 2,
            Self::Sampling => 1,
            Self::Judging => 0,
        }
    }

    /// Adapters that the engine keeps in memory. A sampler keeps the active one, which another engine loads
    /// later.
    pub fn kept_versions(self, config: &Config) -> usize {
        match self {
            Self::Serving => config.engine.kept_versions,
            Self::Sampling => 1,
            Self::Judging => 0,
        }
    }

    /// The engine's settings.
    pub fn settings(self, config: &Config, dir: &ModelDir) -> SamplerConfig {
        let mut settings = SamplerConfig {
            name: dir.name.clone(),
            context: dir.context(),
            slots: self.slots(config),
            max_batch_tokens: self.cache_positions(config),
            share_prefixes: config.engine.share_prefixes,
            kept_adapters: self.kept_versions(config),
            serves_clients: self == Self::Serving,
            ..SamplerConfig::default()
        };
        let limits = config.engine.queue_limits();
        match self {
            Self::Serving => {
                settings.queue = limits.places;
                settings.background_share = config.train.serving_share;
            }
            Self::Sampling => {}
            Self::Judging => settings.queue = JUDGE_QUEUE,
        }
        if self != Self::Judging {
            // Beside mistral.rs it answers clients of a canary, and after a rollback.
            settings.queue_timeout = limits.timeout;
        }
        if self == Self::Serving {
            // `train.threads` bounds what learning takes, not what clients get.
            return settings;
        }
        if config.train.priority != BackgroundPriority::Normal {
            // The operating system's scheduler already prefers the serving threads.
            settings.busy_share = 1.0;
        }
        if config.train.threads > 0 {
            settings.threads = config.train.threads;
        }
        settings
    }
}

/// Loads the frozen weights, which native engines and the trainer share.
pub(in crate::app) async fn load_base(config: &Config, dir: &ModelDir) -> anyhow::Result<Model> {
    let (spec, files) = (ModelSpec::from_config(&dir.config)?, dir.weights.clone());
    let options = config.load_options();
    let load = move || Model::load(spec, &files, options, &Device::Cpu);
    tokio::task::spawn_blocking(load).await?.context("the weights of the native engine")
}

/// Starts an engine on loaded weights. It yields while `busy` returns true.
pub(in crate::app) fn start_native(
    config: &Config,
    dir: &ModelDir,
    base: &Model,
    codec: Arc<Codec>,
    purpose: NativePurpose,
    busy: LiveTraffic,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Arc<BatchedEngine>> {
    let settings = purpose.settings(config, dir);
    let compute = config.engine.compute;
    let model = base.clone().with_compute(compute);
    let engine = BatchedEngine::start(&model, codec, settings, busy, metrics);
    let engine = engine.context("the native engine")?;
    if compute == Compute::Bf16 && engine.dtype() != "bf16" {
        let dtype = engine.dtype();
        tracing::warn!(
            dtype,
            "engine.compute = \"bf16\" has no effect: it needs weights that are stored in bf16, Linux, and \
             AMD's processor from Zen 4 on"
        );
    }
    Ok(engine)
}
