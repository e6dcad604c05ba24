//! One generation from its first token to its last event. Every engine uses it.

use std::convert::Infallible;
use std::sync::Arc;

use prometheus::IntCounter;
use tokio::sync::{mpsc, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, SamplingParams, TokenId};

use crate::admission::Lease;
use crate::api::{Event, GenerateRequest, Generation, Priority, Token};
use crate::codec::{Codec, TextStream};
use crate::error::EngineError;
use crate::sampling;

pub use crate::admission::{CancelFlag, CancelReason};

/// Checks a request against the model and returns its token limit, which is at least 1.
///
/// # Errors
/// [`EngineError::Invalid`] or [`EngineError::PromptTooLong`].
pub fn check(request: &GenerateRequest, context: usize, vocab: usize) -> Result<u32, EngineError> {
    sampling::check(&request.params)?;
    let prompt = request.prompt_ids.len();
    if prompt == 0 {
        return Err(EngineError::Invalid("the prompt has no tokens".to_owned()));
    }
    if prompt >= context {
        return Err(EngineError::PromptTooLong { prompt, context });
    }
    let SamplingParams { logit_bias, stop_token_ids, min_tokens, ignore_eos, .. } = &request.params;
    let ids = request.prompt_ids.iter().chain(&request.scored);
    let mut ids = ids.chain(logit_bias.keys()).chain(stop_token_ids);
    if let Some(id) = ids.find(|id| **id as usize >= vocab) {
        return Err(EngineError::Invalid(format!(
            "token {id} does not exist; the model's vocabulary holds {vocab}"
        )));
    }
    if request.grammar.is_some() && (*min_tokens > 0 || *ignore_eos) {
        return Err(EngineError::Invalid(
            "a grammar decides where the text ends; min_tokens and ignore_eos cannot apply"
                .to_owned(),
        ));
    }
    let free = u32::try_from(context - prompt).unwrap_or(u32::MAX);
    Ok(request.params.max_tokens.min(free))
}

/// The writing end of a [`Generation`]: turns sampled tokens into events and decides when the
/// generation ends.
pub struct GenerationRun {
    text: TextStream,
    /// Tokens that end the generation.
    stops: Vec<TokenId>,
    includes_stop: bool,
    events: mpsc::Sender<Event>,
    /// Dropped after the last event.
    _ends: oneshot::Sender<Infallible>,
    /// Tokens of a shadow sequence. Its reader only needs the whole completion, so they are sent at
    /// the end and wake the reader once.
    shadow_tokens: Vec<Token>,
    lease: Lease,
    produced: u32,
    limit: u32,
    /// Tokens of the prompt that the engine found in its prefix cache.
    cached_tokens: usize,
    outcome: Option<Result<(FinishReason, String), EngineError>>,
    token_counter: IntCounter,
    metrics: Arc<Metrics>,
}

impl GenerationRun {
    /// Creates both ends of a generation that ends after `limit` tokens at the latest.
    ///
    /// The channel holds all its events, so that the thread that computes never waits for a reader.
    pub fn new(
        codec: &Arc<Codec>,
        request: &GenerateRequest,
        limit: u32,
        lease: Lease,
        metrics: &Arc<Metrics>,
    ) -> (Self, Generation) {
        let (sender, receiver) = mpsc::channel(limit as usize + 1);
        let label = match lease.priority {
            Priority::Live => "live",
            Priority::Shadow => "shadow",
        };
        let (ends, ended) = oneshot::channel();
        let generation = Generation { version: lease.version, events: receiver, ended };
        let SamplingParams { stop_token_ids, include_stop, .. } = &request.params;
        let text = TextStream::new(Arc::clone(codec), &request.stop).including_stop(*include_stop);
        let run = Self {
            text,
            // A text that is scored may contain them.
            stops: match request.scored.is_empty() {
                true => codec.stop_ids().iter().chain(stop_token_ids).copied().collect(),
                false => Vec::new(),
            },
            includes_stop: *include_stop,
            events: sender,
            _ends: ends,
            shadow_tokens: Vec::new(),
            lease,
            produced: 0,
            limit,
            cached_tokens: 0,
            outcome: None,
            token_counter: metrics.engine_tokens.with_label_values(&[label]),
            metrics: Arc::clone(metrics),
        };
        (run, generation)
    }

    /// Counts tokens of the prompt that the engine found in its prefix cache, for the last event.
    pub fn count_cached(&mut self, tokens: usize) {
        self.cached_tokens += tokens;
    }

    /// Whether no further token should be computed, because the generation has ended or was
    /// cancelled.
    pub fn is_over(&self) -> bool {
        if self.events.is_closed() {
            self.lease.cancel.set(CancelReason::ReaderGone);
        }
        self.outcome.is_some() || self.lease.cancel.get().is_some()
    }

    /// Reports a sampled token, whose text it fills in. Returns [`Self::is_over`].
    pub fn push(&mut self, mut token: Token) -> bool {
        self.produced += 1;
        self.token_counter.inc();
        if self.stops.contains(&token.id) {
            if self.includes_stop {
                // None for a special token.
                token.text = self.text.push(token.id).text;
            }
            self.outcome = Some(Ok((FinishReason::Stop, self.text.finish().text)));
        } else {
            let piece = self.text.push(token.id);
            token.text = piece.text;
            if piece.stopped {
                self.outcome = Some(Ok((FinishReason::Stop, String::new())));
            } else if self.produced >= self.limit {
                let rest = self.text.finish();
                let finish = if rest.stopped { FinishReason::Stop } else { FinishReason::Length };
                self.outcome = Some(Ok((finish, rest.text)));
            }
        }
        if self.lease.priority == Priority::Shadow {
            self.shadow_tokens.push(token);
        } else if self.events.try_send(Event::Token(token)).is_err() {
            self.lease.cancel.set(CancelReason::ReaderGone);
        }
        self.is_over()
    }

    /// Ends the generation with an error, unless it has already ended.
    pub fn fail(&mut self, error: EngineError) {
        self.outcome.get_or_insert(Err(error));
    }

    /// Frees the slot, then sends the last event. The computation must have stopped.
    pub fn finish(self) {
        let cancelled = self.lease.cancel.get();
        drop(self.lease);
        let event = match (self.outcome, cancelled) {
            (Some(Ok((finish, text))), _) => {
                Event::Done { finish, text, cached_tokens: self.cached_tokens }
            }
            (Some(Err(error)), _) => {
                // A client's grammar is no sign of a broken engine.
                if !error.is_of_grammar() {
                    self.metrics.engine_failures.inc();
                }
                tracing::warn!(%error, "a generation failed");
                Event::Failed(error)
            }
            (None, Some(CancelReason::Preempted)) => Event::Failed(EngineError::Preempted),
            (None, Some(CancelReason::ShuttingDown)) => Event::Failed(EngineError::ShuttingDown),
            (None, Some(CancelReason::ReaderGone)) => return,
            (None, None) => {
                self.metrics.engine_failures.inc();
                tracing::warn!("a generation ended before its last token");
                Event::Failed(EngineError::Internal("the sequence ended too early".to_owned()))
            }
        };
        for event in self.shadow_tokens.into_iter().map(Event::Token).chain([event]) {
            // Fails only if the reader is gone.
            let _ = self.events.try_send(event);
        }
    }
}
