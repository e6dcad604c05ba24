//! What operators and their tools use: `/admin`, the probes and the metrics.

pub mod admin;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::files::free_bytes;
use hone_core::memory;
use hone_core::metrics::Metrics;
use hone_store::StoreTrouble;

use crate::error::{ApiError, JsonResult};
use crate::state::{AppState, DiskLimit};

// `/livez`, `/readyz` and `/metrics`, and the answers while the model is loading.

/// The response of a probe.
#[derive(Serialize, JsonSchema)]
pub struct ProbeStatus {
    status: &'static str,
}

/// `GET /livez`: the process runs.
pub async fn live() -> Json<ProbeStatus> {
    Json(ProbeStatus { status: "ok" })
}

/// `GET /readyz`: requests can be served and recorded.
pub async fn ready(State(state): State<Arc<AppState>>) -> JsonResult<ProbeStatus> {
    let reasons = unready(&state);
    if reasons.is_empty() {
        Ok(Json(ProbeStatus { status: "ready" }))
    } else {
        Err(ApiError::unavailable(format!("not ready: {}", reasons.join("; "))))
    }
}

/// Every route except `/livez` and `/metrics` while the model is loading.
pub async fn loading() -> ApiError {
    ApiError::unavailable("not ready: the model is loading")
}

/// A request that is no probe, while every connection is taken.
pub async fn crowded() -> ApiError {
    ApiError::unavailable("every connection is taken (server.connections.max)")
}

/// Why requests cannot be served or recorded.
fn unready(state: &AppState) -> Vec<String> {
    if !state.ready.load(Ordering::Acquire) {
        return vec!["the server is shutting down".to_owned()];
    }
    let ledger = state.store.trouble();
    if ledger == Some(StoreTrouble::Failing) {
        // Without traffic, no other write would find that the disk works again.
        let store = state.store.clone();
        tokio::spawn(async move {
            if let Err(error) = store.flush().await {
                tracing::debug!(%error, "the ledger still fails");
            }
        });
    }
    let ledger = ledger.map(|trouble| trouble.to_string());
    [state.engine.trouble(), ledger, too_full(&state.disk)].into_iter().flatten().collect()
}

fn too_full(limit: &DiskLimit) -> Option<String> {
    let DiskLimit { dir, min_free } = limit;
    // A system that does not say is no reason.
    let free = free_bytes(dir).ok().filter(|free| free < min_free)?;
    Some(format!("data.dir has {free} free bytes, fewer than {min_free}"))
}

/// `GET /metrics`, in Prometheus' text format.
pub async fn metrics(State(state): State<Arc<AppState>>) -> Result<impl IntoResponse, ApiError> {
    if let Ok(free) = free_bytes(&state.disk.dir) {
        state.metrics.data_free.set(bytes(free));
    }
    encoded(&state.metrics)
}

/// `GET /metrics` while the model is loading.
pub async fn early_metrics(
    State(metrics): State<Arc<Metrics>>,
) -> Result<impl IntoResponse, ApiError> {
    encoded(&metrics)
}

fn encoded(metrics: &Metrics) -> Result<impl IntoResponse + use<>, ApiError> {
    metrics.memory_resident.set(bytes(memory::resident()));
    metrics.memory_resident_peak.set(bytes(memory::peak_resident()));
    let text = metrics.encode();
    let text = text.map_err(|error| ApiError::logged("cannot encode the metrics", &error))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
