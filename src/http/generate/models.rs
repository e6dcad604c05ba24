//! `GET /v1/models`: the served model as `default`, under its own name and under its aliases.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use crate::http::AppState;
use crate::http::body::{List, PathText};
use crate::http::error::ApiError;

/// The alias of the served model.
const DEFAULT_MODEL: &str = "default";

/// OpenAI's `model` object, with the active policy version.
#[derive(Serialize, JsonSchema)]
pub struct ModelObject {
    id: String,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    #[schemars(extend("const" = "hone"))]
    owned_by: &'static str,
    /// The active version.
    policy_version: u64,
}

fn names(state: &AppState) -> Vec<&str> {
    let mut names = vec![DEFAULT_MODEL];
    let own = std::iter::once(&state.engine.info().name);
    for name in own.chain(&state.config.model_aliases) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

fn model(state: &AppState, name: &str) -> ModelObject {
    ModelObject {
        id: name.to_owned(),
        object: "model",
        created: state.started / 1000,
        owned_by: "hone",
        policy_version: state.engine.active_version().0,
    }
}

/// 404 for a name that is not served.
pub fn check(state: &AppState, name: &str) -> Result<(), ApiError> {
    let names = names(state);
    if names.contains(&name) {
        return Ok(());
    }
    let quoted: Vec<String> = names.iter().map(|n| format!("{n:?}")).collect();
    Err(ApiError::no_such_model(name, &quoted.join(" or ")))
}

/// `GET /v1/models`
pub async fn list(State(state): State<Arc<AppState>>) -> Json<List<ModelObject>> {
    Json(List::new(names(&state).into_iter().map(|name| model(&state, name))))
}

/// `GET /v1/models/{model}`; the name may contain slashes.
pub async fn retrieve(
    State(state): State<Arc<AppState>>,
    PathText(name): PathText,
) -> Result<Json<ModelObject>, ApiError> {
    check(&state, &name)?;
    Ok(Json(model(&state, &name)))
}
