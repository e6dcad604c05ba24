//! Sampling for clients, which every endpoint that generates text shares.
//!
//! `fields` declares and reads what all bodies have; a dialect makes a [`ClientRequest`] of a body. `request` checks
//! limits before any work, and begins the answers of a conversation. `prompt` makes a prompt's tokens, of a
//! conversation from recorded ones where it can. `run` samples the choices, reads their tokens in time, and records
//! them. `sse` answers with what a dialect makes of them. `model` has the names and the tokenizer of the served
//! model, and `TokenizerPlaces` bounds how many long texts are tokenized at once, for every endpoint.
//!
//! Each choice is a separate generation of exactly one policy version. The choices of one request
//! have different versions only if a version was published while some waited for slots. Then
//! `x-hone-policy-version` is the version of the first choice to start (streaming) or of choice 0
//! (otherwise); each streamed chunk's `system_fingerprint` and each ledger record has the version of
//! its own choice.

pub mod fields;
pub mod model;
pub mod prompt;
pub mod request;
pub mod run;
pub mod sse;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

use hone_core::types::{
    ChatOptions, ClientEndpoint, FinishReason, Message, PolicyVersion, SamplingParams, TokenId,
};
use hone_engine::Token;

use super::chat::constraint::RequestedGrammar;

// Which turns of conversations may still be queued for the ledger.

/// Digests that are remembered. More than the ledger's queue holds.
const MAX_RECENT: usize = 16_384;

/// First 16 bytes of a SHA-256 of messages.
pub type TurnDigest = [u8; 16];

/// The digests that were queued for the ledger last. A conversation with one of them waits for the queue.
#[derive(Default)]
pub struct RecentTurns(Mutex<(VecDeque<TurnDigest>, HashSet<TurnDigest>)>);

impl RecentTurns {
    pub fn add(&self, digest: TurnDigest) {
        let mut state = self.0.lock();
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
        self.0.lock().1.contains(digest)
    }
}

// Bounds how many long texts are tokenized at once: no engine slot does, and a byte takes about 70 bytes of memory.

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
    /// Waits for a place and runs `work` on a blocking thread. Fails if `work` panicked.
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

/// A valid request for text.
#[derive(Debug, PartialEq)]
pub struct ClientRequest {
    pub model: String,
    pub endpoint: ClientEndpoint,
    /// The conversation; empty for texts without roles.
    pub messages: Vec<Message>,
    /// Functions, and variables of the chat template.
    pub chat: ChatOptions,
    /// Sampling parameters, with the client's seed or a random one.
    pub params: SamplingParams,
    pub stop: Vec<String>,
    /// What constrains the text.
    pub grammar: Option<RequestedGrammar>,
    /// Number of choices for each prompt.
    pub choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub logprobs: Option<u8>,
    /// Whether the response has the tokens of prompt and choices.
    pub token_ids: bool,
    /// Whether log-probabilities include that of a stop token, which has no text.
    pub reports_stop: bool,
    pub metadata: BTreeMap<String, String>,
    /// The client's id of its end user, who meets one version throughout a canary.
    pub user: Option<String>,
    /// Whether the client wants the completion to be kept.
    pub store: Option<bool>,
    pub stream: bool,
    pub names: FieldNames,
}

/// The fields of a request that errors may refer to after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// The token limit.
    pub max_tokens: &'static str,
    /// The conversation or the texts.
    pub prompt: &'static str,
    /// The schema of a function's arguments, within an entry of `tools`.
    pub parameters: &'static str,
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
    /// The tokens that `text` completes, without stop tokens; empty unless requested.
    pub tokens: Vec<Token>,
    /// The tokens since the last update that had some; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub finish: Option<FinishReason>,
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
            ..Self::default()
        }
    }

    /// Tokens of the prompt that came from the engine's prefix cache; 0 if that is unknown.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }
}
