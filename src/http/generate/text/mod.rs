//! `POST /v1/completions`: OpenAI's older endpoint, which continues texts or token ids.
//!
//! No chat template is applied. A text is recorded as one message of a user, beside the token ids, which
//! alone are trained on. Each of several prompts has its own record and id.

mod head;
pub(in crate::http) mod request;
mod stream;
pub(in crate::http) mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{StreamExt, TryStreamExt};

use hone_core::types::{
    ChatOptions, ClientEndpoint, FinishReason, Interaction, Message, Role, TokenId,
};
use hone_engine::{Codec, GenerateRequest, Token};

use self::head::TextHead;
use self::request::TextPrompt;
use self::wire::TextChoice;
use super::admit::{WantedTokens, admit};
use super::prompt::{PromptContext, TextSize, encode};
use super::run::{RequestRun, assigned_version};
use super::types::{FinishedChoice, SamplingRequest, Usage};
use super::{models, with_version};
use crate::http::auth::Caller;
use crate::http::body::JsonObject;
use crate::http::error::ApiError;
use crate::http::state::AppState;

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
        let (version, response) = stream::respond(run, head, request.include_usage).await?;
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
