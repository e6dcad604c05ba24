//! `POST /v1/fine_tuning/alpha/graders/run` and `.../validate`, compatible with OpenAI's.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use hone_reward::grader;
use hone_reward::grader::{GradeOutcome, Grader, GraderError};

use super::body::{Fields, JsonObject};
use super::error::ApiError;
use super::state::AppState;

/// The fields of a run; `reference_answer` is the older form of `item`.
const RUN_FIELDS: [&str; 4] = ["grader", "item", "model_sample", "reference_answer"];

/// `POST /v1/fine_tuning/alpha/graders/run`
///
/// A sample that cannot be graded gets a null reward, with the reason in `metadata.errors`.
pub(super) async fn run(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<GradeOutcome>, ApiError> {
    let fields = Fields::only(&body, &RUN_FIELDS)?;
    let grader = read_grader(&state, &fields)?;
    let text = fields.text("model_sample")?;
    let text = text.ok_or_else(|| fields.missing("model_sample", "a completion's text"))?;
    let item = match (fields.object("item")?, fields.get("reference_answer")) {
        (Some(item), _) => Value::Object(item.clone()),
        (None, Some(answer)) => json!({"reference_answer": answer}),
        (None, None) => json!({}),
    };
    Ok(Json(grader.run(&grader::sample(text, Vec::new()), &item).await))
}

/// `POST /v1/fine_tuning/alpha/graders/validate`: returns a valid grader unchanged.
pub(super) async fn validate(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<Value>, ApiError> {
    let fields = Fields::only(&body, &["grader"])?;
    read_grader(&state, &fields)?;
    Ok(Json(json!({"grader": fields.get("grader")})))
}

fn read_grader(state: &AppState, fields: &Fields<'_>) -> Result<Grader, ApiError> {
    let json = fields.get("grader").ok_or_else(|| fields.missing("grader", "a grader"))?;
    let invalid = |error: GraderError| ApiError::field(error.path(), error.to_string());
    Grader::new("grader", json, state.graders.clone()).map_err(invalid)
}
