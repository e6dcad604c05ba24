//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! `fields` declares the fields of requests. `request` validates a body with `turns` (its messages) and `tools`,
//! and translates it into a [`ConversationRequest`](super::chat::conversation::ConversationRequest). `wire`
//! defines the shapes of responses, `stream` sends them as server-sent events, and `error` gives errors of
//! these routes Anthropic's shape.

mod error;
pub(super) mod fields;
mod request;
mod stream;
mod tools;
mod turns;
pub(super) mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use self::request::{MessagesPrompt, MessagesRequest};
use self::wire::{MessageObject, StopInfo, TokenCount};
use super::auth::Caller;
use super::body::JsonObject;
use super::chat::conversation::{AnswerRun, begin, collect};
use super::error::ApiError;
use super::generate::prompt::tokenize;
use super::generate::{models, with_version};
use super::observe::RequestId;
use super::state::AppState;

pub(super) use error::{MessageError, shape_errors};

/// `POST /v1/messages`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Extension(request_id): Extension<RequestId>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let MessagesRequest { conversation, stream } = request::read(&body, state.engine.info().vocab)?;
    let begun = begin(state, caller, conversation, arrived).await?;
    if stream {
        let (version, response) = stream::respond(begun, request_id).await?;
        return Ok(with_version(response, version));
    }
    let AnswerRun { mut run, interaction, answers } = begun;
    let (mut messages, usage) = collect(answers, &mut run).await?;
    let message = messages.pop().ok_or_else(ApiError::internal)?;
    let codec = run.state.engine.codec();
    let stop = StopInfo::new(message.end, codec, &interaction.stop, &message.token_ids);
    let object = MessageObject {
        content: message.items.into_iter().map(Into::into).collect(),
        stop,
        ..MessageObject::new(&interaction, usage)
    };
    Ok(with_version(Json(object).into_response(), Some(run.version())))
}

/// `POST /v1/messages/count_tokens`. Nothing is sampled or recorded.
pub(super) async fn count_tokens(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<TokenCount>, ApiError> {
    let MessagesPrompt { model, messages, chat, .. } = request::read_prompt(&body)?;
    models::check(&state, &model)?;
    let ids = tokenize(&state, "messages", &messages, &chat, true).await?;
    Ok(Json(TokenCount { input_tokens: ids.len() }))
}
