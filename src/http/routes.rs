//! The table of routes and the middleware around all of them.

use std::any::Any;
use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use tower_http::catch_panic::CatchPanicLayer;

use hone_core::metrics::Metrics;

use super::chat::stored;
use super::error::ApiError;
use super::generate::{models, text, tokenize};
use super::graders::GraderQueue;
use super::operator::admin::{self, quarantine};
use super::operator::health;
use super::state::AppState;
use super::{auth, chat, feedback, graders, messages, observe};
use crate::config::ServerConfig;

/// The whole HTTP surface. Serve it with connect info: `/admin` may require a local caller.
pub fn router(state: AppState) -> Router {
    let state = Arc::new(state);
    let authenticator = auth::Authenticator::new(&state.config, Arc::clone(&state.keys));
    let authenticator = Arc::new(authenticator);
    let cors = auth::CorsRule::new(&state.config.cors_origins);
    let limit = DefaultBodyLimit::max(state.config.max_body_bytes);
    Router::new()
        .route("/v1/chat/completions", post(chat::create).get(stored::list))
        .route(
            "/v1/chat/completions/{id}",
            get(stored::retrieve).post(stored::update).delete(stored::delete),
        )
        .route("/v1/chat/completions/{id}/messages", get(stored::messages))
        .route("/v1/completions", post(text::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::retrieve))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/feedback", post(feedback::create).get(feedback::list))
        .merge(grader_routes(&state.config))
        .route("/admin/train", get(admin::status))
        .route("/admin/train/pause", post(admin::pause))
        .route("/admin/train/resume", post(admin::resume))
        .route("/admin/train/step", post(admin::step))
        .route("/admin/policies", get(admin::policies))
        .route("/admin/policies/{version}/activate", post(admin::activate))
        .route("/admin/policies/{version}/pin", post(admin::pin))
        .route("/admin/policies/{version}/unpin", post(admin::unpin))
        .route("/admin/feedback/quarantine", get(quarantine::list))
        .route(
            "/admin/feedback/quarantine/{key}",
            post(quarantine::flag).delete(quarantine::release),
        )
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/metrics", get(health::metrics))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(limit)
        .layer(from_fn_with_state(authenticator, auth::authenticate))
        .layer(from_fn_with_state(cors, auth::share))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(state.metrics.clone(), observe::observe))
        .layer(from_fn(messages::shape_errors))
        .with_state(state)
}

/// The routes of graders, with limits of their own.
fn grader_routes(config: &ServerConfig) -> Router<Arc<AppState>> {
    let queue = GraderQueue::new(&config.graders);
    let limit = DefaultBodyLimit::max(config.graders.max_bytes.min(config.max_body_bytes));
    Router::new()
        .route("/v1/fine_tuning/alpha/graders/run", post(graders::run))
        .route("/v1/fine_tuning/alpha/graders/validate", post(graders::validate))
        .layer(limit)
        .layer(Extension(queue))
}

/// The routes while the model is loading. Nothing but probes and metrics is answered, so no key is checked.
pub(super) fn starting(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/livez", get(health::live))
        .route("/metrics", get(health::early_metrics))
        .fallback(health::loading)
        .layer(from_fn_with_state(metrics.clone(), observe::observe))
        .layer(from_fn(messages::shape_errors))
        .with_state(metrics)
}

async fn no_such_route(method: Method, uri: Uri) -> ApiError {
    ApiError::not_found(format!("there is no {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(&method, uri.path())
}

fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("no message"), "a handler panicked");
    ApiError::internal().into_response()
}
