//! The thread of a replica, which runs one request after another.

use std::sync::{Arc, mpsc};
use std::thread;
use std::thread::JoinHandle;

use anyhow::Context as _;
use mistralrs::core::Response;
use mistralrs::{
    Constraint, MistralRs, NormalRequest, Request, RequestMessage, SamplingParams as EngineParams,
};

use hone_core::types::TokenId;
use hone_engine::EngineError;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

use super::processor::SamplingProcessor;
use super::thread::no_thread;

/// One request to run.
pub(super) struct GenerateJob {
    pub prompt: Vec<TokenId>,
    /// The maximum number of completion tokens.
    pub limit: u32,
    pub run: GenerationRun,
    pub sampler: TokenSampler,
}

/// Hands jobs to a replica's thread.
///
/// Jobs run on a thread and not in a task, because they must outlive every runtime that a request may
/// come from: mistral.rs panics when the receiver of a response is gone.
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
    ) -> Result<Self, EngineError> {
        let (jobs, queue) = mpsc::channel::<GenerateJob>();
        let thread = thread::Builder::new()
            .name("hone-engine".to_owned())
            .spawn(move || {
                for job in queue {
                    execute(&engine, stop, threads, job);
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

/// Runs one job until the engine has dropped its sequence, and then releases its slot.
fn execute(engine: &MistralRs, stop: TokenId, threads: usize, job: GenerateJob) {
    let processor = Arc::new(SamplingProcessor::new(job.run, job.sampler, stop, threads));
    let result = generate(engine, job.prompt, job.limit, Arc::clone(&processor));
    if let Some(mut run) = processor.take_run() {
        if let Err(error) = result {
            run.fail(EngineError::Internal(format!("{error:#}")));
        }
        run.finish();
    }
}

fn generate(
    engine: &MistralRs,
    prompt: Vec<TokenId>,
    limit: u32,
    processor: Arc<SamplingProcessor>,
) -> anyhow::Result<()> {
    // Restarts the engine's thread if it has panicked.
    let requests = engine.get_sender(None).map_err(anyhow::Error::msg)?;
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
    let request = Request::Normal(Box::new(request));
    requests.blocking_send(request).ok().context("the engine's thread has ended")?;
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
