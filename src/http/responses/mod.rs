//! OpenAI's Responses: `POST /v1/responses` and the endpoints of recorded responses.
//!
//! `request` validates the body (`fields` declares it; `input` and `text` read their parts), and `history`
//! completes the conversation by earlier responses in the ledger. [`chat`](super::chat) samples the answer
//! like that of a chat completion. `output` makes its `items`, `wire` and `events` define the shapes, `run`
//! and `stream` report the progress, `stored` has the endpoints of recorded responses.

pub(super) mod events;
pub(super) mod fields;
mod history;
mod input;
mod items;
mod output;
mod request;
mod run;
pub(super) mod stored;
mod stream;
mod text;
pub(super) mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use self::run::ResponseRun;
use super::auth::Caller;
use super::body::JsonObject;
use super::chat::conversation::begin;
use super::error::ApiError;
use super::generate::with_version;
use super::state::AppState;

/// `POST /v1/responses`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = request::read(&body, state.config.default_max_tokens, vocab)?;
    let stream = request.stream;
    let conversation = history::complete(&state, &caller, request).await?;
    let mut run = ResponseRun::new(begin(state, caller, conversation, arrived).await?);
    if stream {
        let (version, response) = stream::respond(run).await?;
        return Ok(with_version(response, version));
    }
    run.run.read_whole();
    while let Some(events) = run.next().await {
        events?;
    }
    Ok(with_version(Json(run.ended()).into_response(), run.version))
}
