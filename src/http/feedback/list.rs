//! `GET /v1/feedback`: what an API key has posted on a completion.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{
    Interaction, Reward, RewardSource, Sample, SampleOrigin, UnixMillis, key_of_rater,
};
use hone_store::{Store, StoreError};

use super::posted::{completion_id, id_schema};
use super::recording::{find_interaction, unknown_completion};
use crate::http::auth::Caller;
use crate::http::body::{Field, FieldTable, Fields, List, QueryObject};
use crate::http::error::ApiError;
use crate::http::state::AppState;

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
