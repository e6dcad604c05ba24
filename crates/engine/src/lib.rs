//! Token generation behind a small trait over plain data.
//!
//! [`Engine`] serves, [`Publisher`] changes what is served. `mistral` and `exchange` are the only
//! files that know mistral.rs; [`fake`] implements both traits for tests without a model.
//!
//! Invariants: a [`Generation`] comes from exactly one policy version from its first token to its
//! last; reported log-probabilities are natural logarithms under the behaviour policy; publishing
//! never fails, delays or alters a running generation.

pub mod admission;
pub mod codec;
mod config;
pub mod fake;
pub mod model_dir;
pub mod run;
pub mod sampling;
pub mod template;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

use hone_core::types::{FinishReason, PolicyVersion, SamplingParams, TokenId};

pub use codec::{Codec, TextStream};
pub use config::EngineConfig;
pub use fake::FakeEngine;
pub use model_dir::ModelDir;

/// What can go wrong between a prompt and its tokens.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The bounded queue is full: answer 429.
    #[error("all {slots} slots are busy and {queued} requests are waiting already")]
    Overloaded {
        /// Sequences that can run at once.
        slots: usize,
        /// Requests in the queue.
        queued: usize,
    },
    /// The prompt leaves no room for a token.
    #[error("the prompt has {prompt} tokens; the model's context holds {context}")]
    PromptTooLong {
        /// Prompt length in tokens.
        prompt: usize,
        /// Context length in tokens.
        context: usize,
    },
    /// The request cannot be served as asked.
    #[error("{0}")]
    Invalid(String),
    /// The model directory cannot be served.
    #[error("{0}")]
    Model(String),
    /// A shadow generation gave way to live traffic; ask again with the same seed.
    #[error("preempted by live traffic")]
    Preempted,
    /// The daemon is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine failed.
    #[error("engine failure: {0}")]
    Internal(String),
}

/// Who is waiting for the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A client: goes first, may preempt shadows.
    Live,
    /// Training or evaluation: runs in spare capacity only.
    Shadow,
}

/// One sequence to generate.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The exact prompt.
    pub prompt_ids: Vec<TokenId>,
    /// How to sample, including the seed and the token limit.
    pub params: SamplingParams,
    /// Text at which to stop; not part of the returned text.
    pub stop: Vec<String>,
    /// How many alternatives to report per token, at most 20.
    pub top_logprobs: u8,
    /// Live or shadow.
    pub priority: Priority,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// Natural-log probability under the behaviour policy (after temperature and truncation).
    pub logprob: f32,
    /// Probability mass the truncation kept; 1 without truncation.
    pub kept_mass: f32,
    /// The most probable alternatives `(id, ln p)`, best first.
    pub top: Vec<(TokenId, f32)>,
    /// Text that became complete with this token: whole UTF-8 only, often empty; never text of a
    /// stop token or at or after a stop string.
    pub text: String,
}

/// What a running generation reports, in order: tokens, then exactly one `Done` or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// One more token.
    Token(Token),
    /// The end, with any text held back for a possible stop string.
    Done {
        /// Why it ended.
        finish: FinishReason,
        /// Text released at the end.
        text: String,
    },
    /// The end, without a result.
    Failed(EngineError),
}

/// A running generation. Dropping it cancels the sequence and frees its slot.
#[derive(Debug)]
pub struct Generation {
    /// The version that produces every token of it.
    pub version: PolicyVersion,
    /// Its events.
    pub events: mpsc::Receiver<Event>,
}

/// A whole completion, collected from a [`Generation`].
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The version that produced it.
    pub version: PolicyVersion,
    /// Every sampled token, stop token included.
    pub tokens: Vec<Token>,
    /// The text without stop token or stop string.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
}

impl Generation {
    /// Waits for the end and returns everything.
    pub async fn collect(mut self) -> Result<Completion, EngineError> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut text = String::new();
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Token(token) => {
                    text.push_str(&token.text);
                    tokens.push(token);
                }
                Event::Done { finish, text: rest } => {
                    text.push_str(&rest);
                    return Ok(Completion { version: self.version, tokens, text, finish });
                }
                Event::Failed(error) => return Err(error),
            }
        }
        Err(EngineError::Internal("the generation ended without a last event".to_owned()))
    }
}

/// What is known of the served model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The model's own name, as `/v1/models` lists it.
    pub name: String,
    /// Context length in tokens, prompt and completion together.
    pub context: usize,
    /// Logits per position.
    pub vocab: usize,
    /// Sequences that can run at once.
    pub slots: usize,
}

/// How busy the engine is, for metrics and admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Sequences running for clients.
    pub live_running: usize,
    /// Sequences running for training.
    pub shadow_running: usize,
    /// Live requests waiting.
    pub live_waiting: usize,
    /// Shadow requests waiting.
    pub shadow_waiting: usize,
}

/// Serves tokens.
#[async_trait]
pub trait Engine: Send + Sync {
    /// The served model.
    fn info(&self) -> &ModelInfo;

    /// Tokenizer, chat template and stop tokens of the served model.
    fn codec(&self) -> &Arc<Codec>;

    /// Starts a generation on the active version, waiting for a slot if need be.
    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError>;

    /// The version that new requests get.
    fn active_version(&self) -> PolicyVersion;

    /// How busy it is now.
    fn load(&self) -> EngineLoad;
}

/// Changes what an engine serves. One caller at a time (`policy` holds the lock).
#[async_trait]
pub trait Publisher: Send + Sync {
    /// Loads a version beside the active one, waiting until the idle colour has no request left.
    /// `adapter` is a PEFT directory; `None` is the base. A version that is loaded already is kept.
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError>;

    /// Samples from the staged version: the tokens and their behaviour log-probabilities.
    async fn probe(
        &self,
        prompt_ids: &[TokenId],
        params: &SamplingParams,
    ) -> Result<Vec<(TokenId, f32)>, EngineError>;

    /// Makes the staged version the one that new requests get; returns how long the exchange held
    /// anything up. Running requests stay where they are.
    async fn activate(&self) -> Result<Duration, EngineError>;
}
