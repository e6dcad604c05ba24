//! Samples the choices of one request, reports their progress and records them.
//!
//! Invariants: a choice is queued for the ledger before its end is reported, so that feedback sent
//! right after finds it; a run that is dropped early cancels its generations and records the sampled
//! tokens as cancelled; a run that is not stored leaves nothing but counts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::stream::{BoxStream, SelectAll, StreamExt};
use tokio::time::timeout;

use hone_core::types::{FinishReason, Interaction, PolicyVersion, Sample, SamplingParams};
use hone_engine::{EngineError, GenerateRequest, Priority, Token};
use hone_store::Op;
use hone_train::TrainState;

use super::choice::{ChoiceEvent, ChoiceState, choice_events, choice_seed};
use super::continuation::PromptTurns;
use super::reading::ReadingPace;
use super::{ChoiceUpdate, FinishedChoice, PromptTokens, SamplingRequest, Usage};
use crate::http::AppState;
use crate::http::auth::KeyPermit;
use crate::http::error::ApiError;

/// One prompt of a run.
struct RunPrompt {
    interaction: Arc<Interaction>,
    /// What lets later prompts find this one; `None` until it is queued for the ledger.
    turns: Option<PromptTurns>,
    /// The choices that have ended.
    served: Vec<Sample>,
}

/// A running request.
pub struct RequestRun {
    pub state: Arc<AppState>,
    prompts: Vec<RunPrompt>,
    choices_per_prompt: usize,
    top_logprobs: Option<u8>,
    wants_token_ids: bool,
    reports_stop: bool,
    stored: bool,
    arrived: Instant,
    choices: Vec<ChoiceState>,
    events: SelectAll<BoxStream<'static, (usize, ChoiceEvent)>>,
    /// When `events` are read.
    pace: Arc<ReadingPace>,
    /// Events that [`Self::start`] took from `events` already.
    buffered: VecDeque<(usize, ChoiceEvent)>,
    first_token_recorded: bool,
    /// What the run uses of the limits of its key.
    permit: Option<KeyPermit>,
    /// The run ended with an error, so dropping it early is not a client's disconnect.
    failed: bool,
}

impl RequestRun {
    /// Submits every choice to the engine at once.
    pub fn new(state: Arc<AppState>, request: &SamplingRequest, arrived: Instant) -> Self {
        let mut events = SelectAll::new();
        let mut choices = Vec::new();
        let begun = Arc::new(AtomicBool::new(false));
        let interval = Duration::from_millis(state.config.stream_interval_ms);
        let pace = Arc::new(ReadingPace::new(interval));
        for interaction in &request.prompts {
            let version = assigned_version(&state, interaction, request.user.as_deref());
            for _ in 0..request.choices {
                let index = choices.len();
                let seed = choice_seed(interaction.params.seed, index);
                let params = SamplingParams { seed, ..interaction.params.clone() };
                let generation = GenerateRequest {
                    prompt_ids: interaction.prompt_ids.clone(),
                    params: params.clone(),
                    stop: interaction.stop.clone(),
                    top_logprobs: request.logprobs.unwrap_or(0),
                    priority: Priority::Live,
                    owner: interaction.api_key().map(Arc::from),
                    version,
                    grammar: request.grammar.clone(),
                    scored: Vec::new(),
                };
                let engine = state.engine.clone();
                let (begun, pace) = (begun.clone(), pace.clone());
                events.push(choice_events(engine, generation, index, begun, pace));
                choices.push(ChoiceState::new(params));
            }
        }
        let prompt = |interaction: &Arc<Interaction>| RunPrompt {
            interaction: interaction.clone(),
            turns: None,
            served: Vec::new(),
        };
        Self {
            state,
            prompts: request.prompts.iter().map(prompt).collect(),
            choices_per_prompt: request.choices.max(1) as usize,
            top_logprobs: request.logprobs,
            wants_token_ids: request.token_ids,
            reports_stop: request.reports_stop,
            stored: request.stored,
            arrived,
            choices,
            events,
            pace,
            buffered: VecDeque::new(),
            first_token_recorded: false,
            permit: None,
            failed: false,
        }
    }

    /// The run with what it may use of the limits of its key.
    pub fn with_permit(mut self, permit: Option<KeyPermit>) -> Self {
        self.permit = permit;
        self
    }

    /// Reads each choice as a whole. Without this, tokens are read once per `server.stream_interval_ms`.
    pub fn read_whole(&self) {
        self.pace.read_whole();
    }

    /// Waits until a choice has started. Fails if a choice is refused before that, or is known to be
    /// refused by then. Returns the version of the first choice to start.
    pub async fn start(&mut self) -> Result<PolicyVersion, ApiError> {
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

    /// [`Self::start`], unless it takes longer than `ServerConfig::stream_headers_after_seconds`: then a stream sends
    /// its headers without a version.
    pub async fn start_in_time(&mut self) -> Result<Option<PolicyVersion>, ApiError> {
        let patience = Duration::from_secs(self.state.config.stream_headers_after_seconds);
        // Until the first choice has started, `start` keeps nothing that is lost if it is dropped.
        timeout(patience, self.start()).await.ok().transpose()
    }

    /// Whether a stream has an event for each token, even where several tokens are sent at once.
    pub fn sends_each_token(&self) -> bool {
        self.pace.is_each_token()
    }

    /// The time without an event after which a stream sends a comment.
    pub fn keep_alive(&self) -> Duration {
        Duration::from_secs(self.state.config.stream_keep_alive_seconds)
    }

    /// The next update; `None` when every choice has ended and is queued for the ledger.
    pub async fn next(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
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

    /// Runs to the end and returns every choice.
    pub async fn finish(&mut self) -> Result<Vec<FinishedChoice>, ApiError> {
        self.read_whole();
        let mut tokens: Vec<Vec<Token>> = self.choices.iter().map(|_| Vec::new()).collect();
        while let Some(update) = self.next().await {
            let update = update?;
            if let Some(tokens) = tokens.get_mut(update.index as usize) {
                tokens.extend(update.tokens);
            }
        }
        let choices = self.choices.iter_mut().zip(tokens).zip(0..);
        let finished = choices.map(|((choice, tokens), index)| FinishedChoice {
            index,
            text: std::mem::take(&mut choice.text),
            tokens,
            finish: choice.finish.unwrap_or(FinishReason::Stop),
        });
        Ok(finished.collect())
    }

    /// The version of choice 0; version 0 before it has started.
    pub fn version(&self) -> PolicyVersion {
        self.choices.first().and_then(|choice| choice.version).unwrap_or_default()
    }

    /// Token counts so far. Each prompt is counted once, not for each choice. Of its choices that have
    /// ended, the one with the fewest cached tokens counts: the others read what that one computed.
    pub fn usage(&self) -> Usage {
        let prompts = self.prompts.iter().map(|prompt| prompt.interaction.prompt_ids.len());
        let sampled = self.choices.iter().map(|choice| choice.tokens.ids.len());
        let choices = self.choices.chunks(self.choices_per_prompt);
        let cached = choices.filter_map(|own| own.iter().filter_map(|c| c.cached_tokens).min());
        Usage {
            prompt_tokens_details: Some(PromptTokens { cached_tokens: cached.sum() }),
            ..Usage::new(prompts.sum(), sampled.sum())
        }
    }

    pub fn wants_logprobs(&self) -> bool {
        self.top_logprobs.is_some()
    }

    /// Counts an error by a limit that is reported within a stream.
    pub fn count_limit(&self, error: &ApiError) {
        if let Some(reason) = error.limit() {
            self.state.metrics.http_limited.with_label_values(&[reason]).inc();
        }
    }

    pub fn wants_token_ids(&self) -> bool {
        self.wants_token_ids
    }

    fn has_ended(&self) -> bool {
        self.choices.iter().all(|c| c.finish.is_some())
    }

    fn fail(&mut self, index: usize, error: EngineError) -> ApiError {
        self.failed = true;
        let version = self.choices.get(index).and_then(|choice| choice.version);
        // A client's grammar says nothing about the version.
        if let Some(version) = version.filter(|_| !error.is_of_grammar()) {
            self.state.policies.answered(version, true);
        }
        error.into()
    }

    fn apply(&mut self, index: usize, event: ChoiceEvent) -> Result<ChoiceUpdate, ApiError> {
        let started = matches!(event, ChoiceEvent::Started(_));
        let (wants_logprobs, wants_token_ids) = (self.wants_logprobs(), self.wants_token_ids);
        // The text goes on after the prompt's last character, not after a message.
        let prompt = self.prompts.get(index / self.choices_per_prompt);
        let continues_text = prompt.is_some_and(|prompt| prompt.interaction.is_text());
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let mut id = None;
        let text = match event {
            ChoiceEvent::Started(version) => {
                choice.version = Some(version);
                String::new()
            }
            ChoiceEvent::Token(mut token) => {
                let codec = self.state.engine.codec();
                if continues_text && choice.tokens.ids.is_empty() && codec.removes_space(token.id) {
                    token.text.insert(0, ' ');
                }
                choice.push(&token);
                id = Some(token.id);
                let text = std::mem::take(&mut token.text);
                // A stop token is reported where its text is: if the request includes it.
                let is_stop = codec.stop_ids().contains(&token.id)
                    || choice.params.stop_token_ids.contains(&token.id);
                if wants_logprobs && (self.reports_stop || !is_stop || !text.is_empty()) {
                    choice.pending.push(token);
                }
                self.record_first_token();
                text
            }
            ChoiceEvent::Done { finish: FinishReason::Cancelled, .. } => {
                return Err(self.fail(index, EngineError::ShuttingDown));
            }
            ChoiceEvent::Done { finish, text, cached_tokens } => {
                choice.text.push_str(&text);
                choice.cached_tokens = Some(cached_tokens);
                choice.finish = Some(finish);
                self.record(index);
                text
            }
            ChoiceEvent::Failed(error) => return Err(self.fail(index, error)),
        };
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let (version, finish) = (choice.version.unwrap_or_default(), choice.finish);
        // A token in the middle of a character has no text yet: its log-probability waits for it.
        let complete = finish.is_some() || !text.is_empty();
        let tokens = if complete { std::mem::take(&mut choice.pending) } else { Vec::new() };
        let token_ids = if complete && wants_token_ids { choice.take_ids() } else { Vec::new() };
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        Ok(ChoiceUpdate { index, version, started, id, text, tokens, token_ids, finish })
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
        metrics.http_prompt_tokens.inc_by(self.usage().prompt_tokens as u64);
    }

    /// Queues an ended choice for the ledger. After the last choice of a prompt, submits the prompt to
    /// rollout.
    fn record(&mut self, index: usize) {
        let Some(sample) = self.sample(index) else { return };
        self.state.metrics.http_completion_tokens.inc_by(sample.ids.len() as u64);
        self.state.policies.answered(sample.version, false);
        if !self.stored {
            return;
        }
        let at = index / self.choices_per_prompt;
        self.enqueue(at, vec![sample.clone()]);
        let Some(prompt) = self.prompts.get_mut(at) else { return };
        prompt.served.push(sample);
        if prompt.served.len() == self.choices_per_prompt
            && let Some(rollout) = &self.state.rollout
        {
            rollout.submit(prompt.interaction.clone(), std::mem::take(&mut prompt.served));
        }
    }

    /// Queues samples of a prompt for the ledger, after the interaction if it is not queued yet.
    fn enqueue(&mut self, at: usize, samples: Vec<Sample>) {
        let Some(prompt) = self.prompts.get_mut(at) else { return };
        let interaction = &prompt.interaction;
        let mut ops = Vec::with_capacity(samples.len() + 1);
        let is_new = prompt.turns.is_none();
        let turns = prompt.turns.get_or_insert_with(|| PromptTurns::new(interaction));
        if is_new {
            ops.push(Op::Interaction(Box::new((**interaction).clone())));
            ops.extend(turns.prompt(&self.state, interaction));
        }
        for sample in samples {
            let turn = turns.completion(&self.state, interaction, &sample);
            ops.push(Op::Sample(Box::new(sample)));
            ops.extend(turn);
        }
        if let Err(error) = self.state.store.enqueue(ops) {
            // The client still gets its response; nothing will be learned from it.
            tracing::error!(%error, interaction = %interaction.id, "a completion is not recorded");
        }
    }

    /// Takes the tokens that were sampled and not read, of choices whose earlier tokens were all taken.
    fn take_rest(&mut self) {
        // A choice that waits for the engine must not be polled while the runtime ends.
        let waits = self.choices.iter().any(|choice| choice.version.is_none());
        if waits || !self.buffered.is_empty() {
            return;
        }
        self.pace.read_rest();
        for events in self.events.iter_mut() {
            while let Some(Some((index, ChoiceEvent::Token(token)))) = events.next().now_or_never()
            {
                let choice = self.choices.get_mut(index);
                let Some(choice) = choice.filter(|choice| !choice.tokens.ids.is_empty()) else {
                    break;
                };
                choice.push(&token);
            }
        }
    }

    /// The ledger's record of a choice; `None` if it never started.
    fn sample(&self, index: usize) -> Option<Sample> {
        let prompt = self.prompts.get(index / self.choices_per_prompt)?;
        let choice = u32::try_from(index % self.choices_per_prompt).unwrap_or(u32::MAX);
        self.choices.get(index)?.sample(prompt.interaction.id, choice)
    }
}

/// The version that answers a prompt: one for all its choices, and for all requests of a session or user.
pub fn assigned_version(
    state: &AppState,
    interaction: &Interaction,
    user: Option<&str>,
) -> Option<PolicyVersion> {
    match interaction.session().or(user) {
        Some(key) => state.policies.assign(key),
        None => state.policies.assign(&interaction.id.to_string()),
    }
}

impl Drop for RequestRun {
    fn drop(&mut self) {
        if !self.has_ended() {
            self.take_rest();
        }
        let used = self.usage().total_tokens;
        let started = self.choices.iter().any(|choice| choice.version.is_some());
        if let Some(permit) = self.permit.as_mut().filter(|_| started) {
            permit.used = used;
        }
        if self.has_ended() {
            return;
        }
        if !self.failed {
            self.state.metrics.http_disconnects.inc();
            if let Some(RunPrompt { interaction, .. }) = self.prompts.first() {
                tracing::info!(interaction = %interaction.id, "the client disconnected");
            }
        }
        if !self.stored {
            return;
        }
        for at in 0..self.prompts.len() {
            let first = at * self.choices_per_prompt;
            let own = first..first + self.choices_per_prompt;
            let open = own.filter(|i| self.choices.get(*i).is_some_and(|c| c.finish.is_none()));
            let samples: Vec<Sample> = open.filter_map(|index| self.sample(index)).collect();
            if !samples.is_empty() {
                self.enqueue(at, samples);
            }
        }
    }
}
