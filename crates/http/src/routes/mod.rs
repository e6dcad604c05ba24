//! The routes and the middleware around all of them. `table` lists every route, and makes their OpenAPI document.

mod table;

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderName, Method, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use tower_http::catch_panic::CatchPanicLayer;

use hone_core::metrics::Metrics;

use self::table::{ApiDocument, ApiRoute};
use super::body::check_length;
use super::error::{ApiError, ErrorCode};
use super::messages::MessageError;
use super::observe::REQUEST_ID;
use super::state::AppState;
use super::{auth, data, observe, operator};

/// Anthropic's name of `x-request-id`.
const MESSAGES_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The whole HTTP surface. Serve it with connect info: `/admin` may require a local caller.
pub fn router(state: impl Into<Arc<AppState>>) -> Router {
    let state = state.into();
    let authenticator = auth::Authenticator::new(&state.config, Arc::clone(&state.keys));
    let authenticator = Arc::new(authenticator);
    let cors = Arc::new(state.config.cors_origins.clone());
    let most = state.config.max_body_bytes;
    let routes = table::routes(&state.config);
    let document = ApiDocument(table::describe(&routes).to_string().into());
    let add = |router: Router<_>, route: ApiRoute| router.route(route.path, route.handler);
    routes
        .into_iter()
        .fold(Router::new(), add)
        .layer(Extension(document))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .layer((DefaultBodyLimit::max(most), from_fn_with_state(most, check_length)))
        .layer(from_fn_with_state(Arc::clone(&state), data::record_actions))
        .layer(from_fn_with_state(authenticator, auth::authenticate))
        .layer(from_fn_with_state(cors, auth::share))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(state.metrics.clone(), observe::observe))
        .layer(from_fn(shape_messages))
        .with_state(state)
}

/// The routes while the model is loading. Nothing but probes and metrics is answered, so no key is checked.
pub fn starting(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/livez", get(operator::live))
        .route("/metrics", get(operator::early_metrics))
        .fallback(operator::starting)
        .layer(from_fn_with_state(metrics.clone(), observe::observe))
        .layer(from_fn(shape_messages))
        .with_state(metrics)
}

/// The answer to every request for which there is no connection.
pub fn crowded(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .fallback(operator::crowded)
        .layer(from_fn_with_state(metrics, observe::observe))
        .layer(from_fn(shape_messages))
}

/// Gives errors of `/v1/messages` and the paths below it Anthropic's shape, and adds Anthropic's headers: the request's
/// id and its key's limits.
async fn shape_messages(request: Request, next: Next) -> Response {
    let below = request.uri().path().strip_prefix("/v1/messages");
    let is_own = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !is_own {
        return response;
    }
    let id = response.headers().get(REQUEST_ID).cloned();
    if let Some(error) = response.extensions().get::<ApiError>() {
        let id = id.as_ref().and_then(|id| id.to_str().ok());
        // An object of strings always serializes.
        let body = serde_json::to_string(&MessageError::new(error, id)).unwrap_or_default();
        *response.body_mut() = Body::from(body);
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if let Some(id) = id {
        response.headers_mut().insert(MESSAGES_REQUEST_ID, id);
    }
    if let Some(key) = response.extensions().get::<Arc<auth::ApiKey>>().cloned() {
        key.limiter.add_anthropic_headers(response.headers_mut(), Instant::now());
    }
    response
}

async fn no_such_route(method: Method, uri: Uri) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{method} is not allowed on {}", uri.path());
    ApiError::new(ErrorCode::MethodNotAllowed, message)
}

fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("no message"), "a handler panicked");
    ApiError::internal().into_response()
}

#[cfg(test)]
mod tests;
