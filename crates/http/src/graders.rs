//! `POST /v1/fine_tuning/alpha/graders/run` and `.../validate`, compatible with OpenAI's.
//!
//! `server.graders` decides which models a grader may ask and whether it may run Python; constants limit answers, its
//! bytes, and how many run at once and wait, of which each key has a share. Its computations do not delay the tasks of the
//! thread that polls it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Json};
use parking_lot::Mutex;
use schemars::JsonSchema;
use scopeguard::guard;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::task::block_in_place;

use hone_core::config::Problem;
use hone_core::config::describe::one_of;
use hone_reward::grader::{self, GradeOutcome, Grader};

use super::body::{Call, Field, FieldTable, Fields, JsonObject};
use super::error::{ApiError, JsonResult};
use super::state::AppState;
use crate::config::GraderLimits;

pub const RUN_FIELDS: FieldTable = &[&[
    GRADER,
    Field::json("item", || json!({"type": "object"}), "What `{{ item.* }}` refers to."),
    Field::text("model_sample", "The text of a completion.").required(),
    Field::json("reference_answer", || json!({}), "The older form: `item.reference_answer`."),
]];
pub const VALIDATE_FIELDS: FieldTable = &[&[GRADER]];
const GRADER: Field =
    Field::json("grader", || json!({"type": "object"}), "An OpenAI grader.").required();

/// `Retry-After` of a run that is refused because too many wait.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The response to a check.
#[derive(Serialize, JsonSchema)]
pub struct ValidGrader {
    /// The grader, unchanged.
    grader: Option<Value>,
}

/// The graders that run and wait.
pub struct GraderQueue {
    limits: GraderLimits,
    /// A permit for each that runs or waits.
    places: Arc<Semaphore>,
    /// A permit for each that runs.
    running: Arc<Semaphore>,
    keys: Mutex<BTreeMap<String, KeyPlaces>>,
}

/// What one key has of a queue.
struct KeyPlaces {
    /// Graders that run or wait.
    places: usize,
    /// A permit for each that may run: one fewer than of all keys, so that no key waits for another one alone.
    running: Arc<Semaphore>,
}

impl GraderQueue {
    pub fn new(limits: &GraderLimits) -> Arc<Self> {
        let GraderLimits { concurrency, queue, .. } = *limits;
        Arc::new(Self {
            limits: limits.clone(),
            places: Arc::new(Semaphore::new(concurrency.saturating_add(queue))),
            running: Arc::new(Semaphore::new(concurrency)),
            keys: Mutex::default(),
        })
    }

    /// Waits until a grader of a key may run, unless too many wait. It runs until what is returned is dropped.
    async fn begin(self: &Arc<Self>, key: Option<&str>) -> Result<impl Sized + use<>, ApiError> {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let GraderLimits { concurrency, queue, .. } = self.limits;
            let message = format!("{concurrency} graders are running and {queue} are waiting");
            return Err(ApiError::limited("graders", message, RETRY_AFTER));
        };
        // Callers without a key cannot be distinguished, and may have all places.
        let own = key.map(|key| self.enter(key)).transpose()?;
        let (own_place, own_running) = own.unzip();
        // No semaphore is ever closed.
        let own_running = match own_running {
            Some(running) => Some(running.acquire_owned().await.map_err(|_| ApiError::internal())?),
            None => None,
        };
        let running = Arc::clone(&self.running).acquire_owned().await;
        Ok((running.map_err(|_| ApiError::internal())?, own_running, own_place, place))
    }

    /// Counts a place of a key, which may have as many as it leaves free, until what is returned is dropped.
    fn enter(
        self: &Arc<Self>,
        key: &str,
    ) -> Result<(impl Sized + use<>, Arc<Semaphore>), ApiError> {
        let mut keys = self.keys.lock();
        let own = keys.entry(key.to_owned()).or_insert_with(|| KeyPlaces {
            places: 0,
            running: Arc::new(Semaphore::new(self.limits.concurrency.saturating_sub(1).max(1))),
        });
        if own.places > self.places.available_permits() {
            let message = format!("{} graders of the key are running and waiting", own.places);
            return Err(ApiError::limited("graders", message, RETRY_AFTER));
        }
        own.places += 1;
        let running = Arc::clone(&own.running);
        let place = guard((Arc::clone(self), key.to_owned()), |(queue, key)| {
            let mut keys = queue.keys.lock();
            if let Some(own) = keys.get_mut(&key) {
                own.places -= 1;
                if own.places == 0 {
                    keys.remove(&key);
                }
            }
        });
        Ok((place, running))
    }

    fn read(&self, state: &AppState, fields: &Fields<'_>) -> Result<Grader, ApiError> {
        let json = fields.get("grader").ok_or_else(|| fields.missing("grader", "a grader"))?;
        let invalid = |error: Problem| ApiError::field(&error.key, error.sentence());
        let mut grader = Grader::new("grader", json, state.graders.clone()).map_err(invalid)?;
        let refuse = |message: String| Err(ApiError::field("grader", message));
        if grader.needs_code() && !self.limits.python {
            return refuse(
                "grader runs Python: server.graders.python does not permit it".to_owned(),
            );
        }
        let mut allowed: BTreeSet<&str> = self.limits.models.iter().map(String::as_str).collect();
        if allowed.is_empty() {
            allowed = state.routes.models();
        }
        let other = grader.models().into_iter().find(|name| !allowed.contains(name));
        if let Some(name) = other.filter(|_| !allowed.contains("*")) {
            let known: Vec<_> = allowed.iter().map(|name| format!("{name:?}")).collect();
            let known = if known.is_empty() { "listed".to_owned() } else { one_of(&known) };
            return refuse(format!(
                "grader asks the model {name:?}: it must be {known} (server.graders.models)"
            ));
        }
        let most = self.limits.max_tokens;
        match grader.limit_tokens(most) {
            Ok(()) => Ok(grader),
            Err(wanted) => {
                refuse(format!("grader asks for {wanted} tokens: at most {most} are allowed"))
            }
        }
    }
}

/// `POST /v1/fine_tuning/alpha/graders/run`: an ungraded sample gets a null reward and `metadata.errors`.
pub async fn run(
    Call(state, caller): Call,
    Extension(queue): Extension<Arc<GraderQueue>>,
    JsonObject(body): JsonObject,
) -> JsonResult<GradeOutcome> {
    let _place = queue.begin(caller.key_id.as_deref()).await?;
    beside_others(grade(&state, &queue, &body)).await.map(Json)
}

async fn grade(
    state: &AppState,
    queue: &GraderQueue,
    body: &Map<String, Value>,
) -> Result<GradeOutcome, ApiError> {
    let fields = Fields::of(body, RUN_FIELDS)?;
    let grader = queue.read(state, &fields)?;
    let text = fields.required("model_sample", "a completion's text")?;
    let item = match (fields.object("item")?, fields.get("reference_answer")) {
        (Some(item), _) => Value::Object(item.clone()),
        (None, Some(answer)) => json!({"reference_answer": answer}),
        (None, None) => json!({}),
    };
    Ok(grader.run(&grader::sample(text, Vec::new()), &item).await)
}

/// `POST /v1/fine_tuning/alpha/graders/validate`: returns a valid grader unchanged.
pub async fn validate(
    Call(state, caller): Call,
    Extension(queue): Extension<Arc<GraderQueue>>,
    JsonObject(body): JsonObject,
) -> JsonResult<ValidGrader> {
    let _place = queue.begin(caller.key_id.as_deref()).await?;
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
