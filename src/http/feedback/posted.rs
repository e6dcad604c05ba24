//! Validates posted feedback.

use std::sync::Arc;

use serde_json::{Map, Value};

use hone_core::types::{InteractionId, UnixMillis, now_ms};
use hone_reward::Route;
use hone_reward::feedback::{aggregator, read_value};
use hone_store::FeedbackEntry;

use crate::http::auth::Caller;
use crate::http::body::Fields;
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// Longest name of a reward part.
pub(super) const NAME_CHARS: usize = 64;
/// Longest comment.
pub(super) const COMMENT_CHARS: usize = 4096;
/// Longest idempotency key.
pub(super) const KEY_CHARS: usize = 255;
/// Longest session id, equal to the limit of a `metadata` value.
const SESSION_CHARS: usize = 512;
/// The accepted fields.
const FIELDS: [&str; 7] =
    ["completion_id", "choice", "session_id", "name", "value", "comment", "idempotency_key"];

/// The object of the feedback.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    /// One choice of a completion.
    Completion(InteractionId, u32),
    /// Every turn of a conversation.
    Session(&'a str),
}

/// A posted body. Its value is validated in [`Self::entry`], because the allowed values depend on the
/// completion's route.
pub(super) struct PostedFeedback<'a> {
    fields: Fields<'a>,
    pub(super) target: Target<'a>,
    pub(super) name: &'a str,
    comment: Option<&'a str>,
    idempotency_key: Option<&'a str>,
    pub(super) caller: Caller,
    arrived: UnixMillis,
}

impl<'a> PostedFeedback<'a> {
    /// Validates every field except the value.
    pub(super) fn read(body: &'a Map<String, Value>, caller: Caller) -> Result<Self, ApiError> {
        let fields = Fields::only(body, &FIELDS)?;
        let part = "the name of a reward part";
        let name = fields.short_text("name", NAME_CHARS)?;
        let name = name.ok_or_else(|| fields.missing("name", part))?;
        if name.is_empty() {
            return Err(fields.invalid("name", part));
        }
        Ok(Self {
            target: target(&fields)?,
            name,
            comment: fields.short_text("comment", COMMENT_CHARS)?,
            idempotency_key: fields.short_text("idempotency_key", KEY_CHARS)?,
            caller,
            arrived: now_ms(),
            fields,
        })
    }

    /// The ledger entry for one completion, if the completion's route accepts the feedback.
    pub(super) fn entry(
        &self,
        state: &AppState,
        route: Option<&Route>,
        interaction: InteractionId,
        choice: u32,
    ) -> Result<FeedbackEntry, ApiError> {
        refuse_graded_part(state, route, self.name)?;
        let params = route.and_then(|route| route.feedback(self.name));
        let rule = params.map(|params| params.aggregate).unwrap_or_default();
        let value = match params {
            Some(params) => read_value(self.name, params, self.fields.get("value"), self.comment)
                .map_err(|error| ApiError::field(error.field, error.to_string()))?,
            None => Some(value(&self.fields)?),
        };
        Ok(FeedbackEntry {
            interaction,
            choice,
            name: self.name.to_owned(),
            value,
            comment: self.comment.map(str::to_owned),
            idempotency_key: self.idempotency_key.map(str::to_owned),
            key_id: self.caller.key_id.clone(),
            created: self.arrived,
            join: aggregator(rule),
        })
    }
}

/// The form of a completion's id.
const ID_FORM: &str = "a completion's id, such as \"chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7\"";

/// The completion that a required field names.
pub(super) fn completion_id(fields: &Fields<'_>, name: &str) -> Result<InteractionId, ApiError> {
    let text = fields.text(name)?.ok_or_else(|| fields.missing(name, ID_FORM))?;
    InteractionId::from_completion_id(text).ok_or_else(|| fields.invalid(name, ID_FORM))
}

fn target<'a>(fields: &Fields<'a>) -> Result<Target<'a>, ApiError> {
    let choice = fields.integer("choice", 0..=i64::from(u32::MAX))?;
    match (fields.text("completion_id")?, fields.short_text("session_id", SESSION_CHARS)?) {
        (Some(_), Some(_)) => Err(fields.invalid("session_id", "absent beside completion_id")),
        (None, None) => {
            let allowed =
                format!("{ID_FORM}; or session_id must be given for a whole conversation");
            Err(fields.missing("completion_id", allowed))
        }
        (None, Some("")) => {
            Err(fields.invalid("session_id", "the metadata.session_id of requests"))
        }
        (None, Some(_)) if choice.is_some() => {
            Err(fields.invalid("choice", "absent beside session_id"))
        }
        (None, Some(session)) => Ok(Target::Session(session)),
        (Some(_), None) => {
            let id = completion_id(fields, "completion_id")?;
            let choice = u32::try_from(choice.unwrap_or(0)).unwrap_or(u32::MAX);
            Ok(Target::Completion(id, choice))
        }
    }
}

/// Refuses a part that a grader scores, because the client's value would replace the grader's: a part
/// of the completion's route, or of any route if no route accepts feedback for that name.
fn refuse_graded_part(state: &AppState, own: Option<&Route>, name: &str) -> Result<(), ApiError> {
    let graded = |route: &&Route| route.weight(name).is_some() && !route.takes_feedback(name);
    let all = || state.routes.iter().map(Arc::as_ref);
    let accepted = all().any(|route| route.takes_feedback(name));
    let elsewhere = || if accepted { None } else { all().find(graded) };
    match own.filter(graded).or_else(elsewhere) {
        Some(route) => {
            let route = &route.name;
            let message =
                format!("name is {name:?}: a grader of the route {route:?} scores that part");
            Err(ApiError::field("name", message))
        }
        None => Ok(()),
    }
}

/// A finite number, or a boolean as 1 or 0.
fn value(fields: &Fields<'_>) -> Result<f64, ApiError> {
    const ALLOWED: &str = "a finite number or a boolean";
    let convert = |value: &Value| match value {
        Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
        other => other.as_f64().filter(|number| number.is_finite()),
    };
    let value = fields.read("value", ALLOWED, convert)?;
    value.ok_or_else(|| fields.missing("value", ALLOWED))
}
