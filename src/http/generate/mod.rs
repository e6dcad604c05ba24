//! Sampling for clients, which every endpoint that generates text shares.
//!
//! `admit` checks limits before any work. `prompt` makes a prompt's tokens and its record, and decides whether it is kept;
//! `continuation` lets a conversation go on from recorded tokens. `run` samples the
//! choices (each a `choice`, `reading` its tokens in time) and records them. `sse` sends events,
//! `models` has the names of the served model, `tokenize` encodes and decodes texts, and `TokenizerPlaces` bounds
//! how many long ones are computed at once, for every endpoint.
//! `text` is the endpoint of text completions.
//!
//! Each choice is a separate generation of exactly one policy version. The choices of one request
//! have different versions only if a version was published while some waited for slots. Then
//! `x-hone-policy-version` is the version of the first choice to start (streaming) or of choice 0
//! (otherwise); each streamed chunk's `system_fingerprint` and each ledger record has the version of
//! its own choice.

pub(super) mod admit;
mod choice;
pub(super) mod continuation;
pub(super) mod models;
pub(super) mod prompt;
mod reading;
pub(super) mod run;
pub(super) mod sse;
pub(super) mod text;
pub(super) mod tokenize;

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

use hone_core::types::{FinishReason, Interaction, PolicyVersion, TokenId};
use hone_engine::{CompiledGrammar, Token};

/// Response header with the policy version.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-hone-policy-version");

/// Adds the policy version to a response, if it is known.
pub(super) fn with_version(mut response: Response, version: Option<PolicyVersion>) -> Response {
    if let Some(version) = version {
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version.0));
    }
    response
}

// Which turns of conversations may still be queued for the ledger.

/// Digests that are remembered. More than the ledger's queue holds.
const MAX_RECENT: usize = 16_384;

/// First 16 bytes of a SHA-256 of messages.
pub type TurnDigest = [u8; 16];

/// The digests that were queued for the ledger last. Only a conversation with one of them waits until the
/// queue is written.
#[derive(Default)]
pub struct RecentTurns(Mutex<(VecDeque<TurnDigest>, HashSet<TurnDigest>)>);

impl RecentTurns {
    pub fn add(&self, digest: TurnDigest) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (order, known) = &mut *state;
        if !known.insert(digest) {
            return;
        }
        order.push_back(digest);
        if order.len() > MAX_RECENT
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    pub fn contains(&self, digest: &TurnDigest) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.contains(digest)
    }
}

// Bounds how many long texts are tokenized at once.
//
// No engine slot bounds this work, and a tokenizer needs about 70 bytes of memory for each byte of a text.

/// Long texts that are tokenized at once.
const PLACES: usize = 4;

/// The places of long texts.
pub struct TokenizerPlaces(Arc<Semaphore>);

impl Default for TokenizerPlaces {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(PLACES)))
    }
}

impl TokenizerPlaces {
    /// Waits for a place and runs `work` on a blocking thread.
    ///
    /// # Errors
    /// If `work` panicked.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // The semaphore is never closed.
        let place = Arc::clone(&self.0).acquire_owned().await;
        // The work cannot be interrupted, so it keeps its place if the client leaves.
        let work = move || {
            let _place = place;
            work()
        };
        spawn_blocking(work).await
    }
}

// What the endpoints give to a run, and what they get from it.

/// What a request asks for.
pub struct SamplingRequest {
    /// One or more prompts with the same sampling parameters and stop strings.
    pub prompts: Vec<Arc<Interaction>>,
    /// Number of choices for each prompt.
    pub choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub logprobs: Option<u8>,
    /// What constrains the text.
    pub grammar: Option<Arc<CompiledGrammar>>,
    /// Whether the response has the ids of the sampled tokens.
    pub token_ids: bool,
    /// Whether log-probabilities include that of a stop token, which has no text.
    pub reports_stop: bool,
    /// The client's id of its end user, who meets one version throughout a canary.
    pub user: Option<String>,
    /// Whether the prompts and choices are recorded and learned from.
    pub stored: bool,
}

/// The progress of one choice since its last update.
pub struct ChoiceUpdate {
    /// Index among the choices of all prompts, those of the first prompt first.
    pub index: u32,
    pub version: PolicyVersion,
    pub started: bool,
    /// The token that was sampled; `None` at the start and at the end.
    pub id: Option<TokenId>,
    /// Text that became complete with this token, or at the end.
    pub text: String,
    /// The tokens that `text` completes, without stop tokens; empty unless log-probabilities are
    /// requested.
    pub tokens: Vec<Token>,
    /// The tokens since the last update that had some; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub finish: Option<FinishReason>,
}

/// A whole choice.
pub struct FinishedChoice {
    /// As in [`ChoiceUpdate`].
    pub index: u32,
    pub text: String,
    /// All tokens except the stop token; empty unless log-probabilities are requested.
    pub tokens: Vec<Token>,
    pub finish: FinishReason,
}

/// Reported for a probability of 0, whose logarithm JSON cannot represent; OpenAI's value.
const MIN_LOGPROB: f32 = -9999.0;

/// A log-probability as responses have it.
pub fn shown_logprob(logprob: f32) -> f32 {
    // A NaN compares as false, so it is replaced too.
    if logprob > MIN_LOGPROB { logprob } else { MIN_LOGPROB }
}

/// Token counts. Sampled stop tokens are included.
#[derive(Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    /// Absent for a recorded completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokens>,
    /// Absent if the model has no reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokens>,
}

/// Parts of the prompt's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct PromptTokens {
    /// Those whose keys and values came from the engine's prefix cache.
    pub cached_tokens: usize,
}

/// Parts of the completion's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct CompletionTokens {
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }
    }

    /// Tokens of the prompt that came from the engine's prefix cache; 0 if that is unknown.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }
}
