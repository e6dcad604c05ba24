//! `POST /v1/feedback`: one piece of feedback, or a list.
//!
//! The pieces of a list are independent: each is recorded or refused by itself, as if it were posted
//! alone. The ledger commits them together.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::stream::{self, StreamExt as _};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::conversation::Sessions;
use super::{FeedbackResponse, record};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::{Field, FieldTable, Fields, JsonValue, List, invalid, object_schema};
use crate::http::error::ApiError;

/// Largest number of pieces in a list.
const MAX_LIST: usize = 1000;
/// Pieces of a list that are recorded at once. They share commits, and hold what they read from the ledger.
const AT_ONCE: usize = 128;
/// The field of a list in an object.
const LIST: &str = "feedback";
/// The fields of an object with a list.
const LIST_FIELDS: FieldTable =
    &[&[Field::json(LIST, list_schema, "Pieces, each recorded by itself.").required()]];

/// What became of one piece of a list.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct ListedResponse {
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

/// `POST /v1/feedback`
pub async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonValue(body): JsonValue,
) -> Result<Response, ApiError> {
    let list = match &body {
        Value::Array(list) => list,
        Value::Object(map) if map.get(LIST).is_some_and(|value| !value.is_null()) => {
            let fields = Fields::of(map, LIST_FIELDS)?;
            fields.list(LIST)?.ok_or_else(|| fields.missing(LIST, "a list"))?
        }
        Value::Object(map) => {
            return Ok(
                Json(record(&state, map, caller, &Sessions::default()).await?).into_response()
            );
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
    // Completions that were just served are visible after this, so that the pieces wait for nothing but
    // their own commit, which they share.
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
    match result {
        Ok(response) => {
            ListedResponse { status_code: 200, outcome: ListedOutcome::Recorded(response) }
        }
        Err(error) => {
            ListedResponse { status_code: error.status(), outcome: ListedOutcome::Refused(error) }
        }
    }
}

fn list_schema() -> Value {
    json!({"type": "array", "minItems": 1, "maxItems": MAX_LIST})
}

/// The JSON schema of several pieces.
pub(in crate::http) fn batch_schema() -> Value {
    json!({"anyOf": [list_schema(), object_schema(LIST_FIELDS)]})
}
