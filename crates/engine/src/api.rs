//! The traits of an engine and the plain data that they exchange.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, PolicyVersion, SamplingParams, TokenId, TokenSpan};

use crate::admission::Owner;
use crate::codec::Codec;
use crate::error::EngineError;
use crate::grammar::CompiledGrammar;

/// The scheduling class of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A client waits: goes first and may preempt shadow requests.
    Live,
    /// Training or evaluation: uses spare capacity only.
    Shadow,
}

/// One sequence to generate.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The exact prompt; no token is added.
    pub prompt_ids: Vec<TokenId>,
    /// Sampling parameters, with the seed and the token limit.
    pub params: SamplingParams,
    /// Strings that end the completion. They are not part of the returned text.
    pub stop: Vec<String>,
    /// Number of alternatives to report for each token, at most 20.
    pub top_logprobs: u8,
    /// The scheduling class.
    pub priority: Priority,
    /// The API key that the request is for, among which waiting live requests take turns.
    pub owner: Owner,
    /// The version to sample from, such as a canary; `None`, and a version that the engine does not
    /// hold, mean the active one.
    pub version: Option<PolicyVersion>,
    /// What constrains the text; [`Codec::compile_grammar`] makes it.
    pub grammar: Option<Arc<CompiledGrammar>>,
    /// Tokens that are taken in place of sampled ones, because their log-probabilities are wanted; empty to sample.
    pub scored: Vec<TokenId>,
}

impl GenerateRequest {
    /// A request to the active version, without stop strings, alternatives, key and grammar.
    pub fn new(prompt_ids: Vec<TokenId>, params: SamplingParams, priority: Priority) -> Self {
        Self {
            prompt_ids,
            params,
            stop: Vec::new(),
            top_logprobs: 0,
            priority,
            owner: None,
            version: None,
            grammar: None,
            scored: Vec::new(),
        }
    }

    /// A request for the log-probabilities of tokens after others, at a temperature of 1. Of `scored` only the last may
    /// be a stop token, because mistral.rs computes nothing after one.
    pub fn score(ids: &[TokenId], scored: &[TokenId], top_logprobs: u8) -> Self {
        let max_tokens = u32::try_from(scored.len()).unwrap_or(u32::MAX);
        let params = SamplingParams { temperature: 0.0, max_tokens, ..SamplingParams::default() };
        let request = Self::new(ids.to_vec(), params, Priority::Live);
        Self { top_logprobs, scored: scored.to_vec(), ..request }
    }

    /// A request that no client waits for.
    pub fn probe(prompt_ids: &[TokenId], params: &SamplingParams) -> Self {
        Self::new(prompt_ids.to_vec(), params.clone(), Priority::Shadow)
    }
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The vocabulary index.
    pub id: TokenId,
    /// Natural-log probability under the behavior policy. At temperature 0, where that would always
    /// be 0, it is that of `softmax(raw logits)`.
    pub logprob: f32,
    /// Probability mass that the grammar, excluded stop tokens and truncation kept; 1 without them.
    pub kept_mass: f32,
    /// Whether it was the only token that the grammar permitted, or one of the stop tokens where the text
    /// had to end. Also true where the permitted tokens were so improbable together that their mass is
    /// meaningless. Such a token says nothing about the policy.
    pub forced: bool,
    /// The most probable alternatives `(id, ln p)`, best first; at most as many as could be drawn.
    pub top: Vec<(TokenId, f32)>,
    /// Text that became complete with this token: whole UTF-8 characters, often empty; no text of a stop
    /// token and none at or after a stop string, unless the parameters include it.
    pub text: String,
}

impl Token {
    /// The natural-log probability before truncation and grammar.
    pub fn full_logprob(&self) -> f32 {
        self.logprob + self.kept_mass.ln()
    }
}

// What the ledger records of sampled tokens.

/// The sampled tokens of one completion, as [`Sample`](hone_core::types::Sample) has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenRecords {
    /// The tokens, the stop token included.
    pub ids: Vec<TokenId>,
    /// The log-probability of each.
    pub logprobs: Vec<f32>,
    kept: Vec<f32>,
    /// Positions of forced tokens, in order.
    pub forced: Vec<TokenSpan>,
}

impl TokenRecords {
    /// Adds a token.
    pub fn push(&mut self, token: &Token) {
        if token.forced {
            TokenSpan::append(&mut self.forced, self.ids.len());
        }
        self.ids.push(token.id);
        self.logprobs.push(token.logprob);
        self.kept.push(token.kept_mass);
    }

    /// The mass that was kept at each token; empty if it was 1 at all of them.
    pub fn kept(&self) -> Vec<f32> {
        let all = self.kept.iter().all(|mass| *mass == 1.0);
        if all { Vec::new() } else { self.kept.clone() }
    }
}

impl<'a> FromIterator<&'a Token> for TokenRecords {
    fn from_iter<T: IntoIterator<Item = &'a Token>>(tokens: T) -> Self {
        let mut records = Self::default();
        tokens.into_iter().for_each(|token| records.push(token));
        records
    }
}

/// An event of a running generation. Tokens come first, then exactly one `Done` or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The next token.
    Token(Token),
    /// The regular end.
    Done {
        /// Why the completion ended.
        finish: FinishReason,
        /// Text that was held back because it could begin a stop string.
        text: String,
        /// Tokens of the prompt whose keys and values came from the engine's prefix cache.
        cached_tokens: usize,
    },
    /// The end without a completion.
    Failed(EngineError),
}

/// A running generation. Dropping it cancels the sequence and frees its slot.
#[derive(Debug)]
pub struct Generation {
    /// The version that produces every token.
    pub version: PolicyVersion,
    /// The events; closes after the last one.
    pub events: mpsc::Receiver<Event>,
    /// Completes, with an error, when no further event will be added to `events`. A reader that waits for it
    /// is not woken by each token.
    pub ended: oneshot::Receiver<Infallible>,
}

/// A whole completion, collected from a [`Generation`].
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The version that produced it.
    pub version: PolicyVersion,
    /// Every sampled token, the stop token included.
    pub tokens: Vec<Token>,
    /// The text, without stop token and stop string.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
}

impl Completion {
    /// The id and the log-probability of every sampled token, before truncation and grammar.
    pub fn token_logprobs(&self) -> Vec<(TokenId, f32)> {
        self.tokens.iter().map(|token| (token.id, token.full_logprob())).collect()
    }
}

impl Generation {
    /// Waits for the end and returns the completion.
    ///
    /// # Errors
    /// The error of [`Event::Failed`], or [`EngineError::Internal`] if the last event is missing.
    pub async fn collect(mut self) -> Result<Completion, EngineError> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut text = String::new();
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Token(token) => {
                    text.push_str(&token.text);
                    tokens.push(token);
                }
                Event::Done { finish, text: rest, .. } => {
                    text.push_str(&rest);
                    return Ok(Completion { version: self.version, tokens, text, finish });
                }
                Event::Failed(error) => return Err(error),
            }
        }
        Err(EngineError::Internal("the generation ended without a last event".to_owned()))
    }
}

/// Properties of the served model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The name that `/v1/models` lists.
    pub name: String,
    /// Context length in tokens, prompt and completion together.
    pub context: usize,
    /// Logits per position.
    pub vocab: usize,
    /// Sequences that can run at once.
    pub slots: usize,
}

/// Running and waiting requests, for metrics and admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Live sequences that run.
    pub live_running: usize,
    /// Shadow sequences that run.
    pub shadow_running: usize,
    /// Live requests that wait for a slot.
    pub live_waiting: usize,
    /// Shadow requests that wait for a slot.
    pub shadow_waiting: usize,
}

impl EngineLoad {
    /// Sets the gauges of the engine that answers clients.
    pub fn export(self, metrics: &Metrics) {
        for (gauge, live, shadow) in [
            (&metrics.engine_slots, self.live_running, self.shadow_running),
            (&metrics.engine_waiting, self.live_waiting, self.shadow_waiting),
        ] {
            gauge.with_label_values(&["live"]).set(i64::try_from(live).unwrap_or(i64::MAX));
            gauge.with_label_values(&["shadow"]).set(i64::try_from(shadow).unwrap_or(i64::MAX));
        }
    }
}

/// Generates tokens.
#[async_trait]
pub trait Engine: Send + Sync {
    /// The served model.
    fn info(&self) -> &ModelInfo;

    /// Tokenizer, chat template and stop tokens of the served model.
    fn codec(&self) -> &Arc<Codec>;

    /// Starts a generation on the active version, after waiting for a slot.
    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError>;

    /// Whether `choices` live requests of `owner` would get a slot or a place in the queue now, so that
    /// a caller can do without the work of making them.
    ///
    /// # Errors
    /// The error with which [`Self::generate`] would refuse them, or [`EngineError::TooManyChoices`] if it
    /// always would.
    fn admits(&self, _owner: &Owner, _choices: usize) -> Result<(), EngineError> {
        Ok(())
    }

    /// Why requests fail, or some of them; `None` if they do not. A sentence for readiness checks.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// The version that new requests get.
    fn active_version(&self) -> PolicyVersion;

    /// The current load.
    fn load(&self) -> EngineLoad;
}

/// Changes the version that an engine serves: stage, probe, activate.
///
/// One caller at a time; `policy` holds the lock.
#[async_trait]
pub trait Publisher: Send + Sync {
    /// Loads a version next to the active one, once the idle color runs no request. `adapter` is a
    /// PEFT directory; `None` is the base model. A version that is already loaded is reused.
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError>;

    /// Completes a prompt with the staged version, on every engine that answers clients or makes training
    /// data.
    async fn probe(&self, request: GenerateRequest) -> Result<Vec<Probe>, EngineError> {
        let tokens = self.complete_staged(request).await?.token_logprobs();
        Ok(vec![Probe { sampler: "serving", dtype: "f32", tokens }])
    }

    /// Completes a prompt with the staged version, on the engine that makes training data.
    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError>;

    /// Makes the staged version the active one. Running requests keep their version. Returns how
    /// long the exchange blocked other work.
    async fn activate(&self) -> Result<Duration, EngineError>;

    /// Serves a version to new requests at once, without waiting for another engine to load it, until
    /// the next [`Self::activate`]. Returns false, without any effect, if no engine can do that. May be
    /// called while another call is in progress.
    async fn serve_now(
        &self,
        _version: PolicyVersion,
        _adapter: Option<&Path>,
    ) -> Result<bool, EngineError> {
        Ok(false)
    }

    /// Serves the staged version to requests that name it, beside the active one, until the next
    /// [`Self::stage`], [`Self::activate`] or [`Self::end_canary`]. Returns false if no engine can
    /// serve two versions.
    async fn begin_canary(&self) -> Result<bool, EngineError> {
        Ok(false)
    }

    /// Ends a canary: requests that name it get the active version.
    fn end_canary(&self) {}
}

/// What one engine sampled from the staged version.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// The engine: `serving` or `rollout`.
    pub sampler: &'static str,
    /// The data type of its products, which bounds how exactly it can agree with the trainer.
    pub dtype: &'static str,
    /// The tokens with their behavior log-probabilities.
    pub tokens: Vec<(TokenId, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: TokenId, kept_mass: f32, forced: bool) -> Token {
        Token { id, logprob: -0.5, kept_mass, forced, top: Vec::new(), text: String::new() }
    }

    #[test]
    fn forced_positions_and_kept_masses_are_recorded_if_there_are_any() {
        let plain: TokenRecords = [token(1, 1.0, false), token(2, 1.0, false)].iter().collect();
        assert_eq!((plain.kept(), plain.forced.len()), (Vec::new(), 0));
        let mixed = [token(1, 0.5, true), token(2, 1.0, false), token(3, 0.25, true)];
        let mixed: TokenRecords = mixed.iter().collect();
        assert_eq!((mixed.ids.clone(), mixed.kept()), (vec![1, 2, 3], vec![0.5, 1.0, 0.25]));
        assert_eq!(TokenSpan::mask(&mixed.forced, 3), [true, false, true]);
    }
}
