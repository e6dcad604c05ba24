//! [`Engine`] and [`Publisher`] on mistral.rs.

mod staging;
mod worker;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::{Mutex, oneshot};

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_core::types::{PolicyVersion, SamplingParams};
use hone_engine::admission::{Admission, Color, Lease, Owner};
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;
use hone_engine::{
    Codec, Completion, Engine, EngineConfig, EngineError, EngineLoad, Event, GenerateRequest,
    Generation, ModelDir, ModelInfo, Priority, Publisher, run,
};

use crate::hot_swap::PipelineLoader;
use crate::model_files::ModelFiles;

use staging::{Replica, hot_swap, threads_per_engine};
use worker::{GenerateJob, no_thread, run_on_thread};

/// Serves a model with mistral.rs. See the [crate's documentation](crate).
pub struct MistralEngine {
    info: ModelInfo,
    codec: Arc<Codec>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    loader: Arc<PipelineLoader>,
    /// `[color][slot]`
    replicas: Arc<[Vec<Replica>; 2]>,
    /// The color that was staged last. Locked while a version is staged.
    staged: Arc<Mutex<Option<Color>>>,
}

impl MistralEngine {
    /// Loads `2 * replicas` copies of the base model and starts serving it as version 0.
    ///
    /// `cache` is for the directory that mistral.rs reads. This blocks while it loads (10 ms a copy for the
    /// embedded model, seconds for a large one). It needs no runtime; within one, call it on a blocking
    /// thread.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the model cannot be served correctly, cannot be loaded or cannot compute a
    /// token.
    pub fn start(
        dir: &ModelDir,
        cache: &Path,
        config: &EngineConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, EngineError> {
        let codec = Arc::new(Codec::load(dir)?);
        let ModelFiles { path, context } = ModelFiles::write(dir, cache)?;
        let loader = Arc::new(PipelineLoader::new(dir, path));
        let slots = config.replicas.max(1);
        let stop = codec.stop_ids().first().copied().unwrap_or_default();
        let base_loader = Arc::clone(&loader);
        let threads = threads_per_engine(dir, slots);
        let counted = Arc::clone(&metrics);
        let replicas = run_on_thread("hone-load", move || {
            let start = |_| Replica::start(&base_loader, stop, threads, &counted);
            let color = || (0..slots).map(start).collect::<Result<Vec<_>, _>>();
            Ok([color()?, color()?])
        })?;
        let engine = Arc::new(Self {
            info: ModelInfo { name: dir.name.clone(), context, vocab: dir.vocab(), slots },
            codec,
            admission: Admission::new(
                slots,
                config.queue_limits(),
                PolicyVersion::BASE,
                metrics.clone(),
            ),
            metrics,
            loader,
            replicas: Arc::new(replicas),
            staged: Arc::new(Mutex::new(None)),
        });
        let started = Arc::clone(&engine);
        run_on_thread("hone-warm", move || started.warm_up())?;
        Ok(engine)
    }

    /// Refuses new requests and cancels running shadow requests. With `cancel_live`, cancels live
    /// requests too.
    pub fn close(&self, cancel_live: bool) {
        self.admission.close(cancel_live);
    }

    /// Generates one token with every replica, so that a model that cannot compute fails at start.
    fn warm_up(&self) -> Result<(), EngineError> {
        let params = SamplingParams { temperature: 0.0, max_tokens: 1, ..Default::default() };
        let mut running = Vec::new();
        for color in Color::BOTH {
            while let Some(lease) = self.admission.acquire_on(color) {
                let request = GenerateRequest::probe(self.codec.stop_ids(), &params);
                running.push(self.run(lease, request)?);
            }
        }
        for mut generation in running {
            while let Some(event) = generation.events.blocking_recv() {
                if let Event::Failed(error) = event {
                    return Err(EngineError::Model(format!("the model cannot compute: {error}")));
                }
            }
        }
        Ok(())
    }

    /// Starts a request on the slot of its lease.
    fn run(&self, lease: Lease, request: GenerateRequest) -> Result<Generation, EngineError> {
        let limit = run::check(&request, self.info.context, self.info.vocab)?;
        let sampler = TokenSampler::for_request(&request, &self.codec, &self.metrics)?;
        let no_slot = || EngineError::Internal("the lease has no slot".to_owned());
        let (color, slot) = lease.slot().ok_or_else(no_slot)?;
        let (run, generation) =
            GenerationRun::new(&self.codec, &request, limit, lease, &self.metrics);
        let job = GenerateJob { prompt: request.prompt_ids, limit, run, sampler };
        self.replicas[color as usize][slot].worker.start(job)?;
        Ok(generation)
    }
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
        // Before the wait for a slot, so that an invalid request does not occupy the queue.
        run::check(&request, self.info.context, self.info.vocab)?;
        TokenSampler::new(&request.params, request.top_logprobs)?;
        let lease = self.admission.acquire_for(&request.owner, request.priority).await?;
        self.run(lease, request)
    }

    fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        self.admission.admits(owner, choices)
    }

    fn trouble(&self) -> Option<String> {
        let workers = self.replicas.iter().flatten().map(|replica| &replica.worker);
        match workers.filter(|worker| worker.has_ended()).count() {
            0 => None,
            ended => Some(format!("{ended} threads of mistral.rs have ended")),
        }
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
        // A failure leaves nothing to activate.
        *staged = None;
        if let Some(color) = self.admission.color_of(version) {
            *staged = Some(color);
            return Ok(());
        }
        let color = self.admission.idle_color();
        self.admission.wait_until_idle(color).await;
        let (loader, admission) = (Arc::clone(&self.loader), Arc::clone(&self.admission));
        let replicas = Arc::clone(&self.replicas);
        let adapter = adapter.map(Path::to_path_buf);
        let (sender, receiver) = oneshot::channel();
        // On a thread of its own, because loading blocks, and because the hot swap must complete also
        // if the caller drops this future. The guard of `staged` lets only one run.
        std::thread::Builder::new()
            .name("hone-stage".to_owned())
            .spawn(move || {
                to_background();
                let replicas = &replicas[color as usize];
                let result = hot_swap(&loader, &admission, color, replicas, adapter.as_deref());
                match result {
                    Ok(()) => {
                        admission.set_version(color, version);
                        *staged = Some(color);
                    }
                    // The failed load left unused memory.
                    Err(_) => loader.trim_memory(),
                }
                let _ = sender.send(result);
            })
            .map_err(no_thread)?;
        let died = |_| EngineError::Internal("the hot swap panicked".to_owned());
        receiver.await.map_err(died)?
    }

    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        let color = (*self.staged.lock().await).ok_or_else(EngineError::nothing_staged)?;
        let lease = if color == self.admission.idle_color() {
            // The idle color gets no new requests, but those from its active time may still run.
            self.admission.wait_until_idle(color).await;
            let busy = || EngineError::Internal("the staged engines are busy".to_owned());
            self.admission.acquire_on(color).ok_or_else(busy)?
        } else {
            self.admission.acquire(Priority::Live).await?
        };
        self.run(lease, request)?.collect().await
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let staged = self.staged.lock().await;
        let start = Instant::now();
        match *staged {
            Some(color) if self.admission.activate(color) => Ok(start.elapsed()),
            _ => Err(EngineError::nothing_staged()),
        }
    }

    /// Serves the version if one of the colors holds it, which is so for the version before the last
    /// publication until the next one is staged.
    async fn serve_now(
        &self,
        version: PolicyVersion,
        _: Option<&Path>,
    ) -> Result<bool, EngineError> {
        Ok(self.admission.activate_version(version))
    }
}
