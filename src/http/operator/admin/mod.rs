//! The operator's routes: `/admin/train`, `/admin/policies` and `/admin/feedback/quarantine`.

pub(in crate::http) mod quarantine;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{PolicyRecord, PolicyVersion};
use hone_train::TrainStatus;

use crate::http::body::PathText;
use crate::http::error::ApiError;
use crate::http::state::AppState;

type JsonResult<T> = Result<Json<T>, ApiError>;

/// Response of `GET /admin/policies`.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct PolicyList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    active: u64,
    data: Vec<PolicyRecord>,
}

/// `GET /admin/train`
pub(in crate::http) async fn status(State(state): State<Arc<AppState>>) -> Json<TrainStatus> {
    Json(state.train.status())
}

/// `POST /admin/train/pause`
pub(in crate::http) async fn pause(State(state): State<Arc<AppState>>) -> JsonResult<TrainStatus> {
    state.train.pause()?;
    tracing::info!("training paused");
    Ok(Json(state.train.status()))
}

/// `POST /admin/train/resume`
pub(in crate::http) async fn resume(State(state): State<Arc<AppState>>) -> JsonResult<TrainStatus> {
    state.train.resume()?;
    tracing::info!("training resumed");
    Ok(Json(state.train.status()))
}

/// `POST /admin/train/step`
pub(in crate::http) async fn step(State(state): State<Arc<AppState>>) -> JsonResult<TrainStatus> {
    run_detached(async move { state.train.step().await }).await
}

/// `GET /admin/policies`
pub(in crate::http) async fn policies(
    State(state): State<Arc<AppState>>,
) -> JsonResult<PolicyList> {
    let active = state.policies.active().0;
    Ok(Json(PolicyList { object: "list", active, data: state.policies.list()? }))
}

/// `POST /admin/policies/{version}/activate`
pub(in crate::http) async fn activate(
    State(state): State<Arc<AppState>>,
    PathText(version): PathText,
) -> JsonResult<PolicyRecord> {
    let version = parse(&version)?;
    tracing::info!(%version, "an operator activates a version");
    let reason = "activated by an operator";
    run_detached(async move { state.policies.activate(version, reason).await }).await
}

/// `POST /admin/policies/{version}/pin`
pub(in crate::http) async fn pin(
    State(state): State<Arc<AppState>>,
    PathText(version): PathText,
) -> JsonResult<PolicyRecord> {
    let version = parse(&version)?;
    run_detached(async move { state.policies.pin(version, true).await }).await
}

/// `POST /admin/policies/{version}/unpin`
pub(in crate::http) async fn unpin(
    State(state): State<Arc<AppState>>,
    PathText(version): PathText,
) -> JsonResult<PolicyRecord> {
    let version = parse(&version)?;
    run_detached(async move { state.policies.pin(version, false).await }).await
}

fn parse(version: &str) -> Result<PolicyVersion, ApiError> {
    version.parse().map(PolicyVersion).map_err(|_| {
        let message = format!("version is {version:?}: it must be the number of a policy version");
        ApiError::field("version", message)
    })
}

/// Runs `work` to completion, even if the client disconnects and its request is dropped.
async fn run_detached<T, E>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> JsonResult<T>
where
    T: Send + 'static,
    E: Into<ApiError> + Send + 'static,
{
    match tokio::spawn(work).await {
        Ok(result) => result.map(Json).map_err(Into::into),
        Err(error) => Err(ApiError::logged("an operator's request panicked", &error)),
    }
}
