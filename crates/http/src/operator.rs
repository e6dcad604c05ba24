//! What operators and their tools use: `/admin`, the probes and the metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::files::free_bytes;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyRecord, PolicyVersion, UnixMillis, now_ms};
use hone_reward::feedback::QuarantineReason;
use hone_store::{Op, QuarantinedKey, StoreTrouble};
use hone_train::TrainStatus;
use hone_train::policy::RELEARN;

use crate::auth::ListedKey;
use crate::body::{Field, FieldTable, Fields, JsonObject, List, PathText, QueryObject};
use crate::error::{ApiError, ErrorCode, JsonResult};
use crate::state::{AppState, DiskLimit};

type AppContext = State<Arc<AppState>>;

// `/livez`, `/readyz` and `/metrics`, and the answers while the model is loading.

/// The response of a probe.
#[derive(Serialize, JsonSchema)]
pub struct ProbeStatus {
    status: &'static str,
    /// Why a server does not serve its fleet's version; absent if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    fleet: Option<String>,
}

/// `GET /livez`: the process runs.
pub async fn live() -> Json<ProbeStatus> {
    Json(ProbeStatus { status: "ok", fleet: None })
}

/// `GET /readyz`: requests can be served and recorded.
pub async fn ready(State(state): AppContext) -> JsonResult<ProbeStatus> {
    let reasons = unready(&state);
    if reasons.is_empty() {
        let fleet = state.fleet.as_ref().and_then(|fleet| fleet.problem.borrow().clone());
        Ok(Json(ProbeStatus { status: "ready", fleet }))
    } else {
        Err(ApiError::unavailable(format!("not ready: {}", reasons.join("; "))))
    }
}

/// Every route except `/livez` and `/metrics` while the model is loading, or while a trainer waits for its fleet's lease.
pub async fn starting(State(metrics): State<Arc<Metrics>>) -> ApiError {
    let stands_by = metrics.fleet_process.with_label_values(&["standby"]).get() == 1;
    ApiError::unavailable(if stands_by {
        "not ready: another trainer of the fleet holds the lease, and this one stands by"
    } else {
        "not ready: the model is loading"
    })
}

/// A request that is no probe, while every connection is taken.
pub async fn crowded() -> ApiError {
    ApiError::unavailable("every connection is taken (server.connections.max)")
}

/// Why requests cannot be served or recorded.
pub fn unready(state: &AppState) -> Vec<String> {
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
    let DiskLimit { dir, min_free, .. } = limit;
    // A system that does not say is no reason.
    let free = free_bytes(dir).ok().filter(|free| free < min_free)?;
    Some(format!("data.dir has {free} free bytes, fewer than {min_free}"))
}

/// `GET /metrics`, in Prometheus' text format.
pub async fn metrics(State(state): AppContext) -> Result<impl IntoResponse, ApiError> {
    encoded(&state.metrics)
}

/// `GET /metrics` while the model is loading.
pub async fn early_metrics(
    State(metrics): State<Arc<Metrics>>,
) -> Result<impl IntoResponse, ApiError> {
    encoded(&metrics)
}

fn encoded(metrics: &Metrics) -> Result<impl IntoResponse + use<>, ApiError> {
    let text = metrics.encode();
    let text = text.map_err(|error| ApiError::logged("cannot encode the metrics", &error))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

// `/admin/train` and `/admin/policies`.

/// Response of `GET /admin/policies`.
#[derive(Serialize, JsonSchema)]
pub struct PolicyList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    active: u64,
    data: Vec<PolicyRecord>,
}

pub async fn status(State(state): AppContext) -> Json<TrainStatus> {
    Json(state.train.status())
}

pub async fn pause(State(state): AppContext) -> JsonResult<TrainStatus> {
    state.train.pause()?;
    tracing::info!("training paused");
    Ok(Json(state.train.status()))
}

pub async fn resume(State(state): AppContext) -> JsonResult<TrainStatus> {
    state.train.resume()?;
    tracing::info!("training resumed");
    Ok(Json(state.train.status()))
}

pub async fn step(State(state): AppContext) -> JsonResult<TrainStatus> {
    run_detached(async move { state.train.step().await }).await
}

pub async fn policies(State(state): AppContext) -> JsonResult<PolicyList> {
    let active = state.policies.active().0;
    Ok(Json(PolicyList { object: "list", active, data: state.policies.list()? }))
}

pub const ACTIVATE_FIELDS: FieldTable = &[&[Field::one_of(
    "relearn",
    &["true", "false"],
    "Whether to learn again from what the versions that are left were trained on.",
)]];

pub async fn activate(
    State(state): AppContext,
    PathText(version): PathText,
    QueryObject(query): QueryObject,
) -> JsonResult<PolicyRecord> {
    let version = parse(&version)?;
    let relearns = Fields::of(&query, ACTIVATE_FIELDS)?.text("relearn")? == Some("true");
    tracing::info!(%version, relearns, "an operator activates a version");
    let reason = if relearns { RELEARN } else { "activated by an operator" };
    run_detached(async move { state.policies.activate(version, reason).await }).await
}

/// Keeps a version's files, or lets them be deleted again.
pub async fn pin(
    State(state): AppContext,
    PathText(version): PathText,
    pinned: bool,
) -> JsonResult<PolicyRecord> {
    let version = parse(&version)?;
    run_detached(async move { state.policies.pin(version, pinned).await }).await
}

fn parse(version: &str) -> Result<PolicyVersion, ApiError> {
    version.parse().map(PolicyVersion).map_err(|_| {
        let message = format!("version is {version:?}: it must be the number of a policy version");
        ApiError::field("version", message)
    })
}

/// Runs `work` to completion, even if the client disconnects and its request is dropped.
async fn run_detached<T: Send + 'static, E: Into<ApiError> + Send + 'static>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> JsonResult<T> {
    match tokio::spawn(work).await {
        Ok(result) => result.map(Json).map_err(Into::into),
        Err(error) => Err(ApiError::logged("an operator's request panicked", &error)),
    }
}

// `/admin/feedback/quarantine`: API keys, and end users of them, whose feedback is recorded but not trained on.
//
// Releasing a key makes its feedback count again: feedback that waits for the trainer, and feedback
// that was dropped during the quarantine, unless it is older than `train.feedback_max_staleness`
// allows or its sample was already trained on without this key.

/// Longest note, in characters.
const NOTE_CHARS: usize = 1024;
pub const FIELDS: FieldTable =
    &[&[Field::short_text("reason", NOTE_CHARS, "Why the key is quarantined.").required()]];

/// One quarantined key.
#[derive(Serialize, JsonSchema)]
pub struct QuarantineEntry {
    key_id: String,
    /// `{"rule": "by_hand", "note": ...}`; null if the stored reason cannot be parsed.
    reason: Option<QuarantineReason>,
    since: UnixMillis,
}

/// Response of `DELETE /admin/feedback/quarantine/{key}`.
#[derive(Serialize, JsonSchema)]
pub struct ReleasedKey {
    key_id: String,
    released: bool,
}

pub async fn list(State(state): AppContext) -> JsonResult<List<QuarantineEntry>> {
    Ok(Json(List::new(state.store.quarantined()?.into_iter().map(entry))))
}

pub async fn flag(
    State(state): AppContext,
    PathText(key): PathText,
    JsonObject(body): JsonObject,
) -> JsonResult<QuarantineEntry> {
    let fields = Fields::of(&body, FIELDS)?;
    let note = fields.required("reason", "the reason for the quarantine")?;
    if !is_id(&key) {
        let message = format!(
            "key is {key:?}: it must be a key's id, 12 hexadecimal digits, which a dot and 12 further \
             ones of an end user may follow"
        );
        return Err(ApiError::field("key", message));
    }
    let reason = QuarantineReason::Operator { note: note.to_owned() };
    let reason = serde_json::to_string(&reason).map_err(|_| ApiError::internal())?;
    let row = QuarantinedKey { key_id: key.clone(), reason, since: now_ms() };
    state.store.commit_in_time(vec![Op::Quarantine(row)]).await?;
    tracing::warn!(key, note, "an operator quarantined a key");
    let row = update_metric(&state)?.into_iter().find(|row| row.key_id == key);
    row.map(entry).map(Json).ok_or_else(ApiError::internal)
}

pub async fn release(State(state): AppContext, PathText(key): PathText) -> JsonResult<ReleasedKey> {
    if !state.store.quarantined()?.iter().any(|row| row.key_id == key) {
        let message = format!("key is {key:?}: it is not in quarantine");
        return Err(ApiError::new(ErrorCode::NotFound, message));
    }
    state.store.commit_in_time(vec![Op::Release(key.clone())]).await?;
    tracing::warn!(key, "an operator released a key");
    update_metric(&state)?;
    Ok(Json(ReleasedKey { key_id: key, released: true }))
}

/// `GET /admin/keys`.
pub async fn keys(State(state): AppContext) -> Json<List<ListedKey>> {
    Json(List::new(state.keys.list(now_ms()).into_iter()))
}

/// Whether a text is the id of an API key, or of an end user with or without a key.
fn is_id(text: &str) -> bool {
    let hex = |part: &str| {
        part.len() == 12 && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    match text.split_once('.') {
        None => hex(text),
        Some((key, user)) => (key.is_empty() || hex(key)) && hex(user),
    }
}

/// Sets the metric to the number of quarantined keys and returns these keys.
fn update_metric(state: &AppState) -> Result<Vec<QuarantinedKey>, ApiError> {
    let rows = state.store.quarantined()?;
    state.metrics.reward_quarantined_keys.set(i64::try_from(rows.len()).unwrap_or(i64::MAX));
    Ok(rows)
}

fn entry(row: QuarantinedKey) -> QuarantineEntry {
    let reason = serde_json::from_str(&row.reason).ok();
    QuarantineEntry { key_id: row.key_id, reason, since: row.since }
}
