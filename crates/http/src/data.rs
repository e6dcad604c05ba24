//! What operators do with the recorded data: `/admin/data`, `/admin/erase`, `/admin/backup` and `/admin/audit`; and the
//! record of every action below `/admin`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use hone_core::files::{free_bytes, tree_bytes};
use hone_core::types::{InteractionId, UnixMillis};
use hone_store::{
    AuditRecord, BACKUPS, Backup, Erasure, ErasureFilter, Op, Retention, RetentionKind,
    StartedBackup, StoreError, StoreStats, parse_moment,
};
use hone_train::TrainError;

use crate::auth::Caller;
use crate::body::{Field, FieldTable, Fields, JsonObject, QueryObject};
use crate::console::ledger::{limit, limit_schema};
use crate::error::{ApiError, ErrorCode, JsonResult};
use crate::state::{AppState, DiskLimit};

type AppContext = State<Arc<AppState>>;

/// Longest text that selects what is erased, in characters.
const TEXT_CHARS: usize = 512;

/// Longest wait for the record of an action, which must not keep an operator from acting while the disk hangs.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(5);

// `GET /admin/data`.

/// What the data directory holds.
#[derive(Serialize, JsonSchema)]
pub struct DataStatus {
    /// Bytes of the ledger's file.
    ledger_bytes: u64,
    /// Bytes of the adapters of policy versions.
    adapters_bytes: u64,
    /// Bytes of the trainer's checkpoints.
    checkpoints_bytes: u64,
    /// Bytes of the backups. They share files with the two above on the same file system.
    backups_bytes: u64,
    /// Free bytes of the file system; null if it does not say.
    free_bytes: Option<u64>,
    /// Rows by table.
    rows: StoreStats,
    /// When the oldest prompt arrived; null without one.
    oldest: Option<UnixMillis>,
    /// The limits of `store.retention` by name, 0 for one that is not set; empty if everything is kept.
    retention: BTreeMap<&'static str, u64>,
    /// Prompts that retention removed since the start, by the limit.
    retention_removed: BTreeMap<&'static str, u64>,
}

pub async fn status(State(state): AppContext) -> JsonResult<DataStatus> {
    let DiskLimit { dir, retention, .. } = state.disk.clone();
    let removed = |limit| (limit, state.metrics.store_expired.with_label_values(&[limit]).get());
    let retention_removed = ["age", "size"].map(removed).into();
    let Retention { days, dataset_days, mebibytes, .. } = retention;
    let retention = match retention.kind {
        RetentionKind::All => BTreeMap::new(),
        RetentionKind::Limits => {
            [("days", days), ("dataset_days", dataset_days), ("mebibytes", mebibytes)].into()
        }
    };
    let status = state.read_ledger(move |store| {
        let bytes = |name: &str| tree_bytes(&dir.join(name));
        Ok(DataStatus {
            ledger_bytes: store.file_bytes()?,
            adapters_bytes: bytes("adapters")?,
            checkpoints_bytes: bytes("checkpoints")?,
            backups_bytes: bytes(BACKUPS)?,
            free_bytes: free_bytes(&dir).ok(),
            rows: store.stats()?,
            oldest: store.oldest()?,
            retention,
            retention_removed,
        })
    });
    status.await.map(Json)
}

// `POST /admin/erase`.

pub const ERASE_FIELDS: FieldTable = &[&[
    Field::short_text("completion_id", TEXT_CHARS, "Erases one completion, of any endpoint."),
    Field::short_text(
        "session_id",
        TEXT_CHARS,
        "Erases the conversations with this metadata.session_id, of every key.",
    ),
    Field::short_text(
        "end_user",
        TEXT_CHARS,
        "Erases the completions and the feedback of an end user, by the name that requests have in the field user.",
    ),
    Field::short_text(
        "key_id",
        TEXT_CHARS,
        "Erases the completions and the feedback of an API key and its end users, or of one end user, by id.",
    ),
    Field::short_text(
        "before",
        TEXT_CHARS,
        "Erases the completions of before a date or a time, such as 2026-01-31 or 2026-01-31T12:00:00Z.",
    ),
    Field::flag("dry_run", "Whether only to report what would be erased."),
]];

/// Response of `POST /admin/erase`. The numbers are of this process's ledger; in a fleet, all others erase too.
#[derive(Serialize, JsonSchema)]
pub struct ErasureReport {
    #[schemars(extend("const" = "erasure"))]
    object: &'static str,
    /// Whether nothing was erased.
    dry_run: bool,
    #[serde(flatten)]
    erased: Erasure,
    /// Names of the backups in data.dir, which keep what they hold.
    backups: Vec<String>,
}

pub async fn erase(
    State(state): AppContext,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let fields = Fields::of(&body, ERASE_FIELDS)?;
    let dry_run = fields.is_set("dry_run")?;
    let (by, selection) = selection(&fields)?;
    let folder = state.disk.dir.join(BACKUPS);
    if let Some(fleet) = state.fleet.as_ref().filter(|_| !dry_run) {
        (fleet.share_erasure)(&selection).await.map_err(|error| {
            let message = format!(
                "nothing was erased: the object store of the fleet, through which every process learns of it, failed: {error}"
            );
            ApiError::unavailable(message)
        })?;
    }
    // What is still queued is erased too.
    state.store.flush().await?;
    let work = state.read_ledger(move |store| {
        let erased = store.erase(&selection, u64::MAX, dry_run)?;
        if !dry_run && erased != Erasure::default() {
            store.rewrite()?;
        }
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let backups = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        Ok((erased, backups.collect()))
    });
    let (erased, backups) = work.await?;
    let detail = json!({
        "by": by,
        "dry_run": dry_run,
        "completions": erased.completions,
        "feedback": erased.feedback,
    });
    tracing::warn!(by, dry_run, completions = erased.completions, "an operator erases data");
    let report = Json(ErasureReport { object: "erasure", dry_run, erased, backups });
    Ok(with_detail(report.into_response(), detail))
}

/// The only field that selects, and the selection.
fn selection(fields: &Fields<'_>) -> Result<(&'static str, ErasureFilter), ApiError> {
    const NAMES: [&str; 5] = ["completion_id", "session_id", "end_user", "key_id", "before"];
    let mut given = NAMES.into_iter().filter(|name| fields.get(name).is_some());
    let (Some(name), None) = (given.next(), given.next()) else {
        let names = NAMES.join(", ");
        return Err(ApiError::body(format!("the body must have exactly one of {names}")));
    };
    let text = fields.required(name, "a text")?;
    if text.is_empty() {
        return Err(fields.invalid(name, "a text that is not empty"));
    }
    let owned = text.to_owned();
    let selection = match name {
        "completion_id" => {
            let unknown = || ApiError::no_such_completion(name, text);
            ErasureFilter::Completion(InteractionId::from_completion_id(text).ok_or_else(unknown)?)
        }
        "session_id" => ErasureFilter::Session(owned),
        "end_user" => ErasureFilter::EndUser(owned),
        "key_id" => ErasureFilter::Key(owned),
        _ => ErasureFilter::Before(parse_moment(text).ok_or_else(|| {
            fields.invalid(
                name,
                "a date such as \"2026-01-31\" or a time such as \"2026-01-31T12:00:00Z\"",
            )
        })?),
    };
    Ok((name, selection))
}

// `POST /admin/backup`.

pub const BACKUP_FIELDS: FieldTable = &[&[Field::short_text(
    "name",
    64,
    "Folder of the backup in backups/ of data.dir: letters, digits, \".\", \"-\" and \"_\". Default: the time.",
)]];

pub async fn backup(
    State(state): AppContext,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let fields = Fields::of(&body, BACKUP_FIELDS)?;
    let name = match fields.text("name")? {
        Some(name) => name.to_owned(),
        None => Utc::now().format("%Y%m%dT%H%M%SZ").to_string(),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
        let allowed = "a name of letters, digits, \".\", \"-\" and \"_\" that begins with no dot";
        return Err(fields.invalid("name", allowed));
    }
    let folder = state.disk.dir.join(BACKUPS);
    let to = folder.join(&name);
    if to.exists() {
        let message = format!("name is {name:?}: there is a backup of this name");
        return Err(ApiError::new(ErrorCode::Conflict, message).param("name"));
    }
    let backup = tokio::spawn(async move { write_backup(&state, folder, to).await }).await;
    let backup = backup.map_err(|error| ApiError::logged("a backup panicked", &error))??;
    let detail = json!({"name": name, "bytes": backup.bytes, "step": backup.step});
    Ok(with_detail(Json(backup).into_response(), detail))
}

/// Holds the trainer only as long as the moment of the backup is being fixed.
async fn write_backup(state: &AppState, folder: PathBuf, to: PathBuf) -> Result<Backup, ApiError> {
    state.store.flush().await?;
    let hold = match state.train.hold().await {
        Ok(hold) => Some(hold),
        Err(TrainError::Disabled) => None,
        Err(error) => return Err(error.into()),
    };
    let data = state.disk.dir.clone();
    let started = state
        .read_ledger(move |store| {
            std::fs::create_dir_all(&folder)
                .map_err(|error| StoreError::Failed(format!("{}: {error}", folder.display())))?;
            StartedBackup::begin(store, &data, &to)
        })
        .await?;
    drop(hold);
    state.read_ledger(move |_| started.finish()).await
}

// `GET /admin/audit`, and the records.

pub const AUDIT_FIELDS: FieldTable = &[&[
    Field::json("limit", limit_schema, "Most actions; default 50."),
    Field::short_text("after", 64, "The id of the last action of the page before."),
]];

/// Response of `GET /admin/audit`: the actions of operators, newest first.
#[derive(Serialize, JsonSchema)]
pub struct AuditList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<AuditRecord>,
    /// Whether there are older ones.
    has_more: bool,
}

pub async fn audit_list(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<AuditList> {
    let fields = Fields::of(&query, AUDIT_FIELDS)?;
    let limit = limit(&fields)?;
    let after = match fields.text("after")? {
        None => None,
        Some(text) => {
            let invalid = |_| fields.invalid("after", "the id of an action");
            Some(text.parse::<Uuid>().map_err(invalid)?)
        }
    };
    let mut data = state.read_ledger(move |store| store.audit(after, limit + 1)).await?;
    let has_more = data.len() > limit;
    data.truncate(limit);
    Ok(Json(AuditList { object: "list", data, has_more }))
}

/// What a handler adds to the record of its action.
#[derive(Clone)]
struct AuditDetail(Value);

fn with_detail(mut response: Response, detail: Value) -> Response {
    response.extensions_mut().insert(AuditDetail(detail));
    response
}

/// Records every request below `/admin` that may change something, once it is answered.
pub async fn record_actions(State(state): AppContext, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let route = route.filter(|route| route.starts_with("/admin/"));
    let Some(route) = route.filter(|_| request.method() != Method::GET) else {
        return next.run(request).await;
    };
    let caller = request.extensions().get::<Caller>();
    let key = caller.and_then(|caller| caller.key.as_ref());
    let actor = key.map_or_else(|| "local".to_owned(), |key| key.entry.name.clone());
    let (action, target) = action(&route, request.uri().path(), request.method());
    let response = next.run(request).await;
    let detail = response.extensions().get::<AuditDetail>().map(|detail| detail.0.clone());
    let outcome = match response.extensions().get::<ApiError>() {
        Some(error) => format!("error: {}", error.message),
        None if response.status() == StatusCode::OK => "ok".to_owned(),
        None => format!("error: {}", response.status()),
    };
    let detail = detail.unwrap_or(Value::Null);
    let record = AuditRecord::new(&actor, &action, &target, detail, &outcome);
    let written = state.store.commit_now(vec![Op::Audit(Box::new(record))]);
    match tokio::time::timeout(AUDIT_TIMEOUT, written).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::error!(%error, action, "an action is not in the audit record"),
        Err(_) => tracing::error!(action, "the audit record of an action is late"),
    }
    response
}

/// The words of a route, and what its parameter names in `path`: `policies.activate` and `40`.
fn action(route: &str, path: &str, method: &Method) -> (String, String) {
    let (mut words, mut target) = (Vec::new(), String::new());
    for (word, value) in route.split('/').zip(path.split('/')).skip(2) {
        if word.starts_with('{') {
            value.clone_into(&mut target);
        } else {
            words.push(word);
        }
    }
    if method == Method::DELETE {
        words.push("delete");
    }
    (words.join("."), target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_has_the_words_of_its_route_and_a_target() {
        let (post, delete) = (Method::POST, Method::DELETE);
        for (route, path, method, expected) in [
            ("/admin/train/pause", "/admin/train/pause", &post, ("train.pause", "")),
            (
                "/admin/policies/{version}/activate",
                "/admin/policies/40/activate",
                &post,
                ("policies.activate", "40"),
            ),
            (
                "/admin/feedback/quarantine/{key}",
                "/admin/feedback/quarantine/2bd806c97f0e",
                &delete,
                ("feedback.quarantine.delete", "2bd806c97f0e"),
            ),
        ] {
            let (words, target) = action(route, path, method);
            assert_eq!((&words[..], &target[..]), expected);
        }
    }
}
