//! `POST /v1/chat/completions`.
//!
//! `request` validates the body with `messages` and `tools`, `run` samples the choices (each a `choice`
//! with an `answer`) and records them, `wire` defines the shapes of responses, `stream` sends them as
//! server-sent events.
//!
//! Each choice is a separate generation of exactly one policy version. The choices of one request
//! have different versions only if a version was published while some waited for slots. Then
//! `x-hone-policy-version` is the version of the first choice to start (streaming) or of choice 0
//! (otherwise); each streamed chunk's `system_fingerprint` and each ledger record has the version of
//! its own choice.

mod answer;
mod choice;
mod messages;
mod request;
mod run;
mod stream;
mod tools;
mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use hone_core::types::{Interaction, InteractionId, PromptSource, TokenId, now_ms};
use hone_engine::answer::AnswerForm;
use hone_engine::{ChatPrompt, Engine, ToolFormat};

use self::request::ChatRequest;
use self::run::ChatRun;
use super::auth::Caller;
use super::body::JsonObject;
use super::error::ApiError;
use super::models;
use super::state::AppState;

/// Response header with the policy version.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-hone-policy-version");
/// Conversations longer than this are tokenized on a blocking thread.
const INLINE_BYTES: usize = 16 << 10;

/// `POST /v1/chat/completions`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = request::read(&body, state.config.default_max_tokens, vocab)?;
    models::check(&state, &request.model)?;
    let codec = state.engine.codec();
    let format = state.config.tool_format.or(codec.tool_format());
    let prompt = tokenize(&state.engine, &request, format).await?;
    let form = AnswerForm::new(codec, &prompt, &request.chat, format);
    let interaction = Arc::new(interaction(&state, &request, prompt.ids, caller));
    let run = ChatRun::new(state, interaction, &request, &form, arrived);
    let (version, mut response) = if request.stream {
        stream::respond(run, request.include_usage).await?
    } else {
        let (version, completion) = run.finish().await?;
        (version, Json(completion).into_response())
    };
    response.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version.0));
    Ok(response)
}

async fn tokenize(
    engine: &Arc<dyn Engine>,
    request: &ChatRequest,
    format: ToolFormat,
) -> Result<ChatPrompt, ApiError> {
    let (messages, options) = (&request.messages, &request.chat);
    let calls = messages.iter().flat_map(|m| &m.tool_calls).map(|call| call.arguments.len());
    let schemas = options.tools.iter().filter_map(|tool| tool.parameters.as_ref());
    let size: usize = messages.iter().map(|m| m.content.len()).sum::<usize>()
        + calls.sum::<usize>()
        + schemas.map(|schema| schema.to_string().len()).sum::<usize>();
    if size <= INLINE_BYTES {
        return Ok(engine.codec().chat_prompt(messages, options, format)?);
    }
    let (codec, messages, options) = (engine.codec().clone(), messages.clone(), options.clone());
    let rendered = move || codec.chat_prompt(&messages, &options, format);
    let prompt = tokio::task::spawn_blocking(rendered).await;
    Ok(prompt.map_err(|error| ApiError::logged("the tokenizer panicked", &error))??)
}

fn interaction(
    state: &AppState,
    request: &ChatRequest,
    prompt_ids: Vec<TokenId>,
    caller: Caller,
) -> Interaction {
    let route = state.routes.find(&request.model, &request.metadata);
    let mut interaction = Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Live,
        // No route has an empty name, so an unmatched request is never scored.
        route: route.map(|r| r.name.clone()).unwrap_or_default(),
        model: request.model.clone(),
        key_id: caller.key_id,
        messages: request.messages.clone(),
        metadata: request.metadata.clone(),
        params: request.params.clone(),
        prompt_ids,
        template_hash: state.engine.codec().template_hash().to_owned(),
        stop: request.stop.clone(),
        held_out: false,
        chat: request.chat.clone(),
    };
    interaction.held_out = route.is_some_and(|route| route.has_graders())
        && is_held_out(&interaction, state.holdout_share);
    interaction
}

/// Whether only exams use a prompt. Equal prompts give the same answer, so that no copy of an exam's
/// prompt is trained on.
fn is_held_out(interaction: &Interaction, share: f64) -> bool {
    let [a, b, c, d, ..] = interaction.prompt_digest();
    let place = u32::from_le_bytes([a, b, c, d]);
    (f64::from(place) / f64::from(u32::MAX)) < share
}
