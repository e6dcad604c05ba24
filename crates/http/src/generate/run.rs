//! Admits the requests of all dialects, samples their choices, reports the progress and records them.
//!
//! Invariants: a choice is queued for the ledger before its end is reported, so that feedback sent
//! right after finds it; a run that is dropped early cancels its generations and records the sampled
//! tokens as cancelled; a run that is not stored leaves nothing but counts.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt;
use futures::stream::{self, BoxStream, SelectAll, Stream, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{Instrument as _, Span, info_span};

use hone_core::metrics::SPANS;
use hone_core::types::{
    ChatOptions, FinishReason, GrammarSpec, Interaction, InteractionId, Message, PolicyVersion,
    PromptSource, Sample, SampleId, SampleOrigin, SamplingParams, TokenId, now_ms, rater_id,
    session_of,
};
use hone_engine::answer::AnswerForm;
use hone_engine::{
    CompiledGrammar, Engine, EngineError, Event, GenerateRequest, Generation, Priority, Token,
    TokenRecords,
};
use hone_store::Op;
use hone_train::TrainState;

use super::prompt::{PromptTurns, chat_prompt, size, tool_format};
use super::{ChoiceUpdate, ClientRequest, PromptTokens, Usage};
use crate::auth::{Caller, KeyPermit};
use crate::body::Call;
use crate::chat::answer::Answers;
use crate::chat::constraint::CallRules;
use crate::error::{ApiError, ErrorCode};
use crate::state::AppState;

const DEFAULT_MODEL: &str = "default";

/// Longest wait of an answer's end for the ledger, so that a slow disk delays answers only a little.
const RECORD_PATIENCE: Duration = Duration::from_millis(500);
/// Usual bytes of a token.
pub const BYTES_PER_TOKEN: usize = 4;

pub struct AnswerRun {
    pub run: RequestRun,
    pub interaction: Arc<Interaction>,
    pub answers: Answers,
}

impl AnswerRun {
    pub fn usage(&self) -> Usage {
        self.answers.usage(self.run.usage())
    }
}

/// The names of the served model.
pub fn model_names(state: &AppState) -> Vec<&str> {
    let mut names = vec![DEFAULT_MODEL];
    let own = std::iter::once(&state.engine.info().name);
    for name in own.chain(&state.config.model_aliases) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

/// 404 for a name that is not served.
pub fn check_model(state: &AppState, name: &str) -> Result<(), ApiError> {
    let names = model_names(state);
    if names.contains(&name) {
        return Ok(());
    }
    let quoted: Vec<String> = names.iter().map(|n| format!("{n:?}")).collect();
    let message = format!("model is {name:?}: it must be {}", quoted.join(" or "));
    Err(ApiError::new(ErrorCode::ModelNotFound, message).param("model"))
}

/// Checks what a conversation may use, before the work on its prompt, and starts to sample its answers.
///
/// # Errors
/// 404 for an unknown model, 429 by a limit, 400 for a grammar or a prompt that the model cannot have.
pub async fn begin(
    Call(state, caller): Call,
    request: ClientRequest,
    arrived: std::time::Instant,
) -> Result<AnswerRun, ApiError> {
    let prepared = prepare(&state, &caller, request, arrived);
    let prepared = prepared.instrument(info_span!(target: SPANS, "prepare"));
    let (sampling, interaction, answers) = prepared.await?;
    Ok(AnswerRun { run: RequestRun::new(state, sampling), interaction, answers })
}

/// Makes the prompt's tokens and the grammar.
async fn prepare(
    state: &Arc<AppState>,
    caller: &Caller,
    mut request: ClientRequest,
    arrived: std::time::Instant,
) -> Result<(SamplingRequest, Arc<Interaction>, Answers), ApiError> {
    let messages = std::mem::take(&mut request.messages);
    let (chat, names) = (&request.chat, request.names);
    let permit = request.admit(state, caller, 1, size(&messages, chat) / BYTES_PER_TOKEN)?;
    let format = tool_format(state);
    let grammar = match &request.grammar {
        Some(requested) => Some(requested.compile(state.engine.codec()).await?),
        None => None,
    };
    let session = session_of(&request.metadata);
    let (ids, continues) =
        chat_prompt(state, caller, names.prompt, &messages, chat, session).await?;
    check_length(state, names.prompt, &ids)?;
    let codec = state.engine.codec();
    let grammar = match grammar {
        None if chat.constrains_calls() => {
            let rules = CallRules {
                codec: codec.clone(),
                format,
                options: chat.clone(),
                opens_reasoning: codec.opens_reasoning(&ids),
                parameters_field: names.parameters,
            };
            Some(rules.compile().await?)
        }
        grammar => grammar,
    };
    let spec = grammar.as_ref().map(|grammar| grammar.spec().clone());
    let form = AnswerForm::new(codec, &ids, chat, format).constrained(spec.as_ref());
    let template = codec.template_hash();
    let interaction = request.interaction(state, caller, messages, ids, template, spec);
    let interaction = Arc::new(Interaction { continues, ..interaction });
    let answers = Answers::new(&form, interaction.id, request.choices);
    let prompts = vec![interaction.clone()];
    // The interaction has the functions now, whose schemas can be as long as the body.
    request.chat = ChatOptions::default();
    Ok((SamplingRequest { request, prompts, grammar, permit, arrived }, interaction, answers))
}

/// Refuses a prompt that does not fit into the model's context.
pub fn check_length(state: &AppState, field: &str, ids: &[TokenId]) -> Result<(), ApiError> {
    let longest = state.engine.info().context;
    if ids.len() < longest { Ok(()) } else { Err(ApiError::too_long(field, ids.len(), longest)) }
}

impl ClientRequest {
    /// Admits a request for this many prompts and estimated tokens, and returns what its key permits, or refuses it.
    pub fn admit(
        &self,
        state: &AppState,
        caller: &Caller,
        prompts: usize,
        prompt_tokens: usize,
    ) -> Result<Option<KeyPermit>, ApiError> {
        check_model(state, &self.model)?;
        let (name, max_tokens) = (self.names.max_tokens, self.params.max_tokens);
        // 0 permits all.
        let most = state.config.max_tokens;
        if most > 0 && max_tokens > most {
            let message =
                format!("{name} is {max_tokens}: it must be at most {most} (server.max_tokens)");
            return Err(ApiError::field(name, message));
        }
        let choices = self.choices as usize * prompts;
        let longest = u64::from(max_tokens).min(state.engine.info().context as u64);
        let completions = (choices as u64).saturating_mul(longest);
        let permit = caller.begin(completions.saturating_add(prompt_tokens as u64))?;
        // If the engine never can admit it, repeating the request is of no use, so the answer names the field.
        // Waiting requests take turns between keys.
        let owner = caller.key_id.as_deref().map(Arc::from);
        state.engine.admits(&owner, choices).map_err(|error| match error {
            EngineError::TooManyChoices { choices, most } => {
                let name = if self.choices > 1 { "n" } else { self.names.prompt };
                let message = format!(
                    "{name} asks for {choices} choices at once: there can be at most {most} (engine.slots, \
                     and engine.queue or a key's share of it)"
                );
                ApiError::field(name, message)
            }
            error => error.into(),
        })?;
        Ok(permit)
    }

    /// The record of a prompt, whose id says whether it is recorded: by `store` or else `server.store`, unless its
    /// route or key keeps nothing. `template_hash` is empty for a prompt that no template rendered.
    pub fn interaction(
        &self,
        state: &AppState,
        caller: &Caller,
        messages: Vec<Message>,
        prompt_ids: Vec<TokenId>,
        template_hash: &str,
        grammar: Option<GrammarSpec>,
    ) -> Interaction {
        let route = state.routes.find(&self.model, &self.metadata);
        let kept = self.store.unwrap_or(state.config.store)
            && route.is_none_or(|route| route.store)
            && caller.key.as_ref().is_none_or(|key| key.entry.store.unwrap_or(true));
        // No route has an empty name, so an unmatched request is never scored.
        let route_name = route.map(|r| r.name.clone()).unwrap_or_default();
        let kept_id = || InteractionId::of_route(&route_name);
        let mut interaction = Interaction {
            id: if kept { kept_id() } else { InteractionId::unstored() },
            created: now_ms(),
            source: PromptSource::Live,
            route: route_name,
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            key_id: rater_id(caller.key_id.as_deref(), self.user.as_deref()),
            messages,
            metadata: self.metadata.clone(),
            params: self.params.clone(),
            prompt_ids,
            template_hash: template_hash.to_owned(),
            stop: self.stop.clone(),
            held_out: false,
            chat: self.chat.clone(),
            grammar,
            continues: None,
        };
        interaction.held_out = kept
            && route.is_some_and(|route| route.has_graders())
            && is_held_out(&interaction, state.holdout_share);
        interaction
    }
}

/// Whether only exams use a prompt. Equal prompts give the same answer, so no copy of it is trained on.
fn is_held_out(interaction: &Interaction, share: f64) -> bool {
    let [a, b, c, d, ..] = interaction.prompt_digest();
    let place = u32::from_le_bytes([a, b, c, d]);
    (f64::from(place) / f64::from(u32::MAX)) < share
}

// The choices while they are sampled.

pub struct SamplingRequest {
    pub request: ClientRequest,
    /// One or more prompts with the same sampling parameters and stop strings.
    pub prompts: Vec<Arc<Interaction>>,
    /// What constrains the text.
    pub grammar: Option<Arc<CompiledGrammar>>,
    pub permit: Option<KeyPermit>,
    pub arrived: std::time::Instant,
}

/// One prompt of a run.
struct RunPrompt {
    interaction: Arc<Interaction>,
    /// What lets later prompts find this one; `None` until it is queued for the ledger.
    turns: Option<PromptTurns>,
    /// The choices that have ended.
    served: Vec<Sample>,
}

pub struct RequestRun {
    pub state: Arc<AppState>,
    prompts: Vec<RunPrompt>,
    choices_per_prompt: usize,
    sampling: SamplingRequest,
    choices: Vec<ChoiceState>,
    events: SelectAll<BoxStream<'static, (usize, ChoiceEvent)>>,
    /// When `events` are read: by default once per interval of the stream.
    pub pace: Arc<ReadingPace>,
    /// Events that [`Self::start`] took from `events` already.
    buffered: VecDeque<(usize, ChoiceEvent)>,
    first_token_recorded: bool,
    /// Whether the answer's end waited for the ledger.
    awaited_record: bool,
    /// The version of the first choice to start, if that was before the headers of a stream.
    begun_with: Option<PolicyVersion>,
    /// The run ended with an error, so dropping it early is not a client's disconnect.
    failed: bool,
    /// The span of what the request waits for: a slot, then its tokens.
    phase: Span,
}

impl RequestRun {
    /// Submits every choice to the engine at once.
    pub fn new(state: Arc<AppState>, sampling: SamplingRequest) -> Self {
        let request = &sampling.request;
        let mut events = SelectAll::new();
        let mut choices = Vec::new();
        let begun = Arc::new(AtomicBool::new(false));
        let interval = Duration::from_millis(state.config.stream_interval_ms);
        let pace = Arc::new(ReadingPace::new(interval));
        for interaction in &sampling.prompts {
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
                    grammar: sampling.grammar.clone(),
                    scored: Vec::new(),
                };
                let engine = state.engine.clone();
                let (begun, pace) = (begun.clone(), pace.clone());
                events.push(choice_events(engine, generation, index, begun, pace));
                choices.push(ChoiceState { params, ..ChoiceState::default() });
            }
        }
        let prompt = |interaction: &Arc<Interaction>| RunPrompt {
            interaction: interaction.clone(),
            turns: None,
            served: Vec::new(),
        };
        Self {
            state,
            prompts: sampling.prompts.iter().map(prompt).collect(),
            choices_per_prompt: request.choices.max(1) as usize,
            sampling,
            choices,
            events,
            pace,
            buffered: VecDeque::new(),
            first_token_recorded: false,
            awaited_record: false,
            begun_with: None,
            failed: false,
            phase: info_span!(target: SPANS, "queue"),
        }
    }

    /// Waits until a choice has started, and returns its version. Fails if a choice is refused by then.
    async fn start(&mut self) -> Result<PolicyVersion, ApiError> {
        let mut first = None;
        while first.is_none() || self.buffered.len() < self.choices.len() {
            let event = match first {
                None => self.events.next().await,
                Some(_) => self.events.next().now_or_never().flatten(),
            };
            match event {
                Some((index, ChoiceEvent::Sampled(Event::Failed(error)))) => {
                    return Err(self.fail(index, error));
                }
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

    /// [`Self::start`], but after `ServerConfig::stream_headers_after_seconds` a stream sends headers without a version.
    pub async fn start_in_time(&mut self) -> Result<Option<PolicyVersion>, ApiError> {
        let patience = Duration::from_secs(self.state.config.stream_headers_after_seconds);
        // Until the first choice has started, `start` keeps nothing that is lost if it is dropped.
        self.begun_with = timeout(patience, self.start()).await.ok().transpose()?;
        Ok(self.begun_with)
    }

    /// The next update; `None` when every choice has ended and is queued for the ledger, in a fleet recorded.
    pub async fn next(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        if self.has_ended() {
            // Another server may acknowledge a rating of this answer, and cannot know whether it would be lost.
            if self.state.fleet.is_some() && !self.awaited_record {
                let _late = timeout(RECORD_PATIENCE, self.state.store.flush()).await;
                self.awaited_record = true;
            }
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

    /// The version of the response, if it is known: of a stream's first choice to start, or of choice 0.
    pub fn version(&self) -> Option<PolicyVersion> {
        self.begun_with.or_else(|| self.choices.first()?.version)
    }

    /// Token counts so far. Each prompt counts once, with the fewest cached tokens of its choices: the others read
    /// what that one computed.
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
        self.sampling.request.logprobs.is_some()
    }

    /// Counts an error by a limit that is reported within a stream.
    pub fn count_limit(&self, error: &ApiError) {
        if let Some(reason) = error.limit {
            self.state.metrics.http_limited.with_label_values(&[reason]).inc();
        }
    }

    pub fn wants_token_ids(&self) -> bool {
        self.sampling.request.token_ids
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
        let (wants_logprobs, wants_token_ids) = (self.wants_logprobs(), self.wants_token_ids());
        // The text goes on after the prompt's last character, not after a message.
        let prompt = self.prompts.get(index / self.choices_per_prompt);
        let continues_text = prompt.is_some_and(|prompt| prompt.interaction.is_text());
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let mut id = None;
        let text = match event {
            ChoiceEvent::Started(version) => {
                choice.version = Some(version);
                self.trace_start(version);
                String::new()
            }
            ChoiceEvent::Sampled(Event::Token(mut token)) => {
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
                if wants_logprobs
                    && (self.sampling.request.reports_stop || !is_stop || !text.is_empty())
                {
                    choice.pending.push(token);
                }
                self.record_first_token();
                text
            }
            ChoiceEvent::Sampled(Event::Done { finish: FinishReason::Cancelled, .. }) => {
                return Err(self.fail(index, EngineError::ShuttingDown));
            }
            ChoiceEvent::Sampled(Event::Done { finish, text, cached_tokens }) => {
                choice.text.push_str(&text);
                choice.cached_tokens = Some(cached_tokens);
                choice.finish = Some(finish);
                if self.has_ended() {
                    self.trace_end();
                }
                self.record(index);
                text
            }
            ChoiceEvent::Sampled(Event::Failed(error)) => return Err(self.fail(index, error)),
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

    /// Ends the span of the wait for a slot with the first choice that starts.
    fn trace_start(&mut self, version: PolicyVersion) {
        if self.choices.iter().filter(|choice| choice.version.is_some()).count() == 1 {
            self.phase = info_span!(target: SPANS, "generate");
            Span::current().record("hone.policy_version", version.0);
        }
    }

    /// Ends the span of the tokens, and adds their number to that of the request.
    fn trace_end(&mut self) {
        let Usage { prompt_tokens, completion_tokens, .. } = self.usage();
        let request = Span::current();
        request.record("gen_ai.usage.input_tokens", prompt_tokens);
        request.record("gen_ai.usage.output_tokens", completion_tokens);
        self.phase = Span::none();
    }

    fn record_first_token(&mut self) {
        if std::mem::replace(&mut self.first_token_recorded, true) {
            return;
        }
        let trainer = match self.state.train.status().state {
            TrainState::Training | TrainState::Publishing => "training",
            _ => "idle",
        };
        let seconds = self.sampling.arrived.elapsed().as_secs_f64();
        let metrics = &self.state.metrics;
        metrics.http_time_to_first_token.with_label_values(&[trainer]).observe(seconds);
        metrics.http_prompt_tokens.inc_by(self.usage().prompt_tokens as u64);
    }

    /// Queues an ended choice for the ledger, and submits its prompt to rollout after the last choice.
    fn record(&mut self, index: usize) {
        let Some(sample) = self.sample(index) else { return };
        self.state.metrics.http_completion_tokens.inc_by(sample.ids.len() as u64);
        self.state.policies.answered(sample.version, false);
        if sample.interaction.is_unstored() {
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
        // The ledger's queue keeps the span until the commit.
        let queued = info_span!(target: SPANS, "record").in_scope(|| self.state.store.enqueue(ops));
        if let Err(error) = queued {
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
            while let Some(Some((index, event))) = events.next().now_or_never() {
                let ChoiceEvent::Sampled(Event::Token(token)) = event else { break };
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
        if let Some(permit) = self.sampling.permit.as_mut().filter(|_| started) {
            permit.used = used;
        }
        if self.has_ended() {
            return;
        }
        self.trace_end();
        if !self.failed {
            self.state.metrics.http_disconnects.inc();
            if let Some(RunPrompt { interaction, .. }) = self.prompts.first() {
                tracing::info!(interaction = %interaction.id, "the client disconnected");
            }
        }
        for at in 0..self.prompts.len() {
            let first = at * self.choices_per_prompt;
            let own = first..first + self.choices_per_prompt;
            let open = own.filter(|i| self.choices.get(*i).is_some_and(|c| c.finish.is_none()));
            let samples = open.filter_map(|index| self.sample(index));
            let samples: Vec<_> = samples.filter(|own| !own.interaction.is_unstored()).collect();
            if !samples.is_empty() {
                self.enqueue(at, samples);
            }
        }
    }
}

// One choice of a request: its generation and its state.

/// An event of a choice's generation.
enum ChoiceEvent {
    Started(PolicyVersion),
    Sampled(Event),
}

/// A choice while it is sampled.
#[derive(Default)]
struct ChoiceState {
    params: SamplingParams,
    version: Option<PolicyVersion>,
    tokens: TokenRecords,
    text: String,
    /// Tokens whose log-probabilities are not reported yet.
    pending: Vec<Token>,
    /// Number of tokens whose ids are reported.
    reported: usize,
    finish: Option<FinishReason>,
    /// Tokens of the prompt that the engine had in its cache; known at the end.
    cached_tokens: Option<usize>,
}

impl ChoiceState {
    fn push(&mut self, token: &Token) {
        self.tokens.push(token);
        self.text.push_str(&token.text);
    }

    /// The ids that were not reported before.
    fn take_ids(&mut self) -> Vec<TokenId> {
        let ids = self.tokens.ids.get(self.reported..).unwrap_or_default().to_vec();
        self.reported = self.tokens.ids.len();
        ids
    }

    /// The ledger's record of the choice, cancelled if it has not finished; `None` if it never started. Whatever
    /// ended it, whether a token is the last does not depend on later ones, so they can be trained on.
    fn sample(&self, interaction: InteractionId, choice: u32) -> Option<Sample> {
        let finish = self.finish.unwrap_or(FinishReason::Cancelled);
        let TokenRecords { ids, logprobs, forced, .. } = self.tokens.clone();
        let untrainable =
            if ids.is_empty() { Some("empty") } else { self.params.untrainable_reason() };
        Some(Sample {
            id: SampleId::new(),
            interaction,
            choice,
            origin: SampleOrigin::Served,
            created: now_ms(),
            ids,
            logprobs,
            kept: self.tokens.kept(),
            forced,
            text: self.text.clone(),
            finish,
            version: self.version?,
            params: self.params.clone(),
            untrainable: untrainable.map(str::to_owned),
        })
    }
}

/// Seed of a choice: the request's own for choice 0, else a splitmix64 mixture, so that no two requests share one.
fn choice_seed(seed: u64, index: usize) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The events of one choice, each with `index`. Dropping the stream cancels the choice.
///
/// `begun` is shared by all choices of a request and set by the first that starts. From then on a choice that has
/// waited as long as the queue permits waits again, because its request has been admitted.
fn choice_events(
    engine: Arc<dyn Engine>,
    request: GenerateRequest,
    index: usize,
    begun: Arc<AtomicBool>,
    pace: Arc<ReadingPace>,
) -> BoxStream<'static, (usize, ChoiceEvent)> {
    let started = async move {
        loop {
            match engine.generate(request.clone()).await {
                Err(EngineError::QueueTimeout { .. }) if begun.load(Ordering::Relaxed) => {}
                result => {
                    begun.fetch_or(result.is_ok(), Ordering::Relaxed);
                    return result;
                }
            }
        }
    };
    stream::once(started)
        .flat_map(move |result| match result {
            Ok(generation) => {
                let started = ChoiceEvent::Started(generation.version);
                let events = generation_events(generation, Arc::clone(&pace));
                stream::iter([started]).chain(events.map(ChoiceEvent::Sampled)).boxed()
            }
            Err(error) => stream::iter([ChoiceEvent::Sampled(Event::Failed(error))]).boxed(),
        })
        .map(move |event| (index, event))
        .boxed()
}

// Reads the events of one generation when its client needs them.
//
// A task that is woken for each token interrupts the threads that sample, for longer than a small model needs to
// sample a token. So a whole response reads the first token, whose time is measured, and the others at the end.
// A stream reads its first token at once, later ones at most once per interval, and the
// end at once. All streams read at the same instants, so that the server wakes once for all of them.

/// The instant from which the intervals of all streams are counted.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// When the choices of a request read tokens after their first one: once per interval, by default.
#[derive(Debug)]
pub struct ReadingPace {
    interval: Duration,
    whole: AtomicBool,
    rest: AtomicBool,
}

impl ReadingPace {
    /// An interval of 0 is none, see [`Self::is_each_token`].
    fn new(interval: Duration) -> Self {
        Self { interval, whole: AtomicBool::new(false), rest: AtomicBool::new(false) }
    }

    /// At the end of the generation.
    pub fn read_whole(&self) {
        self.whole.store(true, Ordering::Relaxed);
    }

    /// At once, and nothing that is not sampled yet.
    fn read_rest(&self) {
        self.rest.store(true, Ordering::Relaxed);
    }

    /// Whether a stream reads each token as soon as it is sampled, and has an event for each.
    pub fn is_each_token(&self) -> bool {
        self.interval.is_zero()
    }

    /// The end of the interval that `instant` is in.
    fn next_read(&self, instant: Instant) -> Instant {
        let passed = instant.saturating_duration_since(*EPOCH).as_nanos();
        let into = passed.checked_rem(self.interval.as_nanos()).unwrap_or_default();
        instant + self.interval.saturating_sub(Duration::from_nanos(into as u64))
    }
}

struct GenerationReader {
    generation: Generation,
    pace: Arc<ReadingPace>,
    ended: bool,
    /// When an event was waited for last; `None` before the first one.
    waited: Option<Instant>,
}

/// The events of a generation, up to the last one. Dropping the stream cancels it.
fn generation_events(
    generation: Generation,
    pace: Arc<ReadingPace>,
) -> impl Stream<Item = Event> + Send {
    let reader = GenerationReader { generation, pace, ended: false, waited: None };
    stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        Some(match reader.next().await {
            Some(token @ Event::Token(_)) => (token, Some(reader)),
            Some(last) => (last, None),
            None => {
                let reason = "the generation ended without a last event".to_owned();
                (Event::Failed(EngineError::Internal(reason)), None)
            }
        })
    })
}

impl GenerationReader {
    async fn next(&mut self) -> Option<Event> {
        if let Ok(event) = self.generation.events.try_recv() {
            self.waited.get_or_insert_with(Instant::now);
            return Some(event);
        }
        self.pause().await;
        let event = self.generation.events.recv().await;
        self.waited = Some(Instant::now());
        event
    }

    /// Waits as long as the next events are not needed.
    async fn pause(&mut self) {
        let Some(waited) =
            self.waited.filter(|_| !self.ended && !self.pace.rest.load(Ordering::Relaxed))
        else {
            return;
        };
        if self.pace.whole.load(Ordering::Relaxed) {
            self.end().await;
        } else if !self.pace.is_each_token() {
            let next = self.pace.next_read(waited);
            // Also without an end, it has been long enough.
            let _ended = timeout_at(next, self.end()).await.is_ok();
        }
    }

    /// Waits for the end of the generation, or until only the rest is to be read.
    async fn end(&mut self) {
        let Self { generation, pace, ended, .. } = self;
        poll_fn(|context| {
            if pace.rest.load(Ordering::Relaxed) {
                return Poll::Ready(());
            }
            Pin::new(&mut generation.ended).poll(context).map(|_| *ended = true)
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::sync::{mpsc, oneshot};

    use hone_core::types::{FinishReason, PolicyVersion};
    use hone_engine::Token;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(40);

    fn token(id: u32) -> Event {
        let text = String::new();
        Event::Token(Token {
            id,
            logprob: 0.0,
            kept_mass: 1.0,
            forced: false,
            top: Vec::new(),
            text,
        })
    }

    fn done() -> Event {
        Event::Done { finish: FinishReason::Length, text: String::new(), cached_tokens: 0 }
    }

    type Sender = (mpsc::Sender<Event>, oneshot::Sender<std::convert::Infallible>);

    fn generation() -> (Sender, Generation) {
        let ((sender, events), (ends, ended)) = (mpsc::channel(64), oneshot::channel());
        ((sender, ends), Generation { version: PolicyVersion(0), events, ended })
    }

    #[tokio::test]
    async fn a_whole_response_reads_the_first_token_and_then_the_end() {
        let ((sender, ends), generation) = generation();
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        pace.read_whole();
        let mut events = Box::pin(generation_events(generation, pace));
        assert!(events.next().now_or_never().is_none());
        sender.try_send(token(1)).unwrap();
        assert!(matches!(events.next().await, Some(Event::Token(token)) if token.id == 1));
        assert!(events.next().now_or_never().is_none());
        for id in 2..5 {
            sender.try_send(token(id)).unwrap();
        }
        assert!(events.next().now_or_never().is_none(), "the generation has not ended");
        sender.try_send(done()).unwrap();
        drop(ends);
        let rest: Vec<_> = events.collect().await;
        assert!(matches!(rest.last(), Some(Event::Done { .. })) && rest.len() == 4);
    }

    #[tokio::test]
    async fn what_was_sampled_before_a_client_left_is_read() {
        let ((sender, _ends), generation) = generation();
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        pace.read_whole();
        let mut events = Box::pin(generation_events(generation, Arc::clone(&pace)));
        sender.try_send(token(1)).unwrap();
        assert!(events.next().await.is_some());
        assert!(events.next().now_or_never().is_none());
        sender.try_send(token(2)).unwrap();
        sender.try_send(token(3)).unwrap();
        pace.read_rest();
        for id in 2..4 {
            let event = events.next().now_or_never().flatten();
            assert!(matches!(event, Some(Event::Token(token)) if token.id == id));
        }
        assert!(events.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_stream_reads_tokens_once_per_interval() {
        let ((sender, ends), generation) = generation();
        let sampled = async move {
            for id in 0..40 {
                sender.send(token(id)).await.unwrap();
                tokio::time::sleep(INTERVAL / 10).await;
            }
            sender.send(done()).await.unwrap();
            drop((sender, ends));
        };
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        let events = generation_events(generation, Arc::clone(&pace));
        let timed = events.map(|event| (pace.next_read(Instant::now()), event));
        let began = Instant::now();
        let (read, ()) = tokio::join!(timed.collect::<Vec<_>>(), sampled);
        let ids = read.iter().filter_map(|(_, event)| match event {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
        assert!(ids.eq(0..40) && matches!(read.last(), Some((_, Event::Done { .. }))));
        // Each read is followed by a pause until the next interval, and the end comes at once.
        let waits = read.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        let intervals = began.elapsed().as_millis() / INTERVAL.as_millis() + 1;
        assert!(waits >= 1 && waits as u128 <= intervals, "{waits} of {intervals}");
    }

    #[tokio::test]
    async fn a_token_is_read_although_none_follows() {
        for interval in [INTERVAL, Duration::ZERO] {
            let ((sender, ends), generation) = generation();
            let mut events =
                Box::pin(generation_events(generation, Arc::new(ReadingPace::new(interval))));
            for id in 0..5 {
                sender.send(token(id)).await.unwrap();
                let event = events.next().await;
                assert!(matches!(event, Some(Event::Token(token)) if token.id == id));
            }
            // The end does not wait for the interval.
            sender.send(done()).await.unwrap();
            drop((sender, ends));
            assert!(matches!(events.next().await, Some(Event::Done { .. })));
            assert!(events.next().await.is_none());
        }
    }

    #[test]
    fn all_streams_read_at_the_same_instants() {
        let pace = ReadingPace::new(INTERVAL);
        let of = |ms| pace.next_read(*EPOCH + Duration::from_millis(ms)) - *EPOCH;
        assert_eq!(of(0), INTERVAL);
        assert_eq!(of(39), INTERVAL);
        assert_eq!(of(40), 2 * INTERVAL);
        assert_eq!(of(1234), 31 * INTERVAL);
    }

    #[test]
    fn every_choice_has_its_own_seed() {
        assert_eq!(choice_seed(7, 0), 7);
        let pairs = (0..64).flat_map(|seed| (0..8).map(move |i| choice_seed(seed, i)));
        assert_eq!(pairs.collect::<BTreeSet<_>>().len(), 64 * 8);
    }
}
