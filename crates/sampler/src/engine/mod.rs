//! [`Engine`] on the sampler.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use candle_core::{DType, Device};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_core::types::{PolicyVersion, SamplingParams, TokenId};
use hone_engine::run::{CancelFlag, CancelReason};
use hone_engine::sampling::TokenSampler;
use hone_engine::{
    Codec, Engine, EngineError, EngineLoad, GenerateRequest, Generation, ModelInfo, Priority,
    Publisher, run,
};
use hone_model::adapter::peft;
use hone_model::adapter::weights::LoraWeights;
use hone_model::{Model, ModelSpec};

use super::scheduler::Scheduler;
use super::{AdapterWeights, Decoder, SamplerError, SamplerMemory};

/// Whether clients are being served now: then the sampler holds back.
pub type LiveTraffic = Arc<dyn Fn() -> bool + Send + Sync>;

/// How the sampler runs.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// The model's own name.
    pub name: String,
    /// Context length in tokens, prompt and completion together.
    pub context: usize,
    /// Sequences that run at once, at most.
    pub slots: usize,
    /// Requests that may wait; more of them wait for a place to wait, or are refused if live.
    pub queue: usize,
    /// Tokens whose keys and values the cache holds (`rollout.max_batch_tokens`).
    pub max_batch_tokens: usize,
    /// Threads that compute.
    pub threads: usize,
    /// Threads that compute while clients are served.
    pub busy_threads: usize,
    /// Share of the time that is computed while clients are served, above 0 and at most 1.
    pub busy_share: f64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            context: 1024,
            slots: 64,
            queue: 256,
            max_batch_tokens: 32_768,
            threads: thread::available_parallelism().map_or(1, std::num::NonZero::get),
            busy_threads: 1,
            busy_share: 0.2,
        }
    }
}

/// A request that waits.
pub(super) struct Waiting {
    pub request: GenerateRequest,
    /// What it runs on, if not on the version that is current when it enters.
    pub on: Option<Current>,
    pub limit: u32,
    pub sampler: TokenSampler,
    pub reply: oneshot::Sender<Generation>,
    /// Its place in the queue.
    pub place: OwnedSemaphorePermit,
}

/// What new sequences run on.
#[derive(Clone, Default)]
pub(super) struct Current {
    pub version: PolicyVersion,
    pub factors: Option<Arc<AdapterWeights>>,
}

/// What the thread and its callers share.
#[derive(Default)]
pub(super) struct State {
    pub waiting: VecDeque<Waiting>,
    pub current: Current,
    pub closed: bool,
    /// Of the running sequences.
    pub cancel: Vec<(Priority, Arc<CancelFlag>)>,
}

pub(super) struct Shared {
    pub state: Mutex<State>,
    pub wake: Condvar,
    pub codec: Arc<Codec>,
    pub metrics: Arc<Metrics>,
    pub config: SamplerConfig,
    pub plan: SamplerMemory,
    pub busy: LiveTraffic,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses everything new and lets nobody wait any longer.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        drop(state);
        self.wake.notify_all();
    }
}

/// The sampler on a thread of its own. Dropping it ends what runs.
pub struct BatchedEngine {
    info: ModelInfo,
    spec: ModelSpec,
    shared: Arc<Shared>,
    queue: Arc<Semaphore>,
    thread: Option<JoinHandle<()>>,
}

impl BatchedEngine {
    /// Starts serving the base as version 0.
    ///
    /// # Errors
    /// If the model's weights cannot be read in place, a setting is out of range, or a thread cannot
    /// be started.
    pub fn start(
        model: &Model,
        codec: Arc<Codec>,
        config: SamplerConfig,
        busy: LiveTraffic,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, SamplerError> {
        let spec = model.spec().clone();
        let plan = SamplerMemory::new(&spec, &config)?;
        if !(config.busy_share > 0.0 && config.busy_share <= 1.0) {
            let share = config.busy_share;
            return Err(SamplerError::Setting(format!(
                "the share of the time while clients are served is {share}; more than 0 and at most \
                 1 was expected"
            )));
        }
        let decoder = Decoder::new(model)?;
        let info = ModelInfo {
            name: config.name.clone(),
            context: config.context,
            vocab: spec.vocab_size,
            slots: config.slots,
        };
        let queue = Arc::new(Semaphore::new(config.queue.clamp(1, Semaphore::MAX_PERMITS)));
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            wake: Condvar::new(),
            codec,
            metrics,
            config,
            plan,
            busy,
        });
        let mine = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("hone-native".to_owned())
            .spawn(move || run_thread(mine, decoder))
            .map_err(|error| SamplerError::Internal(format!("no thread: {error}")))?;
        Ok(Arc::new(Self { info, spec, shared, queue, thread: Some(thread) }))
    }

    /// The memory that is planned for.
    pub fn plan(&self) -> SamplerMemory {
        self.shared.plan
    }

    /// Gives new sequences a version; those that run stay on theirs. `None` is the base. The factors
    /// are copied.
    ///
    /// # Errors
    /// If a factor cannot be read.
    pub fn publish(
        &self,
        version: PolicyVersion,
        lora: Option<&LoraWeights>,
    ) -> Result<(), SamplerError> {
        let factors = lora.map(|lora| AdapterWeights::new(&self.spec, lora)).transpose()?;
        self.put(Current { version, factors: factors.map(Arc::new) });
        Ok(())
    }

    /// AdapterWeights from a PEFT directory.
    fn read(&self, adapter: Option<&Path>) -> Result<Option<AdapterWeights>, SamplerError> {
        let Some(dir) = adapter else { return Ok(None) };
        let (_, lora) = peft::read(dir, &self.spec, DType::F32, &Device::Cpu)?;
        AdapterWeights::new(&self.spec, &lora).map(Some)
    }

    fn put(&self, current: Current) {
        self.shared.lock().current = current;
        self.shared.wake.notify_all();
    }

    /// [`Engine::generate`], on another version than the current one where that is given.
    async fn submit(
        &self,
        request: GenerateRequest,
        on: Option<Current>,
    ) -> Result<Generation, EngineError> {
        let limit = run::check(&request, self.info.context, self.info.vocab)?;
        let sampler = TokenSampler::new(&request.params, request.top_logprobs)?;
        let prompt = request.prompt_ids.len();
        let invalid = |e: &dyn std::fmt::Display| EngineError::Invalid(e.to_string());
        self.shared.plan.check(prompt, limit as usize).map_err(|e| invalid(&e))?;
        self.spec.check_length(prompt + limit as usize).map_err(|e| invalid(&e))?;
        let place = match request.priority {
            Priority::Shadow => Arc::clone(&self.queue).acquire_owned().await.ok(),
            Priority::Live => match Arc::clone(&self.queue).try_acquire_owned() {
                Ok(place) => Some(place),
                Err(tokio::sync::TryAcquireError::Closed) => None,
                Err(tokio::sync::TryAcquireError::NoPermits) => {
                    let queued = self.shared.config.queue;
                    return Err(EngineError::Overloaded { slots: self.info.slots, queued });
                }
            },
        };
        let place = place.ok_or(EngineError::ShuttingDown)?;
        let (reply, generation) = oneshot::channel();
        {
            let mut state = self.shared.lock();
            if state.closed {
                return Err(EngineError::ShuttingDown);
            }
            state.waiting.push_back(Waiting { request, on, limit, sampler, reply, place });
        }
        self.shared.wake.notify_all();
        generation.await.map_err(|_| EngineError::ShuttingDown)
    }

    /// Refuses new requests and ends shadows; `cancel_live` ends the others too.
    pub fn close(&self, cancel_live: bool) {
        self.shared.close();
        for (priority, cancel) in &self.shared.lock().cancel {
            if cancel_live || *priority == Priority::Shadow {
                cancel.set(CancelReason::ShuttingDown);
            }
        }
        self.queue.close();
    }
}

impl Drop for BatchedEngine {
    fn drop(&mut self) {
        self.close(true);
        if let Some(thread) = self.thread.take() {
            // It may be this very thread's caller that is last; its panics were logged.
            let _ = thread.join();
        }
    }
}

/// Runs the scheduler in a pool of its own, and lets nobody wait for a thread that is gone.
fn run_thread(shared: Arc<Shared>, decoder: Decoder) {
    struct Last(Arc<Shared>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let last = Last(shared);
    to_background();
    // The thread is a member: it computes with the others, and alone it hands nothing over.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(last.0.config.threads.max(1))
        .thread_name(|index| format!("hone-native-{index}"))
        .start_handler(|_| to_background())
        .use_current_thread()
        .build();
    if let Err(error) = &pool {
        tracing::warn!(%error, "the sampler has no threads of its own");
    }
    Scheduler::new(Arc::clone(&last.0), decoder).run();
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
        self.submit(request, None).await
    }

    fn active_version(&self) -> PolicyVersion {
        self.shared.lock().current.version
    }

    fn load(&self) -> EngineLoad {
        let state = self.shared.lock();
        let running = |wanted| state.cancel.iter().filter(|(p, _)| *p == wanted).count();
        let waiting =
            |wanted| state.waiting.iter().filter(|w| w.request.priority == wanted).count();
        EngineLoad {
            live_running: running(Priority::Live),
            shadow_running: running(Priority::Shadow),
            live_waiting: waiting(Priority::Live),
            shadow_waiting: waiting(Priority::Shadow),
        }
    }
}

/// Publishes to the sampler and, where there is one, to the engine that serves: both then have the
/// same version.
pub struct BatchedPublisher {
    serving: Option<Arc<dyn Publisher>>,
    native: Arc<BatchedEngine>,
    staged: Mutex<Option<Current>>,
}

impl BatchedPublisher {
    /// What `policy` publishes with where the sampler is used.
    pub fn new(serving: Option<Arc<dyn Publisher>>, native: Arc<BatchedEngine>) -> Self {
        Self { serving, native, staged: Mutex::new(None) }
    }

    fn staged(&self) -> MutexGuard<'_, Option<Current>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn none_staged() -> EngineError {
    EngineError::Invalid("no version is staged".to_owned())
}

#[async_trait]
impl Publisher for BatchedPublisher {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        *self.staged() = None;
        let (native, dir) = (Arc::clone(&self.native), adapter.map(Path::to_path_buf));
        let read = tokio::task::spawn_blocking(move || native.read(dir.as_deref()));
        if let Some(serving) = &self.serving {
            serving.stage(version, adapter).await?;
        }
        let fail = |e: &dyn std::fmt::Display| EngineError::Model(format!("sampler: {e}"));
        let factors = read.await.map_err(|e| fail(&e))?.map_err(|e| fail(&e))?;
        *self.staged() = Some(Current { version, factors: factors.map(Arc::new) });
        Ok(())
    }

    async fn probe(
        &self,
        prompt_ids: &[TokenId],
        params: &SamplingParams,
    ) -> Result<Vec<(TokenId, f32)>, EngineError> {
        if let Some(serving) = &self.serving {
            return serving.probe(prompt_ids, params).await;
        }
        let staged = self.staged().clone().ok_or_else(none_staged)?;
        let request = GenerateRequest {
            prompt_ids: prompt_ids.to_vec(),
            params: params.clone(),
            stop: Vec::new(),
            top_logprobs: 0,
            priority: Priority::Shadow,
        };
        let completion = self.native.submit(request, Some(staged)).await?.collect().await?;
        Ok(completion.tokens.into_iter().map(|token| (token.id, token.logprob)).collect())
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let held = match &self.serving {
            Some(serving) => serving.activate().await?,
            None => Duration::ZERO,
        };
        match self.staged().take() {
            Some(staged) => self.native.put(staged),
            // The serving engine knows what it has staged.
            None if self.serving.is_some() => {}
            None => return Err(none_staged()),
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests;
