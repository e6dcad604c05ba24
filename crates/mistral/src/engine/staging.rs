//! Loads a policy version into the idle color.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hone_core::metrics::Metrics;
use hone_core::types::TokenId;
use hone_engine::admission::{Admission, Color};
use hone_engine::{EngineError, ModelDir};

use super::worker::{ReplicaWorker, no_thread, panicked};
use crate::hot_swap::{Adapter, PipelineLoader, SharedPipeline};

/// Loads a version into the replicas of a color, which must be idle, as many at a time as
/// [`PipelineLoader::copies_at_once`] allows. `adapter` is the PEFT directory; `None` is the base model.
///
/// If the first load fails, the color is unchanged. If a later one fails, the color holds no
/// version, and the next staging loads all its replicas.
pub(super) fn hot_swap(
    loader: &PipelineLoader,
    admission: &Admission,
    color: Color,
    replicas: &[Replica],
    adapter: Option<&Path>,
) -> Result<(), EngineError> {
    let start = Instant::now();
    let adapter = adapter.map(Adapter::read).transpose()?;
    let mut locked = Duration::ZERO;
    for replicas in replicas.chunks(loader.copies_at_once(replicas.len())) {
        let fresh = load_copies(loader, adapter.as_ref(), replicas.len())?;
        if !admission.begin_replacement(color) {
            return Err(EngineError::Internal("the idle color became active".to_owned()));
        }
        for (replica, fresh) in replicas.iter().zip(&fresh) {
            locked = locked.max(replica.pipeline.swap(fresh)?);
        }
        drop(fresh);
        loader.trim_memory();
    }
    let (seconds, lock_seconds) = (start.elapsed().as_secs_f64(), locked.as_secs_f64());
    tracing::debug!(seconds, lock_seconds, "loaded a version");
    Ok(())
}

/// Loads copies of the model with the adapter merged, in parallel.
fn load_copies(
    loader: &PipelineLoader,
    adapter: Option<&Adapter>,
    copies: usize,
) -> Result<Vec<SharedPipeline>, EngineError> {
    let load = || loader.load(adapter).map(|(pipeline, _)| pipeline);
    thread::scope(|scope| {
        let spawn =
            |_| thread::Builder::new().name("hone-stage".to_owned()).spawn_scoped(scope, load);
        let others: Vec<_> = (1..copies).map(spawn).collect();
        let mut loaded = vec![load()];
        for other in others {
            let result = other.map_err(no_thread)?.join();
            loaded.push(result.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))));
        }
        loaded.into_iter().collect()
    })
}

// One mistral.rs engine and the thread that runs its requests.

pub(super) struct Replica {
    /// The engine's pipeline, shared with the engine, for hot swaps.
    pub pipeline: SharedPipeline,
    pub worker: ReplicaWorker,
}

impl Replica {
    /// Loads the base model and builds an engine around it. `stop` is a stop token, and `threads` the
    /// size of the engine's pool.
    pub fn start(
        loader: &PipelineLoader,
        stop: TokenId,
        threads: usize,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, EngineError> {
        let (pipeline, engine) = loader.load(None)?;
        // mistral.rs runs a prompt of its own if it is built within a multi-threaded runtime.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| EngineError::Internal(format!("a runtime cannot be started: {e}")))?;
        let engine = runtime.block_on(engine.build());
        let worker = ReplicaWorker::spawn(engine, stop, threads, Arc::clone(metrics))?;
        Ok(Self { pipeline, worker })
    }
}

/// Computes the pool size of each of `slots` engines: an equal share of the processors, or one thread
/// where every matmul of a single token is too small for `gemm` to split.
pub(super) fn threads_per_engine(dir: &ModelDir, slots: usize) -> usize {
    /// Multiplications from which `gemm` 0.19 splits a product between threads.
    const SPLIT: u64 = 48 * 48 * 256;
    let size = |key: &str| dir.config.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0);
    if size("hidden_size") * size("vocab_size").max(size("intermediate_size")) < SPLIT {
        return 1;
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (processors / slots).max(1)
}
