//! The native sampler beside the serving engine, where the configuration asks for one.

use std::sync::Arc;

use anyhow::Context;
use candle_core::Device;

use crate::config::{BackgroundPriority, Config};
use crate::engine::{Engine, MistralEngine, ModelDir, Publisher};
use crate::native::{Both, Busy, NativeConfig, NativeEngine};
use crate::telemetry::Metrics;
use crate::train::{Model, ModelSpec};

/// Sequences at once where `rollout.max_concurrent` leaves it open.
const SLOTS: usize = 64;

/// The native sampler and the weights that it shares with the trainer.
pub(super) struct Sampler {
    pub base: Model,
    pub engine: Arc<NativeEngine>,
}

impl Sampler {
    /// Loads the base and starts the sampler on it; `None` where the serving engine samples.
    pub async fn start(
        config: &Config,
        dir: &ModelDir,
        serving: &Arc<MistralEngine>,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Option<Self>> {
        if !(config.rollout.enabled && config.rollout.sampler.is_native(true)) {
            return Ok(None);
        }
        let (spec, files) = (ModelSpec::from_config(&dir.config)?, dir.weights.clone());
        let load = move || Model::load(spec, &files, &Device::Cpu);
        let base = tokio::task::spawn_blocking(load).await?.context("the sampler's weights")?;
        let mut native = NativeConfig {
            name: serving.info().name.clone(),
            context: serving.info().context,
            slots: SLOTS,
            max_batch_tokens: config.rollout.max_batch_tokens,
            ..NativeConfig::default()
        };
        if config.train.priority != BackgroundPriority::Normal {
            // Its threads give way by themselves.
            native.busy_share = 1.0;
        }
        if config.rollout.max_concurrent > 0 {
            native.slots = config.rollout.max_concurrent;
        }
        if config.train.threads > 0 {
            native.threads = config.train.threads;
        }
        let clients = Arc::clone(serving);
        let busy: Busy = Arc::new(move || {
            let load = clients.load();
            load.live_running + load.live_waiting > 0
        });
        let codec = Arc::clone(serving.codec());
        let engine = NativeEngine::start(&base, codec, native, busy, metrics)
            .context("rollout.sampler: the native sampler")?;
        Ok(Some(Self { base, engine }))
    }

    /// What versions are published with: to the serving engine, and to the sampler where there is
    /// one.
    pub fn publisher(sampler: Option<&Self>, serving: &Arc<MistralEngine>) -> Arc<dyn Publisher> {
        let serving: Arc<dyn Publisher> = serving.clone();
        match sampler {
            Some(sampler) => Arc::new(Both::new(serving, Arc::clone(&sampler.engine))),
            None => serving,
        }
    }
}
