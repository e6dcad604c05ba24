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

use hone_core::types::{ChatOptions, ClientEndpoint, Interaction, Message, Role, TokenId};
use hone_engine::Codec;

use self::head::TextHead;
use self::request::{TextPrompt, TextRequest};
use self::wire::{TextChoice, TextLogprobs};
use super::admit::{WantedTokens, admit};
use super::prompt::{PromptContext, TextSize, encode};
use super::run::RequestRun;
use super::types::{FinishedChoice, SamplingRequest};
use super::{models, with_version};
use crate::http::auth::Caller;
use crate::http::body::JsonObject;
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// `POST /v1/completions`
pub async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let request = request::read(&body, state.engine.info().vocab)?;
    models::check(&state, &request.model)?;
    let wanted = WantedTokens {
        params: &request.params,
        max_tokens_field: "max_tokens",
        choices: request.choices as usize * request.prompts.len(),
        choices_field: if request.choices > 1 { "n" } else { "prompt" },
        prompt_tokens: request.prompts.iter().map(TextPrompt::estimated_tokens).sum(),
    };
    let permit = admit(&state, &caller, &wanted)?;
    let TextRequest { model, prompts, params, stop, metadata, user, store, .. } = request;
    let context = PromptContext {
        model,
        endpoint: ClientEndpoint::Completions,
        metadata,
        params,
        stop,
        chat: ChatOptions::default(),
        caller,
        user: user.clone(),
        store,
        grammar: None,
    };
    let mut interactions = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (text, ids) = tokenize(&state, prompt, request.add_special_tokens).await?;
        interactions.push(Arc::new(interaction(&state, &context, text, ids)?));
    }
    let head = TextHead::new(interactions.clone(), request.choices, request.echo);
    let run = SamplingRequest {
        prompts: interactions,
        choices: request.choices,
        logprobs: request.logprobs,
        grammar: None,
        token_ids: false,
        user,
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
        logprobs: run.wants_logprobs().then(|| TextLogprobs::new(codec, &tokens, &mut 0)),
        finish_reason: Some(finish.as_str()),
        completion_id: head.own_id(index),
    }
}
