//! `POST /v1/chat/completions`.
//!
//! `request` checks what was asked, `run` samples the choices and records them, `wire` has the
//! answers' shapes, `stream` sends them as server-sent events.
//!
//! Each choice is one generation of its own, so each comes from exactly one policy version.
//! Versions of one request's choices differ only if a version was published while they waited for
//! slots; `x-hone-policy-version` then names the first choice to start when streaming and choice 0
//! otherwise, a streamed chunk's `system_fingerprint` its own choice's, and the ledger each.

mod request;
mod run;
mod stream;
mod wire;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use hone_core::types::{
    Interaction, InteractionId, Message, PolicyVersion, PromptSource, TokenId, now_ms,
};
use hone_engine::Engine;

use self::request::ChatRequest;
use self::run::ChatRun;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::JsonObject;
use super::{AppState, models};

/// Names the policy version in every answer.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-hone-policy-version");
/// Longer conversations are tokenised off the runtime's threads.
const INLINE_BYTES: usize = 16 << 10;

/// `POST /v1/chat/completions`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = std::time::Instant::now();
    let vocab = state.engine.info().vocab;
    let asked = request::read(&body, state.config.default_max_tokens, vocab)?;
    models::check(&state, &asked.model)?;
    let prompt_ids = tokenise(&state.engine, &asked.messages).await?;
    let interaction = Arc::new(interaction(&state, &asked, prompt_ids, caller));
    let run = ChatRun::new(state, interaction, &asked, arrived);
    if asked.stream {
        stream::respond(run, asked.include_usage).await
    } else {
        let (version, answer) = run.finish().await?;
        Ok(with_version(version, Json(answer).into_response()))
    }
}

async fn tokenise(
    engine: &Arc<dyn Engine>,
    messages: &[Message],
) -> Result<Vec<TokenId>, ApiError> {
    let size: usize = messages.iter().map(|m| m.content.len()).sum();
    if size <= INLINE_BYTES {
        return Ok(engine.codec().prompt(messages)?);
    }
    let (codec, messages) = (engine.codec().clone(), messages.to_vec());
    match tokio::task::spawn_blocking(move || codec.prompt(&messages)).await {
        Ok(ids) => Ok(ids?),
        Err(error) => {
            tracing::error!(%error, "tokenising failed");
            Err(ApiError::internal())
        }
    }
}

fn interaction(
    state: &AppState,
    asked: &ChatRequest,
    prompt_ids: Vec<TokenId>,
    caller: Caller,
) -> Interaction {
    let route = state.routes.find(&asked.model, &asked.metadata);
    Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Live,
        // No route has an empty name: nothing scores such a request.
        route: route.map(|r| r.name.clone()).unwrap_or_default(),
        model: asked.model.clone(),
        key_id: caller.key_id,
        messages: asked.messages.clone(),
        metadata: asked.metadata.clone(),
        params: asked.params.clone(),
        prompt_ids,
        template_hash: state.engine.codec().template_hash().to_owned(),
    }
}

fn with_version(version: PolicyVersion, mut response: Response) -> Response {
    response.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version.0));
    response
}
