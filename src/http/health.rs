//! `/livez`, `/readyz` and `/metrics`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use serde_json::{Value, json};

use hone_core::memory;

use super::error::ApiError;
use super::state::AppState;

/// `GET /livez`: the process runs.
pub(super) async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// `GET /readyz`: requests can be served.
pub(super) async fn ready(State(state): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    if state.ready.load(Ordering::Acquire) {
        Ok(Json(json!({ "status": "ready" })))
    } else {
        Err(ApiError::unavailable("not ready: starting or shutting down"))
    }
}

/// `GET /metrics`, in Prometheus' text format.
pub(super) async fn metrics(
    State(state): State<Arc<AppState>>,
) -> Result<impl IntoResponse, ApiError> {
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    state.metrics.memory_resident.set(bytes(memory::resident()));
    state.metrics.memory_resident_peak.set(bytes(memory::peak_resident()));
    let text = state.metrics.encode();
    let text = text.map_err(|error| ApiError::logged("cannot encode the metrics", &error))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}
