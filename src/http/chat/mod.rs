//! `POST /v1/chat/completions`, and what every endpoint of conversations shares.
//!
//! `fields` declares the fields of a request, `request` validates them with `messages`, `tools` and
//! `constraint` (its grammar), `wire` defines the shapes of responses, `stream` sends them as server-sent
//! events. `stored` has the endpoints of recorded completions.
//!
//! Shared are `conversation`, which admits a request and starts to sample its answers (with `calls`, the
//! grammar of an answer whose calls are constrained), and `answer`, which divides what is sampled into the
//! parts of a message. [`generate`](super::generate) samples and records.

pub(super) mod answer;
mod calls;
pub(super) mod constraint;
pub(super) mod conversation;
pub(super) mod fields;
pub(super) mod messages;
pub(super) mod request;
pub(super) mod stored;
mod stream;
pub(super) mod tools;
pub(super) mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use self::conversation::{AnswerRun, begin, collect};
use self::request::ChatRequest;
use self::wire::{ChatCompletion, Choice, Logprobs};
use super::auth::Caller;
use super::body::JsonObject;
use super::error::ApiError;
use super::generate::with_version;
use super::state::AppState;

/// `POST /v1/chat/completions`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = request::read(&body, state.config.default_max_tokens, vocab)?;
    let ChatRequest { conversation, stream, include_usage } = request;
    let begun = begin(state, caller, conversation, arrived).await?;
    if stream {
        let (version, response) = stream::respond(begun, include_usage).await?;
        return Ok(with_version(response, version));
    }
    let AnswerRun { mut run, interaction, answers } = begun;
    let (messages, usage) = collect(answers, &mut run).await?;
    let codec = run.state.engine.codec();
    let choices = messages.into_iter().zip(0..).map(|(message, index)| {
        let logprobs = run.wants_logprobs().then(|| Logprobs::new(codec, &message.tokens));
        Choice::new(index, message, logprobs, run.wants_token_ids())
    });
    let completion = ChatCompletion {
        prompt_token_ids: run.wants_token_ids().then(|| interaction.prompt_ids.clone()),
        ..ChatCompletion::new(&interaction, run.version(), choices.collect(), usage)
    };
    Ok(with_version(Json(completion).into_response(), Some(run.version())))
}
