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
use crate::reward::raters::{joining, read_value};
use crate::store::{FeedbackEntry, FeedbackOutcome, Op};
use crate::types::{Interaction, InteractionId, SampleId, now_ms};

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
    let posted = Posted::read(&body, caller).inspect_err(|_| count("invalid"))?;
    let completion_id = posted.interaction.completion_id();
    let Some(interaction) = recorded(&state, posted.interaction).await? else {
        count("unknown");
        return Err(ApiError::no_such_completion(&completion_id));
    };
    let route = state.routes.get(&interaction.route);
    let entry = posted.entry(&state, route).inspect_err(|_| count("invalid"))?;
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

/// The prompt of a completion. What was just served may still be on its way to the ledger, so a
/// prompt that is not there is looked for again behind everything that waits.
async fn recorded(state: &AppState, id: InteractionId) -> Result<Option<Interaction>, ApiError> {
    if let Some(found) = state.store.interaction(id)? {
        return Ok(Some(found));
    }
    state.store.settled().await?;
    Ok(state.store.interaction(id)?)
}

/// A body whose value is not read yet: what it may be depends on the completion's route.
struct Posted<'a> {
    fields: Fields<'a>,
    interaction: InteractionId,
    choice: u32,
    name: &'a str,
    comment: Option<&'a str>,
    idempotency_key: Option<&'a str>,
    caller: Caller,
}

impl<'a> Posted<'a> {
    fn read(body: &'a Map<String, Value>, caller: Caller) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        if let Some(name) = fields.names().find(|name| !FIELDS.contains(name)) {
            let message = format!("{name} is not a field: the fields are {}", FIELDS.join(", "));
            return Err(ApiError::unsupported(name, message));
        }
        let form = "a completion's id, such as \"chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7\"";
        let id =
            fields.text("completion_id")?.ok_or_else(|| fields.missing("completion_id", form))?;
        let interaction = InteractionId::from_completion_id(id)
            .ok_or_else(|| fields.wrong("completion_id", form))?;
        let part = "the name of a reward part";
        let name = fields.short_text("name", NAME_CHARS)?;
        let name = name.ok_or_else(|| fields.missing("name", part))?;
        if name.is_empty() {
            return Err(fields.wrong("name", part));
        }
        let choice = fields.integer("choice", 0..=i64::from(u32::MAX))?.unwrap_or(0);
        Ok(Self {
            interaction,
            choice: u32::try_from(choice).unwrap_or(u32::MAX),
            name,
            comment: fields.short_text("comment", COMMENT_CHARS)?,
            idempotency_key: fields.short_text("idempotency_key", KEY_CHARS)?,
            caller,
            fields,
        })
    }

    /// What is recorded, if the route takes it.
    fn entry(
        self,
        state: &AppState,
        route: Option<&Arc<Route>>,
    ) -> Result<FeedbackEntry, ApiError> {
        let route = route.map(Arc::as_ref);
        not_a_graders(state, route, self.name)?;
        let params = route.and_then(|route| route.feedback(self.name));
        let rule = params.map(|params| params.aggregate).unwrap_or_default();
        let value = match params {
            Some(params) => read_value(self.name, params, self.fields.get("value"), self.comment)
                .map_err(|error| ApiError::field(error.field, error.to_string()))?,
            None => Some(value(&self.fields)?),
        };
        Ok(FeedbackEntry {
            interaction: self.interaction,
            choice: self.choice,
            name: self.name.to_owned(),
            value,
            comment: self.comment.map(str::to_owned),
            idempotency_key: self.idempotency_key.map(str::to_owned),
            key_id: self.caller.key_id,
            created: now_ms(),
            join: joining(rule),
        })
    }
}

/// Refuses a part that graders give, on the completion's route or on all that have it: the
/// client's value would stand in the place of theirs.
fn not_a_graders(state: &AppState, own: Option<&Route>, name: &str) -> Result<(), ApiError> {
    let graded = |route: &&Route| route.weight(name).is_some() && !route.takes_feedback(name);
    let all = || state.routes.iter().map(Arc::as_ref);
    let taken = all().any(|route| route.takes_feedback(name));
    let elsewhere = || if taken { None } else { all().find(graded) };
    match own.filter(graded).or_else(elsewhere) {
        Some(route) => {
            let route = &route.name;
            let message =
                format!("name is {name:?}: a grader of the route {route:?} gives that part");
            Err(ApiError::field("name", message))
        }
        None => Ok(()),
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
