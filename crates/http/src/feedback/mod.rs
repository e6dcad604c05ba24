//! `/v1/feedback`: a client's judgment of a completion, of a pair of completions or of a whole
//! conversation, or the text that a completion should have been.
//!
//! `posted` reads one such object, of which a list may be posted, and has what all `kinds` share. `list` shows what a
//! key has posted on a completion.
//!
//! A conversation is the set of requests of one API key with the same `metadata.session_id`. Feedback
//! on it is recorded for every assistant turn that was served in it, so that the sample of each turn,
//! with its exact tokens, is credited. Feedback on one turn contains its `completion_id`. Of several
//! choices, those with which a later request continued are credited.
//!
//! The response is sent after the commit, so that acknowledged feedback survives a crash.

pub mod kinds;
pub mod posted;

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::stream::{self, StreamExt as _};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use hone_core::types::{
    Interaction, Reward, RewardSource, Sample, SampleOrigin, UnixMillis, key_of_rater,
};
use hone_store::{Store, StoreError};

use self::kinds::{Sessions, is_pair};
use self::posted::{
    NAME_FORM, PostedFeedback, Target, completion_id, find_interaction, id_schema,
    unknown_completion,
};
use super::auth::Caller;
use super::body::{
    Call, Field, FieldTable, Fields, JsonValue, List, QueryObject, invalid, object_schema,
};
use super::error::{ApiError, JsonResult};
use super::state::AppState;

pub use self::posted::FeedbackResponse;

/// Records one piece of feedback, and counts it. `sessions` are those that the pieces of its request judge.
async fn record(
    state: &Arc<AppState>,
    body: &Map<String, Value>,
    caller: Caller,
    sessions: &Sessions,
) -> Result<FeedbackResponse, ApiError> {
    let result = recorded(state, body, caller, sessions).await;
    let outcome = result.as_ref().map_or_else(ApiError::outcome, |response| response.status);
    state.metrics.feedback.with_label_values(&[outcome]).inc();
    result
}

async fn recorded(
    state: &Arc<AppState>,
    body: &Map<String, Value>,
    caller: Caller,
    sessions: &Sessions,
) -> Result<FeedbackResponse, ApiError> {
    if is_pair(body) {
        return kinds::preference(state, body, &caller).await;
    }
    let posted = PostedFeedback::read(body, caller)?;
    match (posted.target, posted.correction, posted.name) {
        (Target::Completion(id, choice), Some(text), _) => {
            kinds::correction(state, &posted, text, id, choice).await
        }
        (Target::Completion(id, choice), None, Some(name)) => {
            kinds::completion(state, &posted, name, id, choice).await
        }
        (Target::Session(session), _, Some(name)) => {
            kinds::conversation(state, &posted, name, session, sessions).await
        }
        (_, _, None) => {
            let form = format_args!("{NAME_FORM}, or correction must be given");
            Err(posted.fields.missing("name", form))
        }
    }
}

// Each piece of a list is recorded or refused as if it were posted alone. The ledger commits them together.

/// Largest number of pieces in a list.
const MAX_LIST: usize = 1000;
/// Pieces of a list that are recorded at once. They share commits, and hold what they read from the ledger.
const AT_ONCE: usize = 128;
const LIST: &str = "feedback";
const BATCH_FIELDS: FieldTable =
    &[&[Field::json(LIST, list_schema, "Pieces, each recorded by itself.").required()]];

/// What became of one piece of a list.
#[derive(Serialize, JsonSchema)]
pub struct ListedResponse {
    /// The status that the piece would have had alone.
    status_code: u16,
    #[serde(flatten)]
    outcome: ListedOutcome,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum ListedOutcome {
    Recorded(FeedbackResponse),
    Refused(ApiError),
}

pub async fn create(
    Call(state, caller): Call,
    JsonValue(body): JsonValue,
) -> Result<Response, ApiError> {
    let list = match &body {
        Value::Array(list) => list,
        Value::Object(map) if map.get(LIST).is_some_and(|value| !value.is_null()) => {
            let fields = Fields::of(map, BATCH_FIELDS)?;
            fields.list(LIST)?.ok_or_else(|| fields.missing(LIST, "a list"))?
        }
        Value::Object(map) => {
            let response = record(&state, map, caller, &Sessions::default()).await?;
            return Ok(Json(response).into_response());
        }
        _ => {
            return Err(ApiError::body("the body must be a JSON object or a list of such objects"));
        }
    };
    if list.is_empty() || list.len() > MAX_LIST {
        let message =
            format!("{LIST} has {} entries: it must have from 1 to {MAX_LIST}", list.len());
        return Err(ApiError::field(LIST, message));
    }
    // What was just served is visible after this, so that the pieces wait for their shared commit alone.
    state.store.flush().await?;
    let sessions = Sessions::default();
    let pieces = list.iter().enumerate();
    let all = pieces.map(|(at, piece)| one(&state, &caller, &sessions, at, piece));
    let all: Vec<_> = all.collect();
    let answers: Vec<_> = stream::iter(all).buffered(AT_ONCE).collect().await;
    Ok(Json(List::new(answers.into_iter())).into_response())
}

async fn one(
    state: &Arc<AppState>,
    caller: &Caller,
    sessions: &Sessions,
    at: usize,
    piece: &Value,
) -> ListedResponse {
    let result = match piece {
        Value::Object(map) => record(state, map, caller.clone(), sessions).await,
        other => Err(invalid(&format!("{LIST}[{at}]"), other, "an object")),
    };
    let (status_code, outcome) = match result {
        Ok(response) => (200, ListedOutcome::Recorded(response)),
        Err(error) => (error.status(), ListedOutcome::Refused(error)),
    };
    ListedResponse { status_code, outcome }
}

fn list_schema() -> Value {
    json!({"type": "array", "minItems": 1, "maxItems": MAX_LIST})
}

/// The JSON schema of several pieces.
pub fn batch_schema() -> Value {
    json!({"anyOf": [list_schema(), object_schema(BATCH_FIELDS)]})
}

// `GET /v1/feedback`: what an API key has posted on a completion.

const NAME: &str = "completion_id";
pub const LIST_FIELDS: FieldTable =
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

/// `GET /v1/feedback`: the caller's newest value for each choice and part, and its corrections, oldest first.
pub async fn list(
    Call(state, caller): Call,
    QueryObject(query): QueryObject,
) -> JsonResult<List<FeedbackRecord>> {
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
