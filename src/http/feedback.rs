//! `POST /v1/feedback`: what a client thinks of a completion.
//!
//! Answered after the commit, so that what was acknowledged survives anything.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use serde::Serialize;
use serde_json::{Map, Value};

use super::AppState;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::JsonObject;
use super::fields::Fields;
use crate::reward::Route;
use crate::store::{FeedbackEntry, FeedbackOutcome, Op};
use crate::types::{InteractionId, SampleId, now_ms};

/// Longest name of a reward part.
const NAME_CHARS: usize = 64;
/// Longest remark.
const COMMENT_CHARS: usize = 4096;
/// Longest idempotency key.
const KEY_CHARS: usize = 255;
/// Every field, in the order of the documentation.
const FIELDS: [&str; 6] =
    ["completion_id", "choice", "name", "value", "comment", "idempotency_key"];

/// What is answered.
#[derive(Serialize)]
pub(super) struct Feedback {
    object: &'static str,
    /// The judged sample and the part's name: posting the same again replaces the value.
    id: String,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    status: &'static str,
    completion_id: String,
    choice: u32,
    name: String,
    /// The version that wrote the completion.
    policy_version: Option<u64>,
    /// What the part weighs on the completion's route; null where the route has no such part, so
    /// that nothing is learned from it.
    weight: Option<f64>,
}

/// `POST /v1/feedback`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Json<Feedback>, ApiError> {
    let count = |outcome: &str| state.metrics.feedback.with_label_values(&[outcome]).inc();
    let entry = read(&body, caller)
        .and_then(|entry| not_a_graders(&state, entry))
        .inspect_err(|_| count("invalid"))?;
    let completion_id = entry.interaction.completion_id();
    let committed = state.store.commit(vec![Op::Feedback(Box::new(entry.clone()))]).await;
    let outcome = committed.inspect_err(|_| count("failed"))?.feedback.into_iter().next();
    let (status, sample) = match outcome {
        Some(FeedbackOutcome::Recorded(sample)) => ("recorded", sample),
        Some(FeedbackOutcome::Duplicate(sample)) => ("duplicate", sample),
        Some(FeedbackOutcome::UnknownCompletion) => {
            count("unknown");
            return Err(ApiError::no_such_completion(&completion_id));
        }
        Some(FeedbackOutcome::UnknownChoice) => {
            count("unknown");
            let message = format!("choice is {}: the completion has no such choice", entry.choice);
            return Err(ApiError::field("choice", message));
        }
        None => {
            count("failed");
            tracing::error!(completion_id, "the ledger gave feedback no outcome");
            return Err(ApiError::internal());
        }
    };
    count(status);
    tracing::debug!(completion_id, name = entry.name, value = entry.value, status, "feedback");
    Ok(Json(answer(&state, status, &entry, sample)))
}

/// The rest is a courtesy: what was committed is acknowledged even if it cannot be read back.
fn answer(
    state: &AppState,
    status: &'static str,
    entry: &FeedbackEntry,
    sample: SampleId,
) -> Feedback {
    let version = state.store.sample(sample).ok().flatten().map(|s| s.version.0);
    let route = state.store.interaction(entry.interaction).ok().flatten().map(|i| i.route);
    let route = route.and_then(|name| state.routes.get(&name).cloned());
    Feedback {
        object: "feedback",
        id: format!("{sample}:{}", entry.name),
        status,
        completion_id: entry.interaction.completion_id(),
        choice: entry.choice,
        name: entry.name.clone(),
        policy_version: version,
        weight: route.and_then(|route| route.weight(&entry.name)),
    }
}

fn read(body: &Map<String, Value>, caller: Caller) -> Result<FeedbackEntry, ApiError> {
    let fields = Fields::new(body);
    if let Some(name) = fields.names().find(|name| !FIELDS.contains(name)) {
        let message = format!("{name} is not a field: the fields are {}", FIELDS.join(", "));
        return Err(ApiError::unsupported(name, message));
    }
    let form = "a completion's id, such as \"chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7\"";
    let id = fields.text("completion_id")?.ok_or_else(|| fields.missing("completion_id", form))?;
    let interaction =
        InteractionId::from_completion_id(id).ok_or_else(|| fields.wrong("completion_id", form))?;
    let part = "the name of a reward part";
    let name = fields.short_text("name", NAME_CHARS)?;
    let name = name.ok_or_else(|| fields.missing("name", part))?;
    if name.is_empty() {
        return Err(fields.wrong("name", part));
    }
    let choice = fields.integer("choice", 0..=i64::from(u32::MAX))?.unwrap_or(0);
    let owned = |text: Option<&str>| text.map(str::to_owned);
    Ok(FeedbackEntry {
        interaction,
        choice: u32::try_from(choice).unwrap_or(u32::MAX),
        name: name.to_owned(),
        value: value(&fields)?,
        comment: owned(fields.short_text("comment", COMMENT_CHARS)?),
        idempotency_key: owned(fields.short_text("idempotency_key", KEY_CHARS)?),
        key_id: caller.key_id,
        created: now_ms(),
    })
}

/// Refuses a part that graders give: the client's value would stand in the place of theirs.
fn not_a_graders(state: &AppState, entry: FeedbackEntry) -> Result<FeedbackEntry, ApiError> {
    let name = &entry.name;
    let graded = |route: &Route| route.weight(name).is_some() && !route.takes_feedback(name);
    let graders = state.routes.iter().find(|route| graded(route));
    match graders {
        Some(route) if !state.routes.iter().any(|route| route.takes_feedback(name)) => {
            let route = &route.name;
            let message =
                format!("name is {name:?}: a grader of the route {route:?} gives that part");
            Err(ApiError::field("name", message))
        }
        _ => Ok(entry),
    }
}

/// A finite number, or a boolean as 1 or 0.
fn value(fields: &Fields<'_>) -> Result<f64, ApiError> {
    const ALLOWED: &str = "a finite number or a boolean";
    match fields.get("value") {
        None => Err(fields.missing("value", ALLOWED)),
        Some(Value::Bool(yes)) => Ok(f64::from(u8::from(*yes))),
        Some(Value::Number(number)) => match number.as_f64() {
            Some(value) if value.is_finite() => Ok(value),
            _ => Err(fields.wrong("value", ALLOWED)),
        },
        Some(_) => Err(fields.wrong("value", ALLOWED)),
    }
}
