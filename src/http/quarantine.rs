//! `/admin/feedback/quarantine`: whose feedback is kept but not trained on.
//!
//! What a key gave and still gives stays on record. Released, it counts again: what waits for the
//! trainer, and what was dropped meanwhile, unless it has become too old (`train.max_staleness`) or
//! was trained on without this key.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;

use hone_core::types::{UnixMillis, now_ms};
use hone_reward::feedback::QuarantineReason;
use hone_store::{Op, QuarantinedKey};

use super::AppState;
use super::error::ApiError;
use super::extract::JsonObject;
use super::fields::Fields;

/// Longest note.
const NOTE_CHARS: usize = 1024;

/// One key in quarantine.
#[derive(Serialize)]
pub(super) struct QuarantineEntry {
    key_id: String,
    /// `{"rule": "by_hand", "note": ...}`; null where it cannot be read.
    reason: Option<QuarantineReason>,
    since: UnixMillis,
}

/// `GET /admin/feedback/quarantine`
#[derive(Serialize)]
pub(super) struct List {
    object: &'static str,
    data: Vec<QuarantineEntry>,
}

/// `DELETE /admin/feedback/quarantine/{key}`
#[derive(Serialize)]
pub(super) struct Released {
    key_id: String,
    released: bool,
}

/// `GET /admin/feedback/quarantine`
pub(super) async fn list(State(state): State<Arc<AppState>>) -> Result<Json<List>, ApiError> {
    let data = state.store.quarantined()?.into_iter().map(entry).collect();
    Ok(Json(List { object: "list", data }))
}

/// `POST /admin/feedback/quarantine/{key}`
pub(super) async fn flag(
    State(state): State<Arc<AppState>>,
    Path(key): Path<String>,
    JsonObject(body): JsonObject,
) -> Result<Json<QuarantineEntry>, ApiError> {
    let fields = Fields::new(&body);
    if let Some(name) = fields.names().find(|name| *name != "reason") {
        let message = format!("{name} is not a field: the field is reason");
        return Err(ApiError::unsupported(name, message));
    }
    let note = fields.short_text("reason", NOTE_CHARS)?;
    let note = note.ok_or_else(|| fields.missing("reason", "why its feedback is set aside"))?;
    if key.len() != 12 || !key.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        let message = format!("key is {key:?}: it must be a key's id, 12 hexadecimal digits");
        return Err(ApiError::field("key", message));
    }
    let reason = QuarantineReason::Operator { note: note.to_owned() };
    let reason = serde_json::to_string(&reason).map_err(|_| ApiError::internal())?;
    let row = QuarantinedKey { key_id: key.clone(), reason, since: now_ms() };
    state.store.commit(vec![Op::Quarantine(row)]).await?;
    tracing::warn!(key, note, "feedback set aside by hand");
    let rows = counted(&state)?;
    let kept = rows.into_iter().find(|row| row.key_id == key);
    kept.map(entry).map(Json).ok_or_else(ApiError::internal)
}

/// `DELETE /admin/feedback/quarantine/{key}`
pub(super) async fn release(
    State(state): State<Arc<AppState>>,
    Path(key): Path<String>,
) -> Result<Json<Released>, ApiError> {
    if !state.store.quarantined()?.iter().any(|row| row.key_id == key) {
        return Err(ApiError::not_found(format!("key is {key:?}: it is not in quarantine")));
    }
    state.store.commit(vec![Op::Release(key.clone())]).await?;
    tracing::warn!(key, "feedback released by hand");
    counted(&state)?;
    Ok(Json(Released { key_id: key, released: true }))
}

/// Everybody in quarantine, counted.
fn counted(state: &AppState) -> Result<Vec<QuarantinedKey>, ApiError> {
    let rows = state.store.quarantined()?;
    state.metrics.reward_quarantined_keys.set(i64::try_from(rows.len()).unwrap_or(i64::MAX));
    Ok(rows)
}

fn entry(row: QuarantinedKey) -> QuarantineEntry {
    let reason = serde_json::from_str(&row.reason).ok();
    QuarantineEntry { key_id: row.key_id, reason, since: row.since }
}
