//! Preferences: of two completions of one prompt, the client chose one and rejected the other.
//!
//! A preference is two ratings for one part, recorded together: its greatest value and its least. The
//! rollout service makes them one group, because their prompts are equal.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use hone_core::types::{Interaction, Sample, now_ms};
use hone_reward::Route;
use hone_reward::feedback::{FeedbackParams, FeedbackType, aggregator};
use hone_store::{FeedbackEntry, FeedbackOutcome, Op};

use super::posted::{
    COMMENT_CHARS, KEY_CHARS, MAX_CHOICE, NAME_CHARS, USER_CHARS, end_user, rater,
};
use super::recording::{
    after_commit, commit, completion_id, find_choice, id_schema, judged, prospect,
};
use crate::auth::Caller;
use crate::body::{Field, FieldTable, Fields};
use crate::error::ApiError;
use crate::state::AppState;

const CHOSEN: &str = "chosen";
const REJECTED: &str = "rejected";
/// The fields.
pub const FIELDS: FieldTable = &[&[
    Field::json(CHOSEN, id_schema, "The id of the better completion.").required(),
    Field::json(REJECTED, id_schema, "The id of the worse completion.").required(),
    Field::integer("chosen_choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::integer("rejected_choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::short_text("name", NAME_CHARS, "A feedback part of the route; default its only one."),
    Field::short_text("comment", COMMENT_CHARS, "Text about the preference."),
    Field::short_text("end_user", USER_CHARS, "Who prefers."),
    Field::short_text("idempotency_key", KEY_CHARS, "The same post with it changes nothing."),
]];

/// The response to a preference.
#[derive(Serialize, JsonSchema)]
pub struct PairFeedback {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    pub status: &'static str,
    chosen: String,
    rejected: String,
    chosen_choice: u32,
    rejected_choice: u32,
    name: String,
    /// Whether both will be trained on, compared with each other, unless something later prevents it.
    trained: bool,
    /// Why the chosen one, or else the rejected one, will not be.
    reason: Option<String>,
}

/// One of the two completions.
struct Preferred {
    interaction: Interaction,
    choice: u32,
    sample: Sample,
}

/// Whether a body is a preference.
pub fn is_pair(body: &Map<String, Value>) -> bool {
    [CHOSEN, REJECTED].iter().any(|name| body.get(*name).is_some_and(|value| !value.is_null()))
}

/// Records a preference.
pub async fn record(
    state: &Arc<AppState>,
    body: &Map<String, Value>,
    caller: &Caller,
) -> Result<PairFeedback, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let (named, comment) = (fields.text("name")?, fields.text("comment")?);
    let (key, user) = (fields.text("idempotency_key")?, end_user(&fields)?);
    let chosen = find(state, caller, &fields, CHOSEN, "chosen_choice").await?;
    let rejected = find(state, caller, &fields, REJECTED, "rejected_choice").await?;
    let route = comparable(state, &chosen, &rejected)?;
    let (name, params) = part(route, named)?;
    let [least, greatest] = params.range.unwrap_or([0.0, 1.0]);
    let created = now_ms();
    let by = rater(caller, user, &chosen.interaction);
    let entry = |preferred: &Preferred, value| FeedbackEntry {
        interaction: preferred.interaction.id,
        choice: preferred.choice,
        name: name.to_owned(),
        value: Some(value),
        comment: comment.map(str::to_owned),
        idempotency_key: key.map(str::to_owned),
        // One client rates both.
        key_id: by.clone(),
        created,
        join: aggregator(params.aggregate),
    };
    let pair = vec![entry(&chosen, greatest), entry(&rejected, least)];
    let status = match commit(state, Op::Feedback(pair), key).await? {
        FeedbackOutcome::Duplicate(_) => "duplicate",
        FeedbackOutcome::Recorded(_) => "recorded",
        _ => return Err(ApiError::internal()),
    };
    tracing::debug!(name, status, "a preference");
    let ids = [&chosen, &rejected].map(|one| one.interaction.completion_id());
    let ([chosen_id, rejected_id], name) = (ids, name.to_owned());
    let (chosen_choice, rejected_choice) = (chosen.choice, rejected.choice);
    let part = name.clone();
    let reason = after_commit(state, move |state| {
        [&chosen, &rejected]
            .into_iter()
            .find_map(|one| prospect(state, &part, by.as_deref(), &one.interaction, &one.sample))
    });
    let reason = reason.await?;
    Ok(PairFeedback {
        object: "feedback",
        status,
        chosen: chosen_id,
        rejected: rejected_id,
        chosen_choice,
        rejected_choice,
        name,
        trained: reason.is_none(),
        reason,
    })
}

/// The completion that a field names.
async fn find(
    state: &AppState,
    caller: &Caller,
    fields: &Fields<'_>,
    name: &str,
    choice_name: &str,
) -> Result<Preferred, ApiError> {
    let id = completion_id(fields, name)?;
    let choice = u32::try_from(fields.whole(choice_name).unwrap_or(0)).unwrap_or(u32::MAX);
    let interaction = judged(state, caller, fields, (name, id)).await?;
    let sample = find_choice(state, id, choice, choice_name).await?;
    Ok(Preferred { interaction, choice, sample })
}

/// The route of both completions, if they can be compared.
fn comparable<'s>(
    state: &'s AppState,
    chosen: &Preferred,
    rejected: &Preferred,
) -> Result<&'s Arc<Route>, ApiError> {
    let (a, b) = (&chosen.interaction, &rejected.interaction);
    let refuse = |reason: &str| {
        let (a, b) = (a.completion_id(), b.completion_id());
        ApiError::field(REJECTED, format!("chosen is {a} and rejected is {b}: {reason}"))
    };
    let differ = [
        (chosen.sample.id == rejected.sample.id, "they must be different completions or choices"),
        (a.prompt_ids != b.prompt_ids, "their prompts must be equal"),
        (a.grammar != b.grammar, "their response formats must be equal"),
        (
            a.end_rules() != b.end_rules(),
            "stop, stop_token_ids, min_tokens and ignore_eos must be equal",
        ),
        (
            a.route != b.route || a.api_key() != b.api_key(),
            "they must have the same route and API key",
        ),
    ];
    if let Some((_, reason)) = differ.iter().find(|(is_wrong, _)| *is_wrong) {
        return Err(refuse(reason));
    }
    let route = state.routes.get(&a.route);
    route.ok_or_else(|| refuse("no route of the configuration applies to them"))
}

/// The feedback part that a preference rates: the named one, or the route's only one.
fn part<'r>(
    route: &'r Route,
    named: Option<&str>,
) -> Result<(&'r str, &'r FeedbackParams), ApiError> {
    let rated = |name: &'r str| Some((name, route.feedback(name)?));
    let parts: Vec<_> = route
        .parts
        .iter()
        .filter_map(|part| rated(&part.name))
        .filter(|(_, params)| params.r#type != FeedbackType::Comment)
        .collect();
    let names = || parts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let (found, problem) = match named {
        Some(named) => {
            let found = parts.iter().find(|(name, _)| *name == named);
            (found, format!("name is {named:?}: it must be a feedback part with values"))
        }
        None if parts.len() == 1 => (parts.first(), String::new()),
        None => (None, "name is missing: it must be a feedback part with values".to_owned()),
    };
    found.copied().ok_or_else(|| {
        let known = if parts.is_empty() { "none".to_owned() } else { names() };
        let message = format!("{problem}; the route {:?} has {known}", route.name);
        ApiError::field("name", message)
    })
}
