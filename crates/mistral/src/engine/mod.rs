//! [`Engine`] and [`Publisher`] on mistral.rs.
//!
//! Two colors of `replicas` engines each; [`Admission`] says who runs where, one worker thread a
//! replica runs one sequence at a time (batched decoding on CPU is wrong in mistral.rs 0.8.1), and
//! [`exchange`](crate::hot_swap) changes the weights of the idle color.

mod processor;
mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use worker::{GenerateJob, ReplicaWorker};

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_core::types::{PolicyVersion, SamplingParams, TokenId};
use hone_engine::admission::{Admission, Color, Lease};
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;
use hone_engine::{
    Codec, Engine, EngineConfig, EngineError, EngineLoad, GenerateRequest, Generation, ModelDir,
    ModelInfo, Priority, Publisher, run,
};

use crate::hot_swap::{Adapter, Loader, Pipeline};

/// One engine of one color.
struct Replica {
    pipeline: Box<dyn Pipeline>,
    worker: ReplicaWorker,
}

/// Serves a model with mistral.rs and exchanges its weights while it serves.
pub struct MistralEngine {
    info: ModelInfo,
    codec: Arc<Codec>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    loader: Arc<Loader>,
    /// `[color][slot]`
    replicas: Arc<[Vec<Replica>; 2]>,
    /// The color last staged. Held locked while staging.
    staged: Arc<Mutex<Option<Color>>>,
}

impl MistralEngine {
    /// Loads `2 * replicas` copies of the base model and starts serving version 0.
    ///
    /// `normalized` is what [`ModelDir::write_normalized`] returned. Blocks while it loads (10 ms a copy
    /// for the embedded model, seconds for a large one), needs no runtime, and may be called
    /// within one; there, prefer a blocking thread.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the model cannot be loaded or fails to produce a token.
    pub fn start(
        dir: &ModelDir,
        normalized: &Path,
        config: &EngineConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, EngineError> {
        let codec = Arc::new(Codec::load(dir)?);
        let loader = Arc::new(Loader::new(dir, normalized));
        let slots = config.replicas.max(1);
        let end = codec.stop_ids().first().copied().unwrap_or_default();
        let make = Arc::clone(&loader);
        let threads = threads(dir, slots);
        let replicas = on_thread("hone-load", move || {
            let color =
                || (0..slots).map(|_| replica(&make, end, threads)).collect::<Result<Vec<_>, _>>();
            Ok([color()?, color()?])
        })?;
        let engine = Arc::new(Self {
            info: ModelInfo {
                name: dir.name.clone(),
                context: dir.context(),
                vocab: dir.vocab(),
                slots,
            },
            codec,
            admission: Admission::new(slots, config.queue, PolicyVersion::BASE, metrics.clone()),
            metrics,
            loader,
            replicas: Arc::new(replicas),
            staged: Arc::new(Mutex::new(None)),
        });
        let warm = Arc::clone(&engine);
        on_thread("hone-warm", move || warm.warm_up())?;
        Ok(engine)
    }

    /// Refuses new requests and ends shadows; `cancel_live` ends running clients' requests too.
    pub fn close(&self, cancel_live: bool) {
        self.admission.close(cancel_live);
    }

    /// One token of every replica, so that a model which cannot compute fails at start.
    fn warm_up(&self) -> Result<(), EngineError> {
        let params = SamplingParams { temperature: 0.0, max_tokens: 1, ..Default::default() };
        let mut running = Vec::new();
        for color in Color::BOTH {
            while let Some(lease) = self.admission.acquire_on(color) {
                let request = probe_request(self.codec.stop_ids(), &params);
                running.push(self.run(lease, request)?);
            }
        }
        for mut generation in running {
            while let Some(event) = generation.events.blocking_recv() {
                if let hone_engine::Event::Failed(error) = event {
                    return Err(EngineError::Model(format!("the model computes nothing: {error}")));
                }
            }
        }
        Ok(())
    }

    /// Starts a request on its slot.
    fn run(&self, lease: Lease, request: GenerateRequest) -> Result<Generation, EngineError> {
        let limit = run::check(&request, self.info.context, self.info.vocab)?;
        let sampler = TokenSampler::new(&request.params, request.top_logprobs)?;
        let no_slot = || EngineError::Internal("the lease has no slot".to_owned());
        let (color, slot) = lease.slot().ok_or_else(no_slot)?;
        let (run, generation) =
            GenerationRun::new(&self.codec, &request.stop, limit, lease, &self.metrics);
        let job = GenerateJob { prompt: request.prompt_ids, limit, run, sampler };
        self.replicas[color as usize][slot].worker.start(job)?;
        Ok(generation)
    }
}

/// A shadow request for a probe.
fn probe_request(prompt_ids: &[TokenId], params: &SamplingParams) -> GenerateRequest {
    GenerateRequest {
        prompt_ids: prompt_ids.to_vec(),
        params: params.clone(),
        stop: Vec::new(),
        top_logprobs: 0,
        priority: Priority::Shadow,
    }
}

/// Threads that compute for one engine: an equal share of the processors, but one where no product
/// of a single token is large enough for `gemm` to split it.
fn threads(dir: &ModelDir, slots: usize) -> usize {
    /// Multiplications from which `gemm` 0.19 splits a product between threads.
    const SPLIT: u64 = 48 * 48 * 256;
    let size = |key: &str| dir.config.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0);
    if size("hidden_size") * size("vocab_size").max(size("intermediate_size")) < SPLIT {
        return 1;
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (processors / slots).max(1)
}

/// Loads the base model and builds an engine around it.
fn replica(loader: &Loader, end: TokenId, threads: usize) -> Result<Replica, EngineError> {
    let loaded = loader.load(None)?;
    // A runtime with one thread, because mistral.rs runs a prompt of its own in any other.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| EngineError::Internal(format!("no runtime: {e}")))?;
    let engine = runtime.block_on(loaded.engine.build());
    Ok(Replica { pipeline: loaded.pipeline, worker: ReplicaWorker::spawn(engine, end, threads)? })
}

/// Runs something on a fresh thread, which has no adapter applied and may block, and waits for it.
/// A panic inside mistral.rs becomes an error.
fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
    let thread = thread.map_err(|e| EngineError::Internal(format!("no thread: {e}")))?;
    thread.join().unwrap_or_else(|panic| Err(EngineError::Internal(panic_text(panic.as_ref()))))
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_default())
}

#[async_trait]
impl Engine for MistralEngine {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn codec(&self) -> &Arc<Codec> {
        &self.codec
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        // Before it waits: what cannot run must not queue.
        run::check(&request, self.info.context, self.info.vocab)?;
        TokenSampler::new(&request.params, request.top_logprobs)?;
        let lease = self.admission.acquire(request.priority).await?;
        self.run(lease, request)
    }

    fn active_version(&self) -> PolicyVersion {
        self.admission.active_version()
    }

    fn load(&self) -> EngineLoad {
        self.admission.load()
    }
}

#[async_trait]
impl Publisher for MistralEngine {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        let mut staged = Arc::clone(&self.staged).lock_owned().await;
        // Until this succeeds there is nothing to activate.
        *staged = None;
        if let Some(color) = self.admission.color_of(version) {
            *staged = Some(color);
            return Ok(());
        }
        let color = self.admission.idle_color();
        self.admission.wait_until_idle(color).await;
        let staging = Staging {
            loader: Arc::clone(&self.loader),
            admission: Arc::clone(&self.admission),
            replicas: Arc::clone(&self.replicas),
            color,
            version,
            adapter: adapter.map(Path::to_path_buf),
            staged,
        };
        let (sender, receiver) = oneshot::channel();
        // A thread of its own: loading blocks, and what it holds outlives a caller that gives up.
        thread::Builder::new()
            .name("hone-stage".to_owned())
            .spawn(move || {
                to_background();
                let loader = Arc::clone(&staging.loader);
                let result = staging.run();
                if result.is_err() {
                    // What the failed load left.
                    loader.give_memory_back();
                }
                let _ = sender.send(result);
            })
            .map_err(|e| EngineError::Internal(format!("no thread: {e}")))?;
        let died = |_| EngineError::Internal("the loader panicked".to_owned());
        receiver.await.map_err(died)?
    }

    async fn probe(
        &self,
        prompt_ids: &[TokenId],
        params: &SamplingParams,
    ) -> Result<Vec<(TokenId, f32)>, EngineError> {
        let staged = *self.staged.lock().await;
        let none = || EngineError::Invalid("no version is staged".to_owned());
        let color = staged.ok_or_else(none)?;
        let mut request = probe_request(prompt_ids, params);
        let lease = if color == self.admission.idle_color() {
            // Nobody else gets a slot there, but requests of the version's last turn may still run.
            self.admission.wait_until_idle(color).await;
            let busy = || EngineError::Internal("the staged engines are busy".to_owned());
            self.admission.acquire_on(color).ok_or_else(busy)?
        } else {
            request.priority = Priority::Live;
            self.admission.acquire(Priority::Live).await?
        };
        let completion = self.run(lease, request)?.collect().await?;
        Ok(completion.tokens.into_iter().map(|token| (token.id, token.logprob)).collect())
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let staged = self.staged.lock().await;
        let start = Instant::now();
        match *staged {
            Some(color) if self.admission.activate(color) => Ok(start.elapsed()),
            _ => Err(EngineError::Invalid("no version is staged".to_owned())),
        }
    }
}

/// One exchange of a whole idle color.
struct Staging {
    loader: Arc<Loader>,
    admission: Arc<Admission>,
    replicas: Arc<[Vec<Replica>; 2]>,
    color: Color,
    version: PolicyVersion,
    adapter: Option<PathBuf>,
    staged: OwnedMutexGuard<Option<Color>>,
}

impl Staging {
    /// Loads and exchanges as many replicas at a time as [`Loader::at_once`] allows. If the first
    /// load fails nothing has changed; if a later one fails the color holds no version and the next
    /// staging fills it anew.
    fn run(mut self) -> Result<(), EngineError> {
        let start = Instant::now();
        let adapter = self.adapter.as_deref().map(Adapter::read).transpose()?;
        let replicas = &self.replicas[self.color as usize];
        let mut held = Duration::ZERO;
        for replicas in replicas.chunks(self.loader.at_once(replicas.len())) {
            let fresh = self.load(replicas.len(), adapter.as_ref())?;
            self.admission.set_version(self.color, None);
            for (replica, fresh) in replicas.iter().zip(&fresh) {
                held = held.max(replica.pipeline.exchange(fresh.as_ref())?);
            }
            drop(fresh);
            self.loader.give_memory_back();
        }
        self.admission.set_version(self.color, Some(self.version));
        *self.staged = Some(self.color);
        tracing::debug!(
            version = %self.version,
            seconds = start.elapsed().as_secs_f64(),
            lock_seconds = held.as_secs_f64(),
            "staged a version"
        );
        Ok(())
    }

    /// Copies of the model with the adapter merged, loaded beside each other.
    fn load(
        &self,
        copies: usize,
        adapter: Option<&Adapter>,
    ) -> Result<Vec<Box<dyn Pipeline>>, EngineError> {
        let load = || self.loader.load(adapter).map(|loaded| loaded.pipeline);
        thread::scope(|scope| {
            let others: Vec<_> = (1..copies)
                .map(|_| {
                    thread::Builder::new().name("hone-stage".to_owned()).spawn_scoped(scope, load)
                })
                .collect();
            let mut loaded = vec![load()];
            for other in others {
                let other = other.map_err(|e| EngineError::Internal(format!("no thread: {e}")))?;
                loaded.push(other.join().unwrap_or_else(|panic| {
                    Err(EngineError::Internal(panic_text(panic.as_ref())))
                }));
            }
            loaded.into_iter().collect()
        })
    }
}
