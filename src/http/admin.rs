//! The operator's routes.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;

use hone_core::types::{PolicyRecord, PolicyVersion};
use hone_train::TrainStatus;

use super::AppState;
use super::error::ApiError;

type Answer<T> = Result<Json<T>, ApiError>;

/// `GET /admin/policies`
#[derive(Serialize)]
pub(super) struct PolicyList {
    object: &'static str,
    active: u64,
    data: Vec<PolicyRecord>,
}

/// `GET /admin/train`
pub(super) async fn status(State(state): State<Arc<AppState>>) -> Json<TrainStatus> {
    Json(state.train.status())
}

/// `POST /admin/train/pause`
pub(super) async fn pause(State(state): State<Arc<AppState>>) -> Answer<TrainStatus> {
    state.train.pause()?;
    tracing::info!("training paused");
    Ok(Json(state.train.status()))
}

/// `POST /admin/train/resume`
pub(super) async fn resume(State(state): State<Arc<AppState>>) -> Answer<TrainStatus> {
    state.train.resume()?;
    tracing::info!("training resumed");
    Ok(Json(state.train.status()))
}

/// `POST /admin/train/step`
pub(super) async fn step(State(state): State<Arc<AppState>>) -> Answer<TrainStatus> {
    to_the_end(async move { state.train.step().await }).await.map(Json)
}

/// `GET /admin/policies`
pub(super) async fn policies(State(state): State<Arc<AppState>>) -> Answer<PolicyList> {
    let active = state.policies.active().0;
    Ok(Json(PolicyList { object: "list", active, data: state.policies.list()? }))
}

/// `POST /admin/policies/{version}/activate`
pub(super) async fn activate(
    State(state): State<Arc<AppState>>,
    Path(version): Path<String>,
) -> Answer<PolicyRecord> {
    let number = version.parse().map_err(|_| {
        let message = format!("version is {version:?}: it must be a policy version's number");
        ApiError::field("version", message)
    })?;
    tracing::info!(version = number, "activation asked for by hand");
    to_the_end(
        async move { state.policies.activate(PolicyVersion(number), "activated by hand").await },
    )
    .await
    .map(Json)
}

/// Runs to its end even if the caller hangs up halfway.
async fn to_the_end<T, E>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Into<ApiError> + Send + 'static,
{
    match tokio::spawn(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(error) => {
            tracing::error!(%error, "an operator's request failed");
            Err(ApiError::internal())
        }
    }
}
