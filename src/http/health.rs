//! Probes and metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::AppState;
use super::error::ApiError;

/// The process runs.
pub(super) async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Requests can be served.
pub(super) async fn ready(State(state): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    if state.ready.load(Ordering::Acquire) {
        Ok(Json(json!({ "status": "ready" })))
    } else {
        Err(ApiError::unavailable("not ready: starting or shutting down"))
    }
}

/// Prometheus' text format.
pub(super) async fn metrics(
    State(state): State<Arc<AppState>>,
) -> Result<impl IntoResponse, ApiError> {
    let text = state.metrics.encode().map_err(|error| {
        tracing::error!(%error, "metrics cannot be encoded");
        ApiError::internal()
    })?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}
