//! The native sampler, with or without a serving engine.

use std::sync::Arc;

use anyhow::Context;
use candle_core::Device;

use hone_core::metrics::Metrics;
use hone_core::threads::BackgroundPriority;
use hone_engine::{Codec, Engine, ModelDir, Publisher};
use hone_mistral::MistralEngine;
use hone_model::{Model, ModelSpec};
use hone_sampler::{BatchedEngine, BatchedPublisher, LiveTraffic, SamplerConfig};

use crate::config::Config;

/// Number of concurrent sequences if `rollout.max_concurrent` is 0.
const SLOTS: usize = 64;

/// The number of sequences that the native sampler computes at once.
pub(super) fn slots(config: &Config) -> usize {
    match config.rollout.max_concurrent {
        0 => SLOTS,
        slots => slots,
    }
}

/// The native sampler and the weights that it shares with the trainer.
pub(super) struct RolloutSampler {
    pub base: Model,
    pub engine: Arc<BatchedEngine>,
}

impl RolloutSampler {
    /// Loads the base model and starts the sampler on it. The sampler yields while `serving` has
    /// requests.
    pub async fn start(
        config: &Config,
        dir: &ModelDir,
        serving: Option<&Arc<MistralEngine>>,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let (spec, files) = (ModelSpec::from_config(&dir.config)?, dir.weights.clone());
        let dtype = config.train.base_dtype;
        let load = move || Model::load(spec, &files, dtype, &Device::Cpu);
        let base = tokio::task::spawn_blocking(load).await?.context("the sampler's weights")?;
        let mut native = SamplerConfig {
            name: dir.name.clone(),
            context: dir.context(),
            slots: slots(config),
            max_batch_tokens: config.rollout.max_batch_tokens,
            ..SamplerConfig::default()
        };
        if config.train.priority != BackgroundPriority::Normal {
            // The operating system's scheduler already prefers the serving threads.
            native.busy_share = 1.0;
        }
        if config.train.threads > 0 {
            native.threads = config.train.threads;
        }
        let clients = serving.cloned();
        let busy: LiveTraffic = Arc::new(move || {
            let load = clients.as_ref().map(|clients| clients.load()).unwrap_or_default();
            load.live_running + load.live_waiting > 0
        });
        let codec = match serving {
            Some(serving) => Arc::clone(serving.codec()),
            None => Arc::new(Codec::load(dir)?),
        };
        let engine = BatchedEngine::start(&base, codec, native, busy, metrics)
            .context("rollout.sampler: the native sampler")?;
        Ok(Self { base, engine })
    }

    /// Publishes versions to the sampler and to the serving engine.
    pub fn publisher(&self, serving: Option<&Arc<MistralEngine>>) -> Arc<BatchedPublisher> {
        let serving = serving.cloned().map(|serving| serving as Arc<dyn Publisher>);
        Arc::new(BatchedPublisher::new(serving, Arc::clone(&self.engine)))
    }
}
