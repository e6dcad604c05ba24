//! `POST /v1/fine_tuning/alpha/graders/run` and `.../validate`, as OpenAI has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use hone_reward::grader;
use hone_reward::grader::{GradeOutcome, Grader, GraderError};

use super::AppState;
use super::error::ApiError;
use super::extract::JsonObject;
use super::fields::Fields;

/// Every field of a run; `reference_answer` is the older form of `item`.
const RUN_FIELDS: [&str; 4] = ["grader", "item", "model_sample", "reference_answer"];

/// `POST /v1/fine_tuning/alpha/graders/run`
///
/// What could not be graded is answered too, with a null reward and the reason in
/// `metadata.errors`.
pub(super) async fn run(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<GradeOutcome>, ApiError> {
    let fields = known(&body, &RUN_FIELDS)?;
    let grader = read(&state, &fields)?;
    let text = fields.text("model_sample")?;
    let text = text.ok_or_else(|| fields.missing("model_sample", "a completion's text"))?;
    let item = match (fields.object("item")?, fields.get("reference_answer")) {
        (Some(item), _) => Value::Object(item.clone()),
        (None, Some(answer)) => json!({"reference_answer": answer}),
        (None, None) => json!({}),
    };
    Ok(Json(grader.run(&grader::sample(text, Vec::new()), &item).await))
}

/// `POST /v1/fine_tuning/alpha/graders/validate`: the grader as it came, if nothing is wrong.
pub(super) async fn validate(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<Value>, ApiError> {
    let fields = known(&body, &["grader"])?;
    read(&state, &fields)?;
    Ok(Json(json!({"grader": fields.get("grader")})))
}

fn known<'a>(body: &'a Map<String, Value>, names: &[&str]) -> Result<Fields<'a>, ApiError> {
    let fields = Fields::new(body);
    let strange = fields.names().find(|name| !names.contains(name));
    if let Some(name) = strange {
        let message = format!("{name} is not a field: the fields are {}", names.join(", "));
        return Err(ApiError::unsupported(name, message));
    }
    Ok(fields)
}

fn read(state: &AppState, fields: &Fields<'_>) -> Result<Grader, ApiError> {
    let json = fields.get("grader").ok_or_else(|| fields.missing("grader", "a grader"))?;
    let refused = |error: GraderError| ApiError::field(error.path(), error.to_string());
    Grader::new("grader", json, state.graders.clone()).map_err(refused)
}
