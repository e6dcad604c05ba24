//! The thread of a replica, which runs one request after another.

use std::any::Any;
use std::cell::OnceCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use candle_core::{Device, Tensor};
use mistralrs::core::Response;
use mistralrs::{
    Constraint, CustomLogitsProcessor, MistralRs, NormalRequest, Request, RequestMessage,
    SamplingParams as EngineParams,
};
use parking_lot::Mutex;

use hone_core::metrics::Metrics;
use hone_core::types::TokenId;
use hone_engine::EngineError;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

pub(super) struct GenerateJob {
    pub prompt: Vec<TokenId>,
    /// The maximum number of completion tokens.
    pub limit: u32,
    pub run: GenerationRun,
    pub sampler: TokenSampler,
}

/// Hands jobs to a replica's thread, which outlives every runtime that a request may come from.
pub(super) struct ReplicaWorker {
    jobs: mpsc::Sender<GenerateJob>,
    thread: JoinHandle<()>,
}

impl ReplicaWorker {
    /// Starts the thread. It ends, and drops the engine, when the worker is dropped. `stop` is a stop
    /// token, and `threads` the size of the engine's pool.
    pub fn spawn(
        engine: Arc<MistralRs>,
        stop: TokenId,
        threads: usize,
        metrics: Arc<Metrics>,
    ) -> Result<Self, EngineError> {
        let (jobs, queue) = mpsc::channel::<GenerateJob>();
        let thread = thread::Builder::new()
            .name("hone-engine".to_owned())
            .spawn(move || {
                for job in queue {
                    let run = AssertUnwindSafe(|| execute(&engine, stop, threads, job));
                    // After a panic the job's slot is free and its caller has an error.
                    if !catch_unwind(run).unwrap_or(false) {
                        tracing::error!(
                            "a request panicked in mistral.rs or on a replica's thread"
                        );
                        metrics.engine_restarts.inc();
                        thread::sleep(ENDING);
                    }
                }
            })
            .map_err(no_thread)?;
        Ok(Self { jobs, thread })
    }

    /// Whether the thread has ended, so that every further job fails.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Queues a job. The job's lease guarantees that no other job is queued or runs.
    pub fn start(&self, job: GenerateJob) -> Result<(), EngineError> {
        let gone = |_| EngineError::Internal("the replica's thread has ended".to_owned());
        self.jobs.send(job).map_err(gone)
    }
}

/// Pause until mistral.rs's thread has ended after a panic, so that the next request restarts it.
const ENDING: Duration = Duration::from_millis(50);

/// Runs one job until the engine has dropped its sequence, and then releases its slot. Returns false if the
/// engine's thread ended instead.
fn execute(engine: &MistralRs, stop: TokenId, threads: usize, job: GenerateJob) -> bool {
    #[cfg(test)]
    tests::fail_at(tests::Fault::Thread);
    let processor = Arc::new(SamplingProcessor::new(job.run, job.sampler, stop, threads));
    let result = generate(engine, job.prompt, job.limit, Arc::clone(&processor));
    let Some(mut run) = processor.take_run() else { return true };
    let completed = result.is_err() || run.is_over();
    if let Err(error) = result {
        run.fail(EngineError::Internal(format!("{error:#}")));
    }
    run.finish();
    completed
}

fn generate(
    engine: &MistralRs,
    prompt: Vec<TokenId>,
    limit: u32,
    processor: Arc<SamplingProcessor>,
) -> anyhow::Result<()> {
    let (responder, mut responses) = tokio::sync::mpsc::channel(16);
    let request = NormalRequest {
        messages: RequestMessage::CompletionTokens(prompt),
        sampling_params: EngineParams {
            // Greedy: the engine selects the only token that the processor leaves.
            temperature: Some(0.0),
            // The processor ends the sequence earlier.
            max_len: Some(limit as usize + 1),
            ..EngineParams::neutral()
        },
        response: responder,
        return_logprobs: false,
        is_streaming: false,
        id: 0,
        constraint: Constraint::None,
        suffix: None,
        tools: None,
        tool_choice: None,
        logits_processors: Some(vec![processor]),
        return_raw_logits: false,
        web_search_options: None,
        model_id: None,
        truncate_sequence: false,
    };
    let mut request = Request::Normal(Box::new(request));
    let mut tries = 0;
    loop {
        // Restarts the engine's thread if it has ended after a panic.
        let requests = engine.get_sender(None).map_err(anyhow::Error::msg)?;
        let Err(unsent) = requests.blocking_send(request) else { break };
        tries += 1;
        anyhow::ensure!(tries < 100, "the engine's thread has ended");
        request = unsent.0;
        thread::sleep(ENDING);
    }
    let mut result = Ok(());
    // The channel closes when the engine drops the sequence.
    while let Some(response) = responses.blocking_recv() {
        match response {
            Response::InternalError(e) | Response::ValidationError(e) => {
                result = Err(anyhow::Error::from_boxed(e));
            }
            Response::CompletionModelError(message, _) => result = Err(anyhow::Error::msg(message)),
            _ => {}
        }
    }
    result
}

// Threads that turn a panic of mistral.rs into an error.

/// Runs `work` on a new thread and waits for it. The thread may block, and has no adapter applied.
pub(super) fn run_on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work).map_err(no_thread)?;
    thread.join().unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
}

pub(super) fn no_thread(error: io::Error) -> EngineError {
    EngineError::Internal(format!("a thread cannot be started: {error}"))
}

pub(super) fn panicked(panic: &(dyn Any + Send)) -> EngineError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    EngineError::Internal(format!("panic: {}", text.unwrap_or_default()))
}

// Samples tokens within mistral.rs.

/// Samples a request's tokens in place of mistral.rs. The one finite logit that it leaves is the sampled token, or
/// `stop` when the run is over, so that the engine computes no step whose token is unused.
pub(super) struct SamplingProcessor {
    /// `None` after [`Self::take_run`].
    sampling: Mutex<Option<(GenerationRun, TokenSampler)>>,
    /// A stop token.
    stop: TokenId,
    threads: usize,
}

impl SamplingProcessor {
    /// `threads` is the size of the engine's pool, including the engine's own thread.
    pub fn new(run: GenerationRun, sampler: TokenSampler, stop: TokenId, threads: usize) -> Self {
        Self { sampling: Mutex::new(Some((run, sampler))), stop, threads }
    }

    /// Takes the run out after the engine has dropped the sequence.
    pub fn take_run(&self) -> Option<GenerationRun> {
        self.sampling.lock().take().map(|(run, _)| run)
    }

    /// Samples the token that the engine must select.
    fn next(&self, logits: &Tensor) -> TokenId {
        let mut sampling = self.sampling.lock();
        let Some((run, sampler)) = sampling.as_mut() else { return self.stop };
        if run.is_over() {
            return self.stop;
        }
        #[cfg(test)]
        tests::fail_at(tests::Fault::Engine);
        let drawn = logits
            .to_vec1::<f32>()
            .map_err(|e| EngineError::Internal(format!("logits: {e}")))
            .and_then(|logits| Ok(sampler.draw(&logits)?));
        match drawn {
            Ok(drawn) => {
                let id = drawn.id;
                if run.push(drawn) { self.stop } else { id }
            }
            Err(error) => {
                run.fail(error);
                self.stop
            }
        }
    }
}

impl CustomLogitsProcessor for SamplingProcessor {
    /// `logits` `[vocab]` are raw, because the request asks the engine for no penalties.
    fn apply(&self, logits: &Tensor, _context: &[u32]) -> candle_core::Result<Tensor> {
        join_pool(self.threads);
        let vocab = logits.elem_count();
        let mut only = vec![f32::NEG_INFINITY; vocab];
        if let Some(choice) = only.get_mut(self.next(logits) as usize) {
            // Not 0, because the engine takes its logarithm.
            *choice = 1.0;
        }
        Tensor::from_vec(only, vocab, &Device::Cpu)
    }
}

thread_local! {
    static POOL: OnceCell<Option<rayon::ThreadPool>> = const { OnceCell::new() };
}

/// Makes the calling thread, which belongs to mistral.rs, a member of its own rayon pool.
///
/// A thread outside of all pools hands every parallel loop of candle to another thread and waits for
/// it, many times for each token. A member runs the loop itself; with the embedded model this saves a
/// quarter of a token's CPU time. With separate pools, engines do not compete with each other and the
/// trainer for the global pool, and `RAYON_NUM_THREADS` need not be set.
fn join_pool(threads: usize) {
    POOL.with(|pool| {
        pool.get_or_init(|| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("hone-engine-{index}"))
                .use_current_thread()
                .build();
            pool.inspect_err(|error| tracing::debug!(%error, "the engine uses rayon's global pool"))
                .ok()
        });
    });
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hone_core::types::SamplingParams;
    use hone_engine::{Engine as _, EngineConfig, GenerateRequest, ModelDir};

    use super::*;
    use crate::MistralEngine;

    #[derive(Clone, Copy, PartialEq)]
    pub enum Fault {
        Engine,
        Thread,
    }

    static NEXT: Mutex<Option<Fault>> = Mutex::new(None);

    /// Panics if this is the planned fault.
    pub fn fail_at(place: Fault) {
        let mut next = NEXT.lock();
        if *next == Some(place) {
            *next = None;
            drop(next);
            panic!("planned");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_panic_fails_one_request_and_later_ones_are_answered() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qwen2-tiny");
        let (dir, files) =
            (ModelDir::open(Path::new(model)).unwrap(), tempfile::tempdir().unwrap());
        let config = EngineConfig { replicas: 1, ..EngineConfig::default() };
        let metrics = Arc::new(Metrics::new().unwrap());
        let engine = MistralEngine::start(&dir, files.path(), &config, metrics.clone()).unwrap();
        let params = SamplingParams { temperature: 0.0, max_tokens: 4, ..Default::default() };
        let ask = || {
            let (engine, request) = (engine.clone(), GenerateRequest::probe(&[3, 4, 5], &params));
            async move { engine.generate(request).await?.collect().await }
        };
        let before = ask().await.unwrap();
        for fault in [Fault::Engine, Fault::Thread] {
            *NEXT.lock() = Some(fault);
            let failed = ask().await.unwrap_err();
            assert!(matches!(failed, EngineError::Internal(_)), "{failed}");
            assert_eq!(ask().await.unwrap().token_logprobs(), before.token_logprobs());
            assert_eq!(engine.trouble(), None);
        }
        assert_eq!(metrics.engine_restarts.get(), 2);
    }
}
