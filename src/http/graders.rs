//! `POST /v1/fine_tuning/alpha/graders/run` and `.../validate`, compatible with OpenAI's.
//!
//! `server.graders` limits what a grader may use: the models that it asks, its bytes, and how many run at once
//! and wait. Its computations do not delay the tasks of the thread that polls it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::block_in_place;

use hone_core::config::describe::one_of;
use hone_reward::grader;
use hone_reward::grader::{GradeOutcome, Grader, GraderError};

use super::body::{Field, FieldTable, Fields, JsonObject};
use super::error::ApiError;
use super::state::AppState;
use crate::config::GraderLimits;

/// The fields of a run.
pub(super) const RUN_FIELDS: FieldTable = &[&[
    GRADER,
    Field::json("item", object_of_any, "What `{{ item.* }}` refers to."),
    Field::text("model_sample", "The text of a completion.").required(),
    Field::json("reference_answer", || json!({}), "The older form: `item.reference_answer`."),
]];
/// The fields of a check.
pub(super) const VALIDATE_FIELDS: FieldTable = &[&[GRADER]];
const GRADER: Field = Field::json("grader", object_of_any, "An OpenAI grader.").required();

fn object_of_any() -> Value {
    json!({"type": "object"})
}

/// `Retry-After` of a run that is refused because too many wait.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The response to a check.
#[derive(Serialize, JsonSchema)]
pub(super) struct ValidGrader {
    /// The grader, unchanged.
    grader: Option<Value>,
}

/// The graders that run and wait.
pub(super) struct GraderQueue {
    limits: GraderLimits,
    /// A permit for each that runs or waits.
    places: Arc<Semaphore>,
    /// A permit for each that runs.
    running: Arc<Semaphore>,
}

impl GraderQueue {
    pub(super) fn new(limits: &GraderLimits) -> Arc<Self> {
        let GraderLimits { concurrency, queue, .. } = *limits;
        Arc::new(Self {
            limits: limits.clone(),
            places: Arc::new(Semaphore::new(concurrency.saturating_add(queue))),
            running: Arc::new(Semaphore::new(concurrency)),
        })
    }

    /// Waits until a grader may run, unless too many wait. It runs until the permits are dropped.
    async fn begin(&self) -> Result<[OwnedSemaphorePermit; 2], ApiError> {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let GraderLimits { concurrency, queue, .. } = self.limits;
            let message = format!("{concurrency} graders are running and {queue} are waiting");
            return Err(ApiError::limited("graders", message, RETRY_AFTER));
        };
        // The semaphore is never closed.
        let running = Arc::clone(&self.running).acquire_owned().await;
        Ok([place, running.map_err(|_| ApiError::internal())?])
    }

    fn read(&self, state: &AppState, fields: &Fields<'_>) -> Result<Grader, ApiError> {
        let json = fields.get("grader").ok_or_else(|| fields.missing("grader", "a grader"))?;
        let invalid = |error: GraderError| ApiError::field(error.path(), error.to_string());
        let grader = Grader::new("grader", json, state.graders.clone()).map_err(invalid)?;
        let allowed = &self.limits.models;
        let other = grader.models().into_iter().find(|name| !allowed.iter().any(|a| a == name));
        match other {
            Some(name) if !allowed.is_empty() => {
                let known: Vec<_> = allowed.iter().map(|name| format!("{name:?}")).collect();
                let message = format!(
                    "grader asks the model {name:?}: it must be {} (server.graders.models)",
                    one_of(&known)
                );
                Err(ApiError::field("grader", message))
            }
            _ => Ok(grader),
        }
    }
}

/// `POST /v1/fine_tuning/alpha/graders/run`
///
/// A sample that cannot be graded gets a null reward, with the reason in `metadata.errors`.
pub(super) async fn run(
    State(state): State<Arc<AppState>>,
    Extension(queue): Extension<Arc<GraderQueue>>,
    JsonObject(body): JsonObject,
) -> Result<Json<GradeOutcome>, ApiError> {
    let _permits = queue.begin().await?;
    beside_others(grade(&state, &queue, &body)).await.map(Json)
}

async fn grade(
    state: &AppState,
    queue: &GraderQueue,
    body: &Map<String, Value>,
) -> Result<GradeOutcome, ApiError> {
    let fields = Fields::of(body, RUN_FIELDS)?;
    let grader = queue.read(state, &fields)?;
    let text = fields.text("model_sample")?;
    let text = text.ok_or_else(|| fields.missing("model_sample", "a completion's text"))?;
    let item = match (fields.object("item")?, fields.get("reference_answer")) {
        (Some(item), _) => Value::Object(item.clone()),
        (None, Some(answer)) => json!({"reference_answer": answer}),
        (None, None) => json!({}),
    };
    Ok(grader.run(&grader::sample(text, Vec::new()), &item).await)
}

/// `POST /v1/fine_tuning/alpha/graders/validate`: returns a valid grader unchanged.
pub(super) async fn validate(
    State(state): State<Arc<AppState>>,
    Extension(queue): Extension<Arc<GraderQueue>>,
    JsonObject(body): JsonObject,
) -> Result<Json<ValidGrader>, ApiError> {
    let _permits = queue.begin().await?;
    let fields = Fields::of(&body, VALIDATE_FIELDS)?;
    beside_others(async { queue.read(&state, &fields) }).await?;
    Ok(Json(ValidGrader { grader: fields.get("grader").cloned() }))
}

/// Polls a future that computes for long. Meanwhile another thread takes over the other tasks of this one.
async fn beside_others<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|context| match Handle::current().runtime_flavor() {
        RuntimeFlavor::CurrentThread => work.as_mut().poll(context),
        _ => block_in_place(|| work.as_mut().poll(context)),
    })
    .await
}
