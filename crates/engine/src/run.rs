//! One generation from its first token to its last event, whoever computes the logits.

use std::sync::Arc;

use prometheus::IntCounter;
use tokio::sync::mpsc;

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, PolicyVersion};

use super::admission::Lease;
use super::{Codec, EngineError, Event, GenerateRequest, Generation, Priority, TextStream, Token};
use crate::sampling;
use crate::sampling::Drawn;

pub use super::admission::{Cancel, CancelFlag};

/// Checks a request against the model and returns how many tokens it may have.
///
/// # Errors
/// [`EngineError::Invalid`] or [`EngineError::PromptTooLong`].
pub fn check(request: &GenerateRequest, context: usize, vocab: usize) -> Result<u32, EngineError> {
    sampling::check(&request.params)?;
    let prompt = request.prompt_ids.len();
    if prompt == 0 {
        return Err(EngineError::Invalid("the prompt holds no token".to_owned()));
    }
    if prompt >= context {
        return Err(EngineError::PromptTooLong { prompt, context });
    }
    let biased = request.params.logit_bias.keys();
    if let Some(id) = request.prompt_ids.iter().chain(biased).find(|id| **id as usize >= vocab) {
        return Err(EngineError::Invalid(format!(
            "token {id} does not exist; the model's vocabulary holds {vocab}"
        )));
    }
    let room = u32::try_from(context - prompt).unwrap_or(u32::MAX);
    Ok(request.params.max_tokens.min(room))
}

/// Who runs, on what.
pub struct SequenceSlot {
    /// The version every token comes from.
    pub version: PolicyVersion,
    /// Live or shadow.
    pub priority: Priority,
    /// Asks the sequence to end early.
    pub cancel: Arc<CancelFlag>,
    /// The slot, where there are slots to give back.
    pub lease: Option<Lease>,
}

impl From<Lease> for SequenceSlot {
    fn from(lease: Lease) -> Self {
        let (version, priority, cancel) =
            (lease.version, lease.priority, Arc::clone(&lease.cancel));
        Self { version, priority, cancel, lease: Some(lease) }
    }
}

/// Turns drawn tokens into events and decides when the generation ends.
pub struct GenerationRun {
    codec: Arc<Codec>,
    text: TextStream,
    events: mpsc::Sender<Event>,
    /// A shadow's tokens, which nobody reads before its end: sent then, they wake the reader once.
    held: Vec<Token>,
    seat: SequenceSlot,
    produced: u32,
    limit: u32,
    outcome: Option<Result<(FinishReason, String), EngineError>>,
    tokens: IntCounter,
    metrics: Arc<Metrics>,
}

impl GenerationRun {
    /// A run that holds `seat` until its end, and the generation that reads it. Its channel holds
    /// every event of `limit` tokens, so that whoever computes them never waits for a reader.
    pub fn new(
        codec: &Arc<Codec>,
        stop: &[String],
        limit: u32,
        seat: impl Into<SequenceSlot>,
        metrics: &Arc<Metrics>,
    ) -> (Self, Generation) {
        let (sender, receiver) = mpsc::channel(limit as usize + 1);
        let seat = seat.into();
        let label = match seat.priority {
            Priority::Live => "live",
            Priority::Shadow => "shadow",
        };
        let generation = Generation { version: seat.version, events: receiver };
        let run = Self {
            codec: Arc::clone(codec),
            text: TextStream::new(Arc::clone(codec), stop),
            events: sender,
            held: Vec::new(),
            seat,
            produced: 0,
            limit,
            outcome: None,
            tokens: metrics.engine_tokens.with_label_values(&[label]),
            metrics: Arc::clone(metrics),
        };
        (run, generation)
    }

    /// Whether no further token should be computed: it has ended, or somebody asked for that.
    pub fn is_over(&self) -> bool {
        if self.events.is_closed() {
            self.seat.cancel.set(Cancel::Gone);
        }
        self.outcome.is_some() || self.seat.cancel.get().is_some()
    }

    /// Reports a drawn token. Returns whether it was the last.
    pub fn push(&mut self, drawn: Drawn) -> bool {
        self.produced += 1;
        self.tokens.inc();
        let mut text = String::new();
        if self.codec.stop_ids().contains(&drawn.id) {
            self.outcome = Some(Ok((FinishReason::Stop, self.text.finish().text)));
        } else {
            let piece = self.text.push(drawn.id);
            text = piece.text;
            if piece.stopped {
                self.outcome = Some(Ok((FinishReason::Stop, String::new())));
            } else if self.produced >= self.limit {
                let rest = self.text.finish();
                let finish = if rest.stopped { FinishReason::Stop } else { FinishReason::Length };
                self.outcome = Some(Ok((finish, rest.text)));
            }
        }
        let Drawn { id, logprob, kept_mass, top } = drawn;
        let token = Token { id, logprob, kept_mass, top, text };
        if self.seat.priority == Priority::Shadow {
            self.held.push(token);
        } else if self.events.try_send(Event::Token(token)).is_err() {
            self.seat.cancel.set(Cancel::Gone);
        }
        self.is_over()
    }

    /// Ends the run with an error, unless it has ended already.
    pub fn fail(&mut self, error: EngineError) {
        self.outcome.get_or_insert(Err(error));
    }

    /// Gives the slot back, then sends the last event. The computation must have stopped.
    pub fn conclude(self) {
        let asked = self.seat.cancel.get();
        drop(self.seat.lease);
        for token in self.held {
            // As for the last event: nobody may be reading any more.
            let _ = self.events.try_send(Event::Token(token));
        }
        let event = match (self.outcome, asked) {
            (Some(Ok((finish, text))), _) => Event::Done { finish, text },
            (Some(Err(error)), _) => {
                self.metrics.engine_failures.inc();
                tracing::warn!(%error, "a generation failed");
                Event::Failed(error)
            }
            (None, Some(Cancel::Preempted)) => Event::Failed(EngineError::Preempted),
            (None, Some(Cancel::ShuttingDown)) => Event::Failed(EngineError::ShuttingDown),
            (None, Some(Cancel::Gone)) => return,
            (None, None) => {
                self.metrics.engine_failures.inc();
                tracing::warn!("a generation ended before its last token");
                Event::Failed(EngineError::Internal("the sequence ended too early".to_owned()))
            }
        };
        // Nobody may be reading any more.
        let _ = self.events.try_send(event);
    }
}
