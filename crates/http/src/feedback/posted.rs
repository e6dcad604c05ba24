//! Validates posted feedback.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use hone_core::types::{Interaction, InteractionId, UnixMillis, now_ms, rater_id};
use hone_reward::Route;
use hone_reward::feedback::{aggregator, read_value};
use hone_store::FeedbackEntry;

use super::recording::{ID_FORM, completion_id, id_schema};
use crate::auth::Caller;
use crate::body::{Field, FieldTable, Fields};
use crate::error::ApiError;
use crate::state::AppState;

/// Longest name of a reward part.
pub const NAME_CHARS: usize = 64;
/// Longest comment.
pub const COMMENT_CHARS: usize = 4096;
/// Longest idempotency key.
pub const KEY_CHARS: usize = 255;
/// Longest session id, equal to the limit of a `metadata` value.
const SESSION_CHARS: usize = 512;
/// Longest name of an end user.
pub const USER_CHARS: usize = 256;
/// Largest index of a choice.
pub const MAX_CHOICE: i64 = u32::MAX as i64;
/// The fields.
pub const FIELDS: FieldTable = &[&[
    Field::json("completion_id", id_schema, "The id of a completion; excludes `session_id`."),
    Field::integer("choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::short_text("session_id", SESSION_CHARS, "The `metadata.session_id` of a conversation."),
    Field::short_text("end_user", USER_CHARS, "Who rates; default the `user` of the request."),
    Field::short_text("name", NAME_CHARS, "The name of a reward part."),
    Field::json("value", || json!({"type": ["number", "boolean"]}), "The rating."),
    Field::text("correction", "What the text should have been."),
    Field::short_text("comment", COMMENT_CHARS, "Text about the rating."),
    Field::short_text("idempotency_key", KEY_CHARS, "The same post with it changes nothing."),
]];
/// The form of a rating's name.
pub const NAME_FORM: &str = "the name of a reward part";
/// The form of a corrected text.
const CORRECTION_FORM: &str = "the text that the answer should have been, not blank";

/// The object of the feedback.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// One choice of a completion.
    Completion(InteractionId, u32),
    /// Every turn of a conversation.
    Session(&'a str),
}

/// A posted body. [`Self::entry`] validates its value, because the allowed ones depend on the route.
pub struct PostedFeedback<'a> {
    pub fields: Fields<'a>,
    pub target: Target<'a>,
    /// The rated part; `None` for a correction without a rating.
    pub name: Option<&'a str>,
    /// The corrected text.
    pub correction: Option<&'a str>,
    pub comment: Option<&'a str>,
    /// Who rates, among the users of the API key.
    end_user: Option<&'a str>,
    pub idempotency_key: Option<&'a str>,
    pub caller: Caller,
    pub arrived: UnixMillis,
}

impl<'a> PostedFeedback<'a> {
    /// Validates every field except the value.
    pub fn read(body: &'a Map<String, Value>, caller: Caller) -> Result<Self, ApiError> {
        let fields = Fields::of(body, FIELDS)?;
        let target = target(&fields)?;
        let correction = fields.read("correction", CORRECTION_FORM, |value| {
            value.as_str().filter(|text| !text.trim().is_empty())
        })?;
        if correction.is_some() && matches!(target, Target::Session(_)) {
            return Err(fields.invalid("correction", "absent beside session_id"));
        }
        let name = fields.text("name")?;
        if name.is_some_and(str::is_empty) {
            return Err(fields.invalid("name", NAME_FORM));
        }
        if name.is_none() && fields.get("value").is_some() {
            return Err(fields.missing("name", NAME_FORM));
        }
        Ok(Self {
            target,
            name,
            correction,
            comment: fields.text("comment")?,
            end_user: end_user(&fields)?,
            idempotency_key: fields.text("idempotency_key")?,
            caller,
            arrived: now_ms(),
            fields,
        })
    }

    /// Who rates a completion.
    pub fn rater(&self, interaction: &Interaction) -> Option<String> {
        rater(&self.caller, self.end_user, interaction)
    }

    /// The ledger entry of one completion's rating for a part, if the completion's route accepts it.
    pub fn entry(
        &self,
        state: &AppState,
        route: Option<&Route>,
        name: &str,
        interaction: &Interaction,
        choice: u32,
    ) -> Result<FeedbackEntry, ApiError> {
        refuse_graded_part(state, route, name)?;
        let params = route.and_then(|route| route.feedback(name));
        let rule = params.map(|params| params.aggregate).unwrap_or_default();
        let value = match params {
            Some(params) => read_value(name, params, self.fields.get("value"), self.comment)
                .map_err(|(field, message)| {
                    let refused = ApiError::field(field, message);
                    let is_outside = self.fields.get("value").is_some_and(Value::is_number);
                    if is_outside { refused.unprocessable() } else { refused }
                })?,
            None => Some(value(&self.fields)?),
        };
        Ok(FeedbackEntry {
            interaction: interaction.id,
            choice,
            name: name.to_owned(),
            value,
            comment: self.comment.map(str::to_owned),
            idempotency_key: self.idempotency_key.map(str::to_owned),
            key_id: self.rater(interaction),
            created: self.arrived,
            join: aggregator(rule),
        })
    }
}

/// The end user that a post names.
pub fn end_user<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    match fields.text("end_user")? {
        Some("") => Err(fields.invalid("end_user", "the name of an end user")),
        other => Ok(other),
    }
}

/// Who rates: the end user that the post names, or else the one of the request if the API key is the same.
pub fn rater(caller: &Caller, end_user: Option<&str>, interaction: &Interaction) -> Option<String> {
    let key = caller.key_id.as_deref();
    if end_user.is_none() && interaction.api_key() == key {
        return interaction.key_id.clone();
    }
    rater_id(key, end_user)
}

fn target<'a>(fields: &Fields<'a>) -> Result<Target<'a>, ApiError> {
    let choice = fields.whole("choice");
    match (fields.text("completion_id")?, fields.text("session_id")?) {
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

/// Refuses a part that a grader of the route scores, or of any route if no route accepts feedback for that name.
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
