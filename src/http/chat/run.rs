//! Samples the choices of one chat request, reports their progress and records them.
//!
//! Invariants: a choice is queued for the ledger before its end is reported, so that feedback sent
//! right after finds it; a run that is dropped early cancels its generations and records the sampled
//! tokens as cancelled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::stream::{BoxStream, SelectAll, StreamExt};

use hone_core::types::{FinishReason, Interaction, PolicyVersion, Sample, SamplingParams};
use hone_engine::answer::AnswerForm;
use hone_engine::{EngineError, GenerateRequest, Priority};
use hone_store::Op;
use hone_train::TrainState;

use super::choice::{ChoiceEvent, ChoiceState, choice_events, choice_seed};
use super::request::ChatRequest;
use super::wire::{ChatCompletion, Choice, CompletionTokens, Delta, Logprobs, TokenLogprob, Usage};
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// The progress of one choice since its last update.
pub(super) struct ChoiceUpdate {
    pub(super) index: u32,
    pub(super) version: PolicyVersion,
    pub(super) started: bool,
    /// Changes of the message.
    pub(super) deltas: Vec<Delta>,
    /// Of the tokens that `deltas` completes; empty unless requested.
    pub(super) logprobs: Vec<TokenLogprob>,
    /// OpenAI's `finish_reason`.
    pub(super) finish: Option<&'static str>,
}

/// A running request.
pub(super) struct ChatRun {
    state: Arc<AppState>,
    pub(super) interaction: Arc<Interaction>,
    top_logprobs: Option<u8>,
    /// Whether answers may have reasoning.
    may_reason: bool,
    arrived: Instant,
    choices: Vec<ChoiceState>,
    events: SelectAll<BoxStream<'static, (usize, ChoiceEvent)>>,
    /// Events that [`Self::start`] took from `events` already.
    buffered: VecDeque<(usize, ChoiceEvent)>,
    served: Vec<Sample>,
    interaction_recorded: bool,
    first_token_recorded: bool,
    /// The run ended with an error, so dropping it early is not a client's disconnect.
    failed: bool,
}

impl ChatRun {
    /// Submits every choice to the engine at once.
    pub(super) fn new(
        state: Arc<AppState>,
        interaction: Arc<Interaction>,
        request: &ChatRequest,
        form: &AnswerForm,
        arrived: Instant,
    ) -> Self {
        let mut events = SelectAll::new();
        let mut choices = Vec::new();
        // One version for all choices, and for all requests of a session or user.
        let session = interaction.session().or(request.user.as_deref());
        let version = match session {
            Some(key) => state.policies.assign(key),
            None => state.policies.assign(&interaction.id.to_string()),
        };
        for index in 0..request.choices {
            let seed = choice_seed(request.params.seed, index);
            let params = SamplingParams { seed, ..request.params.clone() };
            let generation = GenerateRequest {
                prompt_ids: interaction.prompt_ids.clone(),
                params: params.clone(),
                stop: request.stop.clone(),
                top_logprobs: request.logprobs.unwrap_or(0),
                priority: Priority::Live,
                version,
            };
            events.push(choice_events(state.engine.clone(), generation, choices.len()));
            choices.push(ChoiceState::new(params, form));
        }
        Self {
            state,
            interaction,
            top_logprobs: request.logprobs,
            may_reason: form.may_reason(),
            arrived,
            choices,
            events,
            buffered: VecDeque::new(),
            served: Vec::new(),
            interaction_recorded: false,
            first_token_recorded: false,
            failed: false,
        }
    }

    /// Waits until a choice has started. Fails if a choice is refused before that, or is known to be
    /// refused by then. Returns the version of the first choice to start.
    pub(super) async fn start(&mut self) -> Result<PolicyVersion, ApiError> {
        let mut first = None;
        while first.is_none() || self.buffered.len() < self.choices.len() {
            let event = match first {
                None => self.events.next().await,
                Some(_) => self.events.next().now_or_never().flatten(),
            };
            match event {
                Some((index, ChoiceEvent::Failed(error))) => return Err(self.fail(index, error)),
                Some(event) => {
                    if let (None, ChoiceEvent::Started(version)) = (first, &event.1) {
                        first = Some(*version);
                    }
                    self.buffered.push_back(event);
                }
                None => break,
            }
        }
        first.ok_or_else(ApiError::internal)
    }

    /// The next update; `None` when every choice has ended and is queued for the ledger.
    pub(super) async fn next(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        if self.has_ended() {
            return None;
        }
        let event = match self.buffered.pop_front() {
            Some(event) => Some(event),
            None => self.events.next().await,
        };
        Some(match event {
            Some((index, event)) => self.apply(index, event),
            None => {
                self.failed = true;
                Err(ApiError::internal())
            }
        })
    }

    /// Runs to the end and returns the whole response with choice 0's version.
    pub(super) async fn finish(mut self) -> Result<(PolicyVersion, ChatCompletion), ApiError> {
        let mut logprobs: Vec<Vec<TokenLogprob>> =
            self.choices.iter().map(|_| Vec::new()).collect();
        while let Some(update) = self.next().await {
            let update = update?;
            if let Some(logprobs) = logprobs.get_mut(update.index as usize) {
                logprobs.extend(update.logprobs);
            }
        }
        let version = self.choices.first().and_then(|c| c.version).unwrap_or_default();
        let wants_logprobs = self.wants_logprobs();
        let choices = self.choices.iter_mut().zip(logprobs).zip(0..);
        let choices = choices.map(|((choice, logprobs), index)| Choice {
            index,
            finish_reason: choice.answer.finish_reason(choice.finish.unwrap_or(FinishReason::Stop)),
            message: choice.answer.take_message(),
            logprobs: wants_logprobs.then(|| Logprobs::new(logprobs)),
        });
        let completion = ChatCompletion {
            id: self.interaction.id.completion_id(),
            object: "chat.completion",
            created: self.interaction.created / 1000,
            model: self.interaction.model.clone(),
            system_fingerprint: version.fingerprint(),
            choices: choices.collect(),
            usage: self.usage(),
        };
        Ok((version, completion))
    }

    /// Token counts so far. The prompt is counted once, not for each choice.
    pub(super) fn usage(&self) -> Usage {
        let prompt_tokens = self.interaction.prompt_ids.len();
        let completion_tokens = self.choices.iter().map(|c| c.ids.len()).sum();
        let reasoning_tokens = self.choices.iter().map(|c| c.answer.reasoning_tokens()).sum();
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens_details: self
                .may_reason
                .then_some(CompletionTokens { reasoning_tokens }),
        }
    }

    pub(super) fn wants_logprobs(&self) -> bool {
        self.top_logprobs.is_some()
    }

    fn has_ended(&self) -> bool {
        self.choices.iter().all(|c| c.finish.is_some())
    }

    fn fail(&mut self, index: usize, error: EngineError) -> ApiError {
        self.failed = true;
        if let Some(version) = self.choices.get(index).and_then(|choice| choice.version) {
            self.state.policies.answered(version, true);
        }
        error.into()
    }

    fn apply(&mut self, index: usize, event: ChoiceEvent) -> Result<ChoiceUpdate, ApiError> {
        let started = matches!(event, ChoiceEvent::Started(_));
        let wants_logprobs = self.wants_logprobs();
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let deltas = match event {
            ChoiceEvent::Started(version) => {
                choice.version = Some(version);
                Vec::new()
            }
            ChoiceEvent::Token(token) => {
                let codec = self.state.engine.codec();
                if wants_logprobs && !codec.stop_ids().contains(&token.id) {
                    choice.pending.push(TokenLogprob::new(codec, &token));
                }
                choice.push(&token);
                let deltas = choice.answer.push(&token);
                self.record_first_token();
                deltas
            }
            ChoiceEvent::Done { finish: FinishReason::Cancelled, .. } => {
                return Err(self.fail(index, EngineError::ShuttingDown));
            }
            ChoiceEvent::Done { finish, text } => {
                choice.text.push_str(&text);
                let deltas = choice.answer.finish(&text);
                choice.finish = Some(finish);
                self.record(index);
                deltas
            }
            ChoiceEvent::Failed(error) => return Err(self.fail(index, error)),
        };
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let version = choice.version.unwrap_or_default();
        let finish = choice.finish.map(|finish| choice.answer.finish_reason(finish));
        // A token whose text is not complete or not certain changes nothing yet: its log-probability
        // waits for the next change.
        let complete = finish.is_some() || !deltas.is_empty();
        let logprobs = if complete { std::mem::take(&mut choice.pending) } else { Vec::new() };
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        Ok(ChoiceUpdate { index, version, started, deltas, logprobs, finish })
    }

    fn record_first_token(&mut self) {
        if std::mem::replace(&mut self.first_token_recorded, true) {
            return;
        }
        let trainer = match self.state.train.status().state {
            TrainState::Training | TrainState::Publishing => "training",
            _ => "idle",
        };
        let seconds = self.arrived.elapsed().as_secs_f64();
        let metrics = &self.state.metrics;
        metrics.http_time_to_first_token.with_label_values(&[trainer]).observe(seconds);
        metrics.http_prompt_tokens.inc_by(self.interaction.prompt_ids.len() as u64);
    }

    /// Queues an ended choice for the ledger. After the last choice, submits the prompt to rollout.
    fn record(&mut self, index: usize) {
        let choice = self.choices.get(index);
        let Some(sample) = choice.and_then(|choice| self.sample(index, choice)) else { return };
        self.state.metrics.http_completion_tokens.inc_by(sample.ids.len() as u64);
        self.state.policies.answered(sample.version, false);
        self.served.push(sample.clone());
        self.enqueue(vec![sample]);
        if self.has_ended()
            && let Some(rollout) = &self.state.rollout
        {
            rollout.submit(self.interaction.clone(), std::mem::take(&mut self.served));
        }
    }

    /// Queues samples for the ledger, after the interaction if it is not queued yet.
    fn enqueue(&mut self, samples: Vec<Sample>) {
        let mut ops = Vec::with_capacity(samples.len() + 1);
        if !std::mem::replace(&mut self.interaction_recorded, true) {
            ops.push(Op::Interaction(Box::new((*self.interaction).clone())));
        }
        ops.extend(samples.into_iter().map(|sample| Op::Sample(Box::new(sample))));
        if let Err(error) = self.state.store.enqueue(ops) {
            // The client still gets its response; nothing will be learned from it.
            tracing::error!(%error, interaction = %self.interaction.id, "a completion is not recorded");
        }
    }

    fn sample(&self, index: usize, choice: &ChoiceState) -> Option<Sample> {
        choice.sample(self.interaction.id, index)
    }
}

impl Drop for ChatRun {
    fn drop(&mut self) {
        if self.has_ended() {
            return;
        }
        if !self.failed {
            self.state.metrics.http_disconnects.inc();
            tracing::info!(interaction = %self.interaction.id, "the client disconnected");
        }
        let open = self.choices.iter().enumerate().filter(|(_, c)| c.finish.is_none());
        let samples: Vec<Sample> = open.filter_map(|(i, c)| self.sample(i, c)).collect();
        if !samples.is_empty() {
            self.enqueue(samples);
        }
    }
}
