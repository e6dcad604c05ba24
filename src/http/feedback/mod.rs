//! `/v1/feedback`: a client's judgment of a completion, of a pair of completions or of a whole
//! conversation, or the text that a completion should have been.
//!
//! `post` reads one such object or a list, `list` shows what a key has posted on a completion.
//!
//! A conversation is the set of requests of one API key with the same `metadata.session_id`. Feedback
//! on it is recorded for every assistant turn that was served in it, so that the sample of each turn,
//! with its exact tokens, is credited. Feedback on one turn contains its `completion_id`. Of several
//! choices, those with which a later request continued are credited.
//!
//! The response is sent after the commit, so that acknowledged feedback survives a crash.

mod conversation;
mod correction;
pub(super) mod pair;
mod post;
pub(super) mod posted;
mod prospect;
mod rating;
pub(super) mod recording;

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use hone_core::types::{
    Interaction, InteractionId, Reward, RewardSource, Sample, SampleId, SampleOrigin, UnixMillis,
    key_of_rater,
};
use hone_reward::Route;
use hone_store::{FeedbackEntry, FeedbackOutcome, Op, Store, StoreError};

use self::conversation::{SessionFeedback, Sessions};
use self::correction::CorrectionFeedback;
use self::pair::PairFeedback;
use self::posted::{PostedFeedback, Target};
use self::recording::{Refusal, after_commit, check_rater, commit, prospect, reused};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::{Field, FieldTable, Fields, List, QueryObject};
use crate::http::error::ApiError;
use posted::{completion_id, id_schema};
use recording::{find_interaction, unknown_completion};

pub(super) use post::{ListedResponse, batch_schema, create};

/// The response.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum FeedbackResponse {
    Completion(CompletionFeedback),
    Session(SessionFeedback),
    Pair(PairFeedback),
    Correction(CorrectionFeedback),
}

/// The response to feedback on one completion.
#[derive(Serialize, JsonSchema)]
pub(super) struct CompletionFeedback {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// The judged sample and the part's name: another post with the same id replaces the value.
    id: String,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    status: &'static str,
    completion_id: String,
    choice: u32,
    name: String,
    /// The version that generated the completion.
    policy_version: Option<u64>,
    /// Weight of the part in the completion's route; null if the route has no such part.
    weight: Option<f64>,
    /// Whether the value will be trained on, unless something later prevents it.
    trained: bool,
    /// Why it will not be: a label of `hone_feedback_ratings_total`, or `disabled`.
    reason: Option<String>,
}

/// Records one piece of feedback. `sessions` are those that the pieces of its request judge.
async fn record(
    state: &Arc<AppState>,
    body: &Map<String, Value>,
    caller: Caller,
    sessions: &Sessions,
) -> Result<FeedbackResponse, ApiError> {
    let recorded = if pair::is_pair(body) {
        let recorded = pair::record(state, body, &caller).await;
        recorded.map(|(status, answer)| (status, FeedbackResponse::Pair(answer)))
    } else {
        match PostedFeedback::read(body, caller) {
            Ok(posted) => match (posted.target, posted.correction, posted.name) {
                (Target::Completion(id, choice), Some(text), _) => {
                    let recorded = correction::record(state, &posted, text, id, choice).await;
                    recorded.map(|(status, answer)| (status, FeedbackResponse::Correction(answer)))
                }
                (Target::Completion(id, choice), None, Some(name)) => {
                    completion(state, &posted, name, id, choice).await
                }
                (Target::Session(session), _, Some(name)) => {
                    let recorded =
                        conversation::record(state, &posted, name, session, sessions).await;
                    recorded.map(|(status, answer)| (status, FeedbackResponse::Session(answer)))
                }
                (_, _, None) => Err(Refusal::Invalid(posted.missing_name())),
            },
            Err(error) => Err(Refusal::Invalid(error)),
        }
    };
    let (outcome, result) = match recorded {
        Ok((status, response)) => (status, Ok(response)),
        Err(Refusal::Invalid(error)) => ("invalid", Err(error)),
        Err(Refusal::Unknown(error)) => ("unknown", Err(error)),
        Err(Refusal::Failed(error)) => ("failed", Err(error)),
    };
    state.metrics.feedback.with_label_values(&[outcome]).inc();
    result
}

type Recorded = Result<(&'static str, FeedbackResponse), Refusal>;

async fn completion(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    name: &str,
    id: InteractionId,
    choice: u32,
) -> Recorded {
    let interaction = find_interaction(state, id).await.map_err(Refusal::Failed)?;
    let interaction = interaction.ok_or_else(|| posted.unknown())?;
    check_rater(&posted.caller, &interaction)?;
    let completion_id = interaction.completion_id();
    let route = state.routes.get(&interaction.route).cloned();
    let entry = posted.entry(state, route.as_deref(), name, &interaction, choice);
    let entry = entry.map_err(Refusal::Invalid)?;
    let (status, sample) = match commit(state, Op::Feedback(Box::new(entry.clone()))).await? {
        FeedbackOutcome::Recorded(sample) => ("recorded", sample),
        FeedbackOutcome::Duplicate(sample) => ("duplicate", sample),
        FeedbackOutcome::Reused => return Err(reused(posted.idempotency_key)),
        FeedbackOutcome::UnknownChoice => {
            let message = format!("choice is {choice}: the completion has no such choice");
            return Err(Refusal::Unknown(ApiError::field("choice", message)));
        }
        _ => return Err(posted.unknown()),
    };
    tracing::debug!(completion_id, name = entry.name, value = entry.value, status, "feedback");
    let response = after_commit(state, move |state| {
        if status == "recorded" {
            rating::rate(state, route.as_deref(), &entry, sample);
        }
        response(state, route.as_deref(), status, &interaction, &entry, sample)
    });
    Ok((status, FeedbackResponse::Completion(response.await?)))
}

/// Committed feedback is acknowledged even if its sample cannot be read back.
fn response(
    state: &AppState,
    route: Option<&Route>,
    status: &'static str,
    interaction: &Interaction,
    entry: &FeedbackEntry,
    id: SampleId,
) -> CompletionFeedback {
    let sample = state.store.sample(id).ok().flatten();
    let reason = sample.as_ref().and_then(|sample| {
        prospect(state, &entry.name, entry.key_id.as_deref(), interaction, sample)
    });
    CompletionFeedback {
        object: "feedback",
        id: format!("{id}:{}", entry.name),
        status,
        completion_id: interaction.completion_id(),
        choice: entry.choice,
        name: entry.name.clone(),
        policy_version: sample.map(|sample| sample.version.0),
        weight: route.and_then(|route| route.weight(&entry.name)),
        trained: reason.is_none(),
        reason,
    }
}

// `GET /v1/feedback`: what an API key has posted on a completion.

const NAME: &str = "completion_id";
/// The parameters.
pub(in crate::http) const LIST_FIELDS: FieldTable =
    &[&[Field::json(NAME, id_schema, "The id of a completion.").required()]];

/// A rating, a comment or a correction.
#[derive(Serialize, JsonSchema)]
pub struct FeedbackRecord {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// As in the response to its post; for a correction the id of its sample.
    id: String,
    completion_id: String,
    choice: u32,
    /// The rated part; null for a correction.
    name: Option<String>,
    /// Null for a comment alone and for a correction.
    value: Option<f64>,
    comment: Option<String>,
    /// The text of a correction; null otherwise.
    correction: Option<String>,
    /// Seconds since 1970.
    created: u64,
}

/// `GET /v1/feedback?completion_id=…`: the caller's newest value for each choice and part, and its
/// corrections, oldest first.
pub async fn list(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    QueryObject(query): QueryObject,
) -> Result<Json<List<FeedbackRecord>>, ApiError> {
    let fields = Fields::of(&query, LIST_FIELDS)?;
    let id = completion_id(&fields, NAME)?;
    let interaction = find_interaction(&state, id).await?;
    let interaction = interaction.ok_or_else(|| unknown_completion(&fields, NAME))?;
    let read = move |store: &Store| posted_by(store, &interaction, caller.key_id.as_deref());
    let found = state.read_ledger(read).await?;
    Ok(Json(List::new(found.into_iter().map(|(_, record)| record))))
}

/// What a key has posted on a completion, with the times, oldest first.
fn posted_by(
    store: &Store,
    interaction: &Interaction,
    key_id: Option<&str>,
) -> Result<Vec<(UnixMillis, FeedbackRecord)>, StoreError> {
    let mut found = Vec::new();
    for sample in store.samples_of(interaction.id)? {
        let rows = match sample.origin {
            SampleOrigin::Served => ratings(store, &sample, key_id)?,
            SampleOrigin::Correction => store.correction(sample.id)?.into_iter().collect(),
            SampleOrigin::Shadow => continue,
        };
        let own = |row: &Reward| row.key_id.as_deref().and_then(key_of_rater) == key_id;
        let own = rows.into_iter().filter(own);
        found.extend(own.map(|row| (row.created, shown(interaction, &sample, row))));
    }
    found.sort_by_key(|(created, _)| *created);
    Ok(found)
}

/// A key's ratings of a completion, and its comments without a value, each the newest for its part.
fn ratings(
    store: &Store,
    sample: &Sample,
    key_id: Option<&str>,
) -> Result<Vec<Reward>, StoreError> {
    let mut rows = store.ratings_by(sample.id, key_id)?;
    for row in store.rewards_of(sample.id)? {
        let is_comment = row.source == RewardSource::Feedback && row.comment.is_some();
        if is_comment && !rows.iter().any(|rating| rating.name == row.name) {
            rows.push(row);
        }
    }
    Ok(rows)
}

fn shown(interaction: &Interaction, sample: &Sample, row: Reward) -> FeedbackRecord {
    let is_correction = sample.origin == SampleOrigin::Correction;
    FeedbackRecord {
        object: "feedback",
        id: if is_correction {
            sample.id.to_string()
        } else {
            format!("{}:{}", sample.id, row.name)
        },
        completion_id: interaction.completion_id(),
        choice: sample.choice,
        name: (!is_correction).then_some(row.name),
        value: row.value,
        comment: row.comment,
        correction: is_correction.then(|| sample.text.clone()),
        created: row.created / 1000,
    }
}
