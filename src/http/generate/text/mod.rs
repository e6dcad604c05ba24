//! `POST /v1/completions`: OpenAI's older endpoint, which continues texts or token ids.
//!
//! No chat template is applied. A text is recorded as one message of a user, beside the token ids, which
//! alone are trained on. Each of several prompts has its own record and id.

pub(in crate::http) mod request;
pub(in crate::http) mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{StreamExt, TryStreamExt};

use hone_core::types::{
    ChatOptions, ClientEndpoint, FinishReason, Interaction, Message, PolicyVersion, Role, TokenId,
};
use hone_engine::{Codec, GenerateRequest, Token};

use self::request::TextPrompt;
use super::admit::{WantedTokens, admit};
use super::prompt::{PromptContext, TextSize, encode};
use super::run::assigned_version;
use super::{FinishedChoice, SamplingRequest};
use super::{models, with_version};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::JsonObject;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use crate::http::generate::{ChoiceUpdate, Usage};
use request::TextRequest;
use wire::{PromptLogprob, TextChoice, TextCompletion, TextLogprobs, prompt_logprobs};

/// Prompts of one request that are scored at the same time.
const SCORED_AT_ONCE: usize = 8;

/// `POST /v1/completions`
pub async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let mut request = request::read(&body, state.engine.info().vocab)?;
    models::check(&state, &request.model)?;
    let wanted = WantedTokens {
        params: &request.params,
        max_tokens_field: "max_tokens",
        choices: request.choices as usize * request.prompts.len(),
        choices_field: if request.choices > 1 { "n" } else { "prompt" },
        prompt_tokens: request.prompts.iter().map(TextPrompt::estimated_tokens).sum(),
    };
    let permit = admit(&state, &caller, &wanted)?;
    let prompts = std::mem::take(&mut request.prompts);
    let context = PromptContext {
        model: request.model.clone(),
        endpoint: ClientEndpoint::Completions,
        metadata: std::mem::take(&mut request.metadata),
        params: request.params.clone(),
        stop: std::mem::take(&mut request.stop),
        chat: ChatOptions::default(),
        caller,
        user: request.user.clone(),
        store: request.store,
        grammar: None,
    };
    let mut interactions = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (text, ids) = tokenize(&state, prompt, request.add_special_tokens).await?;
        interactions.push(Arc::new(interaction(&state, &context, text, ids)?));
    }
    let echoes_logprobs = request.echo && request.logprobs.is_some();
    let mut scored = Vec::new();
    if echoes_logprobs || request.prompt_logprobs.is_some() {
        let most = request.logprobs.max(request.prompt_logprobs).unwrap_or(0);
        scored = score(&state, &interactions, request.user.as_deref(), most).await?;
    }
    let head = TextHead::new(interactions.clone(), &request, scored);
    if request.scores_only {
        return Ok(scores(&state, &head, &interactions));
    }
    let run = SamplingRequest {
        prompts: interactions,
        choices: request.choices,
        logprobs: request.logprobs,
        grammar: None,
        token_ids: false,
        reports_stop: echoes_logprobs,
        user: request.user.clone(),
        stored: context.is_kept(&state),
    };
    let mut run = RequestRun::new(state, &run, arrived).with_permit(permit);
    if request.stream {
        let (version, response) = respond(run, head, request.include_usage).await?;
        return Ok(with_version(response, version));
    }
    let choices = run.finish().await?;
    let choices = choices.into_iter().map(|choice| whole(&run, &head, choice)).collect();
    let completion = head.completion(run.version(), choices, Some(Some(run.usage())));
    Ok(with_version(Json(completion).into_response(), Some(run.version())))
}

/// The tokens of each prompt after the first, with their log-probabilities and `most` alternatives. The engine
/// computes them as it decodes, one after the other, because no engine returns the logits of a prefill.
async fn score(
    state: &AppState,
    prompts: &[Arc<Interaction>],
    user: Option<&str>,
    most: u8,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let scores = prompts.iter().cloned().map(|prompt: Arc<Interaction>| async move {
        let version = assigned_version(state, &prompt, user);
        let (ids, stops) = (&prompt.prompt_ids, state.engine.codec().stop_ids());
        let (mut tokens, mut from) = (Vec::new(), 1);
        while from < ids.len() {
            let stop = ids[from..].iter().position(|id| stops.contains(id));
            let to = stop.map_or(ids.len(), |at| from + at + 1);
            let request = GenerateRequest::score(&ids[..from], &ids[from..to], most);
            let owner = prompt.api_key().map(Arc::from);
            let request = GenerateRequest { owner, version, ..request };
            tokens.extend(state.engine.generate(request).await?.collect().await?.tokens);
            from = to;
        }
        Ok(tokens)
    });
    futures::stream::iter(scores).buffered(SCORED_AT_ONCE).try_collect().await
}

/// The response to a request that samples nothing.
fn scores(state: &AppState, head: &TextHead, prompts: &[Arc<Interaction>]) -> Response {
    let codec = state.engine.codec();
    let choice = |index: u32| TextChoice {
        index,
        text: head.echoed(index).unwrap_or_default().to_owned(),
        logprobs: head.logprobs(codec, index, (true, &[]), &mut 0),
        prompt_logprobs: head.prompt_logprobs(codec, index),
        finish_reason: Some(FinishReason::Length.as_str()),
        completion_id: None,
    };
    let choices = (0..u32::try_from(head.choices()).unwrap_or(u32::MAX)).map(choice).collect();
    let usage = Usage::new(prompts.iter().map(|prompt| prompt.prompt_ids.len()).sum(), 0);
    let version = state.engine.active_version();
    let completion = head.completion(version, choices, Some(Some(usage)));
    with_version(Json(completion).into_response(), Some(version))
}

/// A prompt's text and tokens.
async fn tokenize(
    state: &AppState,
    prompt: TextPrompt,
    framed: bool,
) -> Result<(String, Vec<TokenId>), ApiError> {
    match prompt {
        TextPrompt::Text(text) => {
            let size = TextSize::Bytes(text.len());
            let work = move |codec: &Codec| Ok((codec.encode_text(&text, framed)?, text));
            let (ids, text) = encode(state, "prompt", size, work).await?;
            Ok((text, ids))
        }
        TextPrompt::Tokens(ids) => {
            let size = TextSize::Ids(ids.len());
            encode(state, "prompt", size, move |codec| Ok((codec.decode_all(&ids), ids))).await
        }
    }
}

fn interaction(
    state: &AppState,
    context: &PromptContext,
    text: String,
    ids: Vec<TokenId>,
) -> Result<Interaction, ApiError> {
    let length = state.engine.info().context;
    if ids.is_empty() {
        return Err(ApiError::field("prompt", "prompt is empty: it must have at least one token"));
    }
    if ids.len() >= length {
        return Err(ApiError::too_long("prompt", ids.len(), length));
    }
    let message = Message::new(Role::User, text);
    Ok(context.interaction(state, vec![message], ids, ""))
}

/// A choice of the response without streaming.
fn whole(run: &RequestRun, head: &TextHead, choice: FinishedChoice) -> TextChoice {
    let FinishedChoice { index, text, tokens, finish, .. } = choice;
    let codec = run.state.engine.codec();
    TextChoice {
        index,
        text: head.echoed(index).unwrap_or_default().to_owned() + text.as_str(),
        logprobs: head.logprobs(codec, index, (true, &tokens), &mut 0),
        prompt_logprobs: head.prompt_logprobs(codec, index),
        finish_reason: Some(finish.as_str()),
        completion_id: head.own_id(index),
    }
}

// Streams text completions as server-sent events: for each choice its prompt, if requested, then
// events with text and an event with the finish reason; then usage, if requested; then `[DONE]`. A
// failure after the first byte ends the stream with an `error` event and without `[DONE]`.

struct TextEvents {
    run: RequestRun,
    head: TextHead,
    /// The version of the first choice to start, if that was before the headers.
    version: Option<PolicyVersion>,
    include_usage: bool,
    /// The length of each choice's text so far, in characters.
    offsets: Vec<usize>,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version of the first choice to start, if one has started.
async fn respond(
    mut run: RequestRun,
    head: TextHead,
    include_usage: bool,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let offsets = vec![0; head.choices()];
    let events = TextEvents { run, head, version, include_usage, offsets };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for TextEvents {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, finish, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let text: String = updates.iter().map(|update| update.text.as_str()).collect();
        let tokens: Vec<Token> = updates.into_iter().flat_map(|update| update.tokens).collect();
        let mut choices = Vec::new();
        let part = |text, logprobs, finish_reason| {
            let completion_id = self.head.own_id(index);
            TextChoice {
                index,
                text,
                logprobs,
                prompt_logprobs: None,
                finish_reason,
                completion_id,
            }
        };
        let codec = self.run.state.engine.codec();
        let mut elsewhere = 0;
        let offset = self.offsets.get_mut(index as usize).unwrap_or(&mut elsewhere);
        if started {
            let prompt_logprobs = self.head.prompt_logprobs(codec, index);
            let echoed = self.head.echoed(index);
            if echoed.is_some() || prompt_logprobs.is_some() {
                let logprobs =
                    echoed.and_then(|_| self.head.logprobs(codec, index, (true, &[]), offset));
                let prompt = part(echoed.unwrap_or_default().to_owned(), logprobs, None);
                choices.push(TextChoice { prompt_logprobs, ..prompt });
            }
        }
        if !text.is_empty() || !tokens.is_empty() {
            let logprobs = self.head.logprobs(codec, index, (false, &tokens), offset);
            choices.push(part(text, logprobs, None));
        }
        if let Some(finish) = finish {
            choices.push(part(String::new(), None, Some(finish.as_str())));
        }
        let usage = self.include_usage.then_some(None);
        let event = |choice| sse::json_event(&self.head.completion(version, vec![choice], usage));
        Ok(choices.into_iter().map(event).collect())
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let usage = Some(Some(self.run.usage()));
            let version = self.version.unwrap_or_else(|| self.run.version());
            events = sse::json_event(&self.head.completion(version, Vec::new(), usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }
}

// What the parts of one response have in common.

/// The prompts of a response.
struct TextHead {
    prompts: Vec<Arc<Interaction>>,
    choices_per_prompt: usize,
    echo: bool,
    /// Alternatives of each token in `logprobs`, if the client wants them.
    logprobs: Option<usize>,
    /// Alternatives of each token in `prompt_logprobs`, if the client wants them.
    prompt_logprobs: Option<usize>,
    /// The tokens of each prompt after the first with their log-probabilities; empty if nothing needs them.
    scored: Vec<Vec<Token>>,
    /// The id of the response, which is the first prompt's.
    id: String,
    created: u64,
    model: String,
}

impl TextHead {
    fn new(prompts: Vec<Arc<Interaction>>, request: &TextRequest, scored: Vec<Vec<Token>>) -> Self {
        let first = prompts.first();
        Self {
            choices_per_prompt: request.choices.max(1) as usize,
            echo: request.echo,
            logprobs: request.logprobs.map(usize::from),
            prompt_logprobs: request.prompt_logprobs.map(usize::from),
            scored,
            id: first.map(|prompt| prompt.completion_id()).unwrap_or_default(),
            created: first.map_or(0, |prompt| prompt.created / 1000),
            model: first.map(|prompt| prompt.model.clone()).unwrap_or_default(),
            prompts,
        }
    }

    /// Number of choices.
    fn choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }

    fn prompt(&self, index: u32) -> Option<&Interaction> {
        self.prompts.get(index as usize / self.choices_per_prompt).map(Arc::as_ref)
    }

    /// The text of a choice's prompt, if the client wants it before the completion.
    fn echoed(&self, index: u32) -> Option<&str> {
        let prompt = self.prompt(index).filter(|_| self.echo)?;
        prompt.messages.first().map(|message| message.content.as_str())
    }

    /// The log-probabilities of sampled tokens, after those of the prompt if `echoed`. `offset` is as in
    /// [`TextLogprobs::first`].
    fn logprobs(
        &self,
        codec: &Codec,
        index: u32,
        (echoed, sampled): (bool, &[Token]),
        offset: &mut usize,
    ) -> Option<TextLogprobs> {
        let most = self.logprobs?;
        let mut all = TextLogprobs::default();
        if echoed
            && self.echo
            && let Some(first) = self.prompt(index)?.prompt_ids.first()
        {
            all = TextLogprobs::first(codec, *first, offset);
            all = all.with(codec, self.scored_of(index), most, offset);
        }
        Some(all.with(codec, sampled, most, offset))
    }

    fn prompt_logprobs(
        &self,
        codec: &Codec,
        index: u32,
    ) -> Option<Vec<Option<BTreeMap<TokenId, PromptLogprob>>>> {
        Some(prompt_logprobs(codec, self.scored_of(index), self.prompt_logprobs?))
    }

    fn scored_of(&self, index: u32) -> &[Token] {
        self.scored.get(index as usize / self.choices_per_prompt).map_or(&[], Vec::as_slice)
    }

    /// The id of a choice's prompt, if there are several.
    fn own_id(&self, index: u32) -> Option<String> {
        let prompt = self.prompt(index).filter(|_| self.prompts.len() > 1)?;
        Some(prompt.completion_id())
    }

    fn completion(
        &self,
        version: PolicyVersion,
        choices: Vec<TextChoice>,
        usage: Option<Option<Usage>>,
    ) -> TextCompletion<'_> {
        TextCompletion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage,
        }
    }
}
