//! One thread a replica, which runs one sequence after another.

use std::sync::{Arc, mpsc};
use std::thread;

use mistralrs::core::Response;
use mistralrs::{
    Constraint, MistralRs, NormalRequest, Request, RequestMessage, SamplingParams as EngineParams,
};

use hone_core::types::TokenId;
use hone_engine::EngineError;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

use super::processor::Processor;

/// One sequence to run.
pub(super) struct GenerateJob {
    pub(super) prompt: Vec<TokenId>,
    pub(super) limit: u32,
    pub(super) run: GenerationRun,
    pub(super) sampler: TokenSampler,
}

/// Runs jobs on one engine, each to its very end before the next. A thread and not a task: it
/// must outlive every runtime that a request may come from, because the engine panics when the
/// receiver of an answer is gone.
pub(super) struct ReplicaWorker {
    jobs: mpsc::Sender<GenerateJob>,
}

impl ReplicaWorker {
    /// Starts the thread; it ends when the worker is dropped, and the engine with it. `end` is a
    /// stop token, `threads` the number of threads that compute.
    pub(super) fn spawn(
        engine: Arc<MistralRs>,
        end: TokenId,
        threads: usize,
    ) -> Result<Self, EngineError> {
        let (jobs, queue) = mpsc::channel::<GenerateJob>();
        thread::Builder::new()
            .name("hone-engine".to_owned())
            .spawn(move || {
                for job in queue {
                    execute(&engine, end, threads, job);
                }
            })
            .map_err(|e| EngineError::Internal(format!("no thread: {e}")))?;
        Ok(Self { jobs })
    }

    /// Hands a job over; it starts at once if its lease is honest.
    pub(super) fn start(&self, job: GenerateJob) -> Result<(), EngineError> {
        let gone = |_| EngineError::Internal("the engine's thread has ended".to_owned());
        self.jobs.send(job).map_err(gone)
    }
}

/// Runs one job until the engine has let go of its sequence, then frees its slot.
fn execute(engine: &MistralRs, end: TokenId, threads: usize, job: GenerateJob) {
    let processor = Arc::new(Processor::new(job.run, job.sampler, end, threads));
    let failure = generate(engine, job.prompt, job.limit, Arc::clone(&processor)).err();
    if let Some(mut run) = processor.take() {
        if let Some(reason) = failure {
            run.fail(EngineError::Internal(reason));
        }
        run.finish();
    }
}

fn generate(
    engine: &MistralRs,
    prompt: Vec<TokenId>,
    limit: u32,
    processor: Arc<Processor>,
) -> Result<(), String> {
    // Restarts the engine's thread if it has panicked.
    let requests = engine.get_sender(None).map_err(|e| e.to_string())?;
    let (responder, mut responses) = tokio::sync::mpsc::channel(16);
    let request = NormalRequest {
        messages: RequestMessage::CompletionTokens(prompt),
        sampling_params: EngineParams {
            // Greedy: it takes the one token that the processor leaves.
            temperature: Some(0.0),
            // Ours ends earlier.
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
    requests
        .blocking_send(Request::Normal(Box::new(request)))
        .map_err(|_| "the engine's thread has ended".to_owned())?;
    let mut result = Ok(());
    // The channel closes when the engine drops the sequence: from then on it holds nothing of it.
    while let Some(response) = responses.blocking_recv() {
        match response {
            Response::InternalError(e) | Response::ValidationError(e) => {
                result = Err(e.to_string());
            }
            Response::CompletionModelError(message, _) => result = Err(message),
            _ => {}
        }
    }
    result
}
