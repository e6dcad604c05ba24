//! [`Engine`] on the batched decoder.

mod adapters;
mod policy;
mod publisher;
mod scheduler;
mod shared;

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use async_trait::async_trait;
use candle_core::{DType, Device};
use tokio::sync::{Semaphore, oneshot};

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_core::types::PolicyVersion;
use hone_cuda::DeviceSampler;
use hone_engine::admission::Owner;
use hone_engine::run::CancelReason;
use hone_engine::sampling::TokenSampler;
use hone_engine::{
    Codec, Engine, EngineError, EngineLoad, GenerateRequest, Generation, ModelInfo, Priority, run,
};
use hone_model::adapter::peft;
use hone_model::adapter::weights::LoraWeights;
use hone_model::{Model, ModelSpec};

use crate::capacity::SamplerCapacity;
use crate::config::{LiveTraffic, SamplerConfig};
use crate::decoder::Decoder;
use crate::device::{DeviceDecoder, PassDecoder};
use crate::error::SamplerError;
use crate::weights::AdapterWeights;

use adapters::{AdapterFiles, PolicyWeights};
pub use policy::PolicyEngine;
pub use publisher::{BatchedPublisher, BridgedEngine};
use scheduler::BatchScheduler;
use shared::{EngineShared, EngineState, PolicySlot, QueuedRequest, RequestWeights};

/// Samples many sequences at once on its own threads. Dropping it cancels all sequences.
pub struct BatchedEngine {
    info: ModelInfo,
    spec: ModelSpec,
    /// The type of activations in products. The tolerance of the gate's parity check depends on it.
    dtype: &'static str,
    /// Whether adapters go to slots on a device.
    is_on_device: bool,
    shared: Arc<EngineShared>,
    queue: Arc<Semaphore>,
    thread: Option<JoinHandle<()>>,
}

impl BatchedEngine {
    /// Starts an engine that serves the base model as version 0.
    ///
    /// # Errors
    /// If the model's weights cannot be read in place, a setting is out of range, or the thread cannot
    /// be started.
    pub fn start(
        model: &Model,
        codec: Arc<Codec>,
        config: SamplerConfig,
        live_traffic: LiveTraffic,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, SamplerError> {
        let decoder = Decoder::new(model)?.into();
        let engine = Self::without_thread(&decoder, codec, config, live_traffic, metrics)?;
        engine.with_thread(decoder)
    }

    /// Starts an engine that serves the base model as version 0 on a device: a model of this specification, and a sampler
    /// with at least the [limits](SamplerConfig::device_limits) of these settings. Adapters must be on linear layers of
    /// the sampler's layout, with at most its ranks.
    ///
    /// Keys, values and log-probabilities depend a little on whether a token was decoded or part of a prompt, and on
    /// the number of rows of a pass.
    ///
    /// # Errors
    /// If the sampler has room for less, a setting is out of range, or the thread cannot be started.
    pub fn start_on_device(
        spec: ModelSpec,
        sampler: DeviceSampler,
        codec: Arc<Codec>,
        config: SamplerConfig,
        live_traffic: LiveTraffic,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, SamplerError> {
        let device = DeviceDecoder::new(spec, sampler, &config)?;
        let decoder = PassDecoder::Device(Box::new(device));
        let engine = Self::without_thread(&decoder, codec, config, live_traffic, metrics)?;
        engine.with_thread(decoder)
    }

    fn with_thread(mut self, decoder: PassDecoder) -> Result<Arc<Self>, SamplerError> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new()
            .name("hone-native".to_owned())
            .spawn(move || run_scheduler(shared, decoder))
            .map_err(SamplerError::Thread)?;
        self.thread = Some(thread);
        Ok(Arc::new(self))
    }

    /// An engine for this decoder, whose scheduler does not run yet.
    fn without_thread(
        decoder: &PassDecoder,
        codec: Arc<Codec>,
        config: SamplerConfig,
        live_traffic: LiveTraffic,
        metrics: Arc<Metrics>,
    ) -> Result<Self, SamplerError> {
        let spec = decoder.spec().clone();
        let capacity = SamplerCapacity::new(&config)?;
        let (dtype, is_on_device) = (decoder.dtype(), matches!(decoder, PassDecoder::Device(_)));
        let info = ModelInfo {
            name: config.name.clone(),
            context: config.context,
            vocab: spec.vocab_size,
            slots: config.slots,
        };
        let queue = Arc::new(Semaphore::new(config.queue.clamp(1, Semaphore::MAX_PERMITS)));
        let live_arrived = AtomicBool::new(false);
        let shared = Arc::new(EngineShared {
            state: Mutex::new(EngineState::new(config.kept_adapters)),
            wake: Condvar::new(),
            live_arrived,
            codec,
            metrics,
            config,
            capacity,
            live_traffic,
        });
        Ok(Self { info, spec, dtype, is_on_device, shared, queue, thread: None })
    }

    /// The type of the activations that weights are multiplied with: `"f32"`, `"bf16"`, or `"i16"` with quantized
    /// weights.
    pub fn dtype(&self) -> &'static str {
        self.dtype
    }

    /// Copies an adapter and activates it for new sequences. Running sequences keep their version.
    /// `None` is the base model.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn publish(
        &self,
        version: PolicyVersion,
        lora: Option<&LoraWeights>,
    ) -> Result<(), SamplerError> {
        self.activate(PolicySlot::default(), self.copied(version, lora)?);
        Ok(())
    }

    /// A copy of an adapter, or the base model.
    fn copied(
        &self,
        version: PolicyVersion,
        lora: Option<&LoraWeights>,
    ) -> Result<PolicyWeights, SamplerError> {
        let adapter = lora.map(|lora| self.copy(lora)).transpose()?;
        Ok(PolicyWeights::new(version, adapter))
    }

    /// Refuses new requests, ends the queued ones and cancels running shadow sequences. With
    /// `cancel_live`, cancels live sequences too.
    pub fn close(&self, cancel_live: bool) {
        self.shared.close();
        for running in &self.shared.lock().running {
            if cancel_live || running.priority == Priority::Shadow {
                running.cancel.set(CancelReason::ShuttingDown);
            }
        }
        self.queue.close();
    }

    /// The weights of a version in a PEFT directory: those in memory if the version is kept and its files
    /// have not changed, else they are read.
    fn load_adapter(
        &self,
        version: PolicyVersion,
        dir: &Path,
    ) -> Result<PolicyWeights, SamplerError> {
        // If a file is missing, reading names it.
        let files = AdapterFiles::of(version, dir).ok();
        if let Some(files) = &files
            && let Some(kept) = self.shared.lock().kept.get(files)
        {
            return Ok(kept);
        }
        let (_, lora) = peft::read(dir, &self.spec, DType::F32, &Device::Cpu)?;
        let adapter = self.copy(&lora)?;
        drop(lora);
        let read = PolicyWeights::new(version, Some(adapter));
        // What was read while the files changed is not kept.
        let unchanged =
            files.filter(|files| AdapterFiles::of(version, dir).ok().as_ref() == Some(files));
        let Some(files) = unchanged else { return Ok(read) };
        let mut state = self.shared.lock();
        let (weights, dropped) = state.kept.keep(files, read);
        state.list_held();
        drop(state);
        drop(dropped);
        Ok(weights)
    }

    /// A copy of an adapter for the passes of this engine.
    fn copy(&self, lora: &LoraWeights) -> Result<AdapterWeights, SamplerError> {
        match self.is_on_device {
            true => AdapterWeights::unscaled(&self.spec, lora),
            false => AdapterWeights::new(&self.spec, lora),
        }
    }

    fn activate(&self, slot: PolicySlot, weights: PolicyWeights) {
        let dropped = self.shared.lock().activate(slot, weights);
        drop(dropped);
        self.shared.wake.notify_all();
    }

    /// Sets the weights of a policy's requests that name their version.
    fn set_canary(&self, slot: PolicySlot, weights: Option<PolicyWeights>) {
        let dropped = self.shared.lock().set_canary(slot, weights);
        drop(dropped);
    }

    /// Whether requests that name `version` get it instead of the active version.
    fn has_canary(&self, version: PolicyVersion) -> bool {
        self.shared.lock().canary(PolicySlot::default(), version).is_some()
    }

    fn active(&self, slot: PolicySlot) -> PolicyVersion {
        self.shared.lock().active(slot).map(|weights| weights.version).unwrap_or_default()
    }

    /// [`Engine::generate`] of a policy.
    async fn generate_of(
        &self,
        slot: PolicySlot,
        request: GenerateRequest,
    ) -> Result<Generation, EngineError> {
        let canary =
            request.version.and_then(|version| self.shared.lock().canary(slot, version).cloned());
        let weights = canary.map_or(RequestWeights::Active(slot), RequestWeights::Fixed);
        self.submit(request, weights, false).await
    }

    /// [`Engine::generate`] with these weights. What `is_urgent` does not wait for clients.
    async fn submit(
        &self,
        request: GenerateRequest,
        weights: RequestWeights,
        is_urgent: bool,
    ) -> Result<Generation, EngineError> {
        let limit = run::check(&request, self.info.context, self.info.vocab)?;
        let shared = &self.shared;
        let sampler = TokenSampler::for_request(&request, &shared.codec, &shared.metrics)?;
        let prompt = request.prompt_ids.len();
        let invalid = |e: &dyn Display| EngineError::Invalid(e.to_string());
        self.shared.capacity.check(prompt, limit as usize).map_err(|e| invalid(&e))?;
        self.spec.check_length(prompt + limit as usize).map_err(|e| invalid(&e))?;
        let permit = match request.priority {
            Priority::Shadow => {
                let place = Arc::clone(&self.queue).acquire_owned().await;
                Some(place.map_err(|_| EngineError::ShuttingDown)?)
            }
            Priority::Live => None,
        };
        let is_live = request.priority == Priority::Live;
        let (reply, generation) = oneshot::channel();
        let queued = QueuedRequest { request, weights, limit, sampler, reply, is_urgent, permit };
        self.shared.enqueue(queued)?;
        let began = Instant::now();
        let admitted = match self.shared.config.queue_timeout.filter(|_| is_live) {
            None => Some(generation.await),
            Some(limit) => tokio::time::timeout(limit, generation).await.ok(),
        };
        let waited = began.elapsed();
        if is_live && self.shared.config.serves_clients {
            self.shared.metrics.engine_queue_wait.observe(waited.as_secs_f64());
        }
        match admitted {
            Some(generation) => generation.map_err(|_| EngineError::ShuttingDown),
            None => Err(self.shared.timed_out(waited)),
        }
    }
}

impl Drop for BatchedEngine {
    fn drop(&mut self) {
        self.close(true);
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// Runs the scheduler in its own rayon pool, until the engine is closed.
fn run_scheduler(shared: Arc<EngineShared>, decoder: PassDecoder) {
    /// Ends the waiting requests when the thread exits, also by a panic.
    struct CloseOnExit(Arc<EngineShared>);
    impl Drop for CloseOnExit {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let shared = CloseOnExit(shared);
    // Clients wait for its passes if they use this engine.
    let background = !shared.0.config.serves_clients;
    let lower_priority = move || {
        if background {
            to_background();
        }
    };
    lower_priority();
    // As a member of the pool, this thread runs parallel work itself, without handing it over.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(shared.0.config.threads.max(1))
        .thread_name(|index| format!("hone-native-{index}"))
        .start_handler(move |_| lower_priority())
        .use_current_thread()
        .build();
    if let Err(error) = &pool {
        tracing::warn!(%error, "the sampler has no thread pool and uses rayon's global one");
    }
    BatchScheduler::new(Arc::clone(&shared.0), decoder).run();
}

#[async_trait]
impl Engine for BatchedEngine {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn codec(&self) -> &Arc<Codec> {
        &self.shared.codec
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.generate_of(PolicySlot::default(), request).await
    }

    fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        self.shared.admits(owner, choices)
    }

    fn trouble(&self) -> Option<String> {
        // The thread closes the engine when it ends, also by a panic.
        self.shared.lock().closed.then(|| "the native engine has ended".to_owned())
    }

    fn active_version(&self) -> PolicyVersion {
        self.active(PolicySlot::default())
    }

    fn load(&self) -> EngineLoad {
        self.shared.lock().load()
    }
}

#[cfg(test)]
mod tests;
