//! The engines of a process. [`EnginesNeeded`] selects them; [`Engines::start`] starts and connects them.

mod judge;
mod mistral;
mod native;
mod needed;

use std::path::Path;
use std::sync::Arc;

use hone_core::metrics::Metrics;
use hone_engine::{Codec, Engine, ModelDir, Publisher};
use hone_model::Model;
use hone_sampler::{BatchedEngine, BatchedPublisher};

use crate::config::Config;
use crate::usage;

use mistral::start_mistral;

pub(super) use judge::SelfJudge;
pub(super) use native::{NativePurpose, load_base, start_native};
pub(super) use needed::EnginesNeeded;

/// The engines, and the weights that the native one shares with the trainer.
pub(super) struct Engines {
    /// Answers clients. Without clients it is the engine of the evaluations.
    pub live: Arc<dyn Engine>,
    /// Samples for the trainer, and answers the exam of the gate.
    pub rollouts: Arc<dyn Engine>,
    /// Publishes versions to all of them.
    pub publisher: Arc<dyn Publisher>,
    /// The weights of the native engine, if it runs.
    pub base: Option<Model>,
    native: Option<Arc<BatchedEngine>>,
}

impl Engines {
    /// Starts the engines of `hone serve`, or without clients of `hone train` and `hone eval`.
    pub async fn start(
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        has_clients: bool,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let mut config = config.clone();
        if !has_clients {
            // A run waits as long as it takes.
            config.engine.queue_timeout_seconds = 0;
        }
        let config = &config;
        let needed = EnginesNeeded::of(config, has_clients);
        needed.check(config, dir).map_err(usage)?;
        let purpose = needed.native_purpose(has_clients);
        let engines = match (needed.has_mistralrs(), purpose) {
            (true, Some(purpose)) => Self::both(config, dir, data, purpose, metrics).await?,
            (false, Some(purpose)) => Self::native(config, dir, purpose, metrics).await?,
            (_, None) => Self::mistral(config, dir, data, metrics).await?,
        };
        tracing::info!(engines = ?needed, slots = engines.live.info().slots, "engines started");
        Ok(engines)
    }

    /// mistral.rs for clients and the trainer.
    async fn mistral(
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let serving = start_mistral(&config.engine, dir, data, Arc::clone(metrics)).await?;
        Ok(Self {
            live: serving.clone(),
            rollouts: serving.clone(),
            publisher: serving,
            base: None,
            native: None,
        })
    }

    /// mistral.rs for clients, and the native engine for the trainer, which yields to it. The native
    /// engine also answers canaries, and clients after a rollback until mistral.rs has loaded the version.
    async fn both(
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        purpose: NativePurpose,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let serving = start_mistral(&config.engine, dir, data, Arc::clone(metrics)).await?;
        let base = load_base(config, dir).await?;
        let clients = Arc::clone(&serving);
        let busy = Arc::new(move || {
            let load = clients.load();
            load.live_running + load.live_waiting > 0
        });
        let (codec, metrics) = (Arc::clone(serving.codec()), Arc::clone(metrics));
        let native = start_native(config, dir, &base, codec, purpose, busy, metrics)?;
        let publisher = BatchedPublisher::new(Some(serving.clone()), Arc::clone(&native));
        Ok(Self {
            live: Arc::new(publisher.live_engine(serving)),
            rollouts: native.clone(),
            publisher: Arc::new(publisher),
            base: Some(base),
            native: Some(native),
        })
    }

    /// The native engine for everything.
    async fn native(
        config: &Config,
        dir: &ModelDir,
        purpose: NativePurpose,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let base = load_base(config, dir).await?;
        let codec = Arc::new(Codec::load(dir)?);
        // Clients are in its own batch, where they go first.
        let (busy, metrics) = (Arc::new(|| false), Arc::clone(metrics));
        let native = start_native(config, dir, &base, codec, purpose, busy, metrics)?;
        Ok(Self {
            live: native.clone(),
            rollouts: native.clone(),
            publisher: Arc::new(BatchedPublisher::new(None, Arc::clone(&native))),
            base: Some(base),
            native: Some(native),
        })
    }

    /// Ends what the native engine still generates, and refuses new requests. Clients have had their
    /// grace period. The requests of mistral.rs end with their readers.
    pub fn close(&self) {
        if let Some(native) = &self.native {
            native.close(true);
        }
    }
}
