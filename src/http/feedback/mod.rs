//! `POST /v1/feedback`: what a client thinks of a completion, or of a whole conversation.
//!
//! A conversation is what one API key asked with the same `metadata.session_id`. Feedback on it is
//! recorded for every assistant turn that was served in it, so that each turn's own sample, with the
//! exact tokens that were sampled, gets the credit; feedback on one turn names its `completion_id`.
//! A turn with several choices gets none, since nothing says which the conversation went on from.
//!
//! Answered after the commit, so that what was acknowledged survives anything.

mod posted;

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use posted::{Posted, Target};
use serde::Serialize;

use hone_core::types::{Interaction, InteractionId, SampleId};
use hone_reward::Route;
use hone_store::{FeedbackEntry, FeedbackOutcome, Op, StoreError};

use super::AppState;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::JsonObject;

/// Most turns of a conversation that can be judged at once.
const TURNS: usize = 1000;

/// What is answered.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Answer {
    Completion(Feedback),
    Session(SessionFeedback),
}

/// What is answered about one completion.
#[derive(Serialize)]
pub(super) struct Feedback {
    object: &'static str,
    /// The judged sample and the part's name: posting the same again replaces the value.
    id: String,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    status: &'static str,
    completion_id: String,
    choice: u32,
    name: String,
    /// The version that wrote the completion.
    policy_version: Option<u64>,
    /// What the part weighs on the completion's route; null where the route has no such part, so
    /// that nothing is learned from it.
    weight: Option<f64>,
}

/// What is answered about a conversation.
#[derive(Serialize)]
pub(super) struct SessionFeedback {
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    status: &'static str,
    session_id: String,
    name: String,
    /// How many turns were credited.
    turns: usize,
}

/// `POST /v1/feedback`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Json<Answer>, ApiError> {
    let done = match Posted::read(&body, caller) {
        Ok(posted) => match posted.target {
            Target::Completion(id, choice) => completion(&state, &posted, id, choice).await,
            Target::Session(session) => conversation(&state, &posted, session).await,
        },
        Err(error) => Err(Refusal::Invalid(error)),
    };
    let (outcome, result) = match done {
        Ok((status, answer)) => (status, Ok(Json(answer))),
        Err(Refusal::Invalid(error)) => ("invalid", Err(error)),
        Err(Refusal::Unknown(error)) => ("unknown", Err(error)),
        Err(Refusal::Failed(error)) => ("failed", Err(error)),
    };
    state.metrics.feedback.with_label_values(&[outcome]).inc();
    result
}

/// Why nothing was recorded, as it is counted.
enum Refusal {
    Invalid(ApiError),
    Unknown(ApiError),
    Failed(ApiError),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Failed(error.into())
    }
}

type Done = Result<(&'static str, Answer), Refusal>;

async fn completion(state: &AppState, posted: &Posted<'_>, id: InteractionId, choice: u32) -> Done {
    let completion_id = id.completion_id();
    let unknown = || Refusal::Unknown(ApiError::no_such_completion(&completion_id));
    let interaction = recorded(state, id).await?.ok_or_else(unknown)?;
    let route = state.routes.get(&interaction.route).map(Arc::as_ref);
    let entry = posted.entry(state, route, id, choice).map_err(Refusal::Invalid)?;
    let (status, sample) = match commit(state, Op::Feedback(Box::new(entry.clone()))).await? {
        FeedbackOutcome::Recorded(sample) => ("recorded", sample),
        FeedbackOutcome::Duplicate(sample) => ("duplicate", sample),
        FeedbackOutcome::UnknownChoice => {
            let message = format!("choice is {choice}: the completion has no such choice");
            return Err(Refusal::Unknown(ApiError::field("choice", message)));
        }
        _ => return Err(unknown()),
    };
    tracing::debug!(completion_id, name = entry.name, value = entry.value, status, "feedback");
    Ok((status, Answer::Completion(answer(state, route, status, &entry, sample))))
}

async fn conversation(state: &AppState, posted: &Posted<'_>, session: &str) -> Done {
    // The last turn may still be on its way to the ledger.
    state.store.flush().await?;
    let turns = state.store.turns_of(posted.caller.key_id.as_deref(), session, TURNS + 1)?;
    if turns.is_empty() {
        return Err(Refusal::Unknown(ApiError::no_such_session(session)));
    }
    let refused = |what: String| {
        let message = format!("session_id is {session:?}: {what}");
        Err(Refusal::Invalid(ApiError::field("session_id", message)))
    };
    if turns.len() > TURNS {
        return refused(format!("it has more than {TURNS} turns, so judge each by completion_id"));
    }
    let mut entries = Vec::with_capacity(turns.len());
    for id in turns {
        let Some(interaction) = state.store.interaction(id)? else { continue };
        let route = state.routes.get(&interaction.route).map(Arc::as_ref);
        entries.push(posted.entry(state, route, id, 0).map_err(Refusal::Invalid)?);
    }
    let (status, turns) = match commit(state, Op::Conversation(entries)).await? {
        FeedbackOutcome::Credited(0) => {
            return refused("none of its turns has one finished completion".to_owned());
        }
        FeedbackOutcome::AlreadyCredited(turns) => ("duplicate", turns),
        FeedbackOutcome::Credited(turns) => ("recorded", turns),
        _ => return Err(Refusal::Unknown(ApiError::no_such_session(session))),
    };
    tracing::debug!(session, name = posted.name, turns, status, "feedback on a conversation");
    let name = posted.name.to_owned();
    let session_id = session.to_owned();
    let object = "feedback";
    Ok((status, Answer::Session(SessionFeedback { object, status, session_id, name, turns })))
}

async fn commit(state: &AppState, op: Op) -> Result<FeedbackOutcome, Refusal> {
    let outcome = state.store.commit(vec![op]).await?.feedback.into_iter().next();
    outcome.ok_or_else(|| {
        tracing::error!("the ledger gave feedback no outcome");
        Refusal::Failed(ApiError::internal())
    })
}

/// The rest is a courtesy: what was committed is acknowledged even if it cannot be read back.
fn answer(
    state: &AppState,
    route: Option<&Route>,
    status: &'static str,
    entry: &FeedbackEntry,
    sample: SampleId,
) -> Feedback {
    let version = state.store.sample(sample).ok().flatten().map(|s| s.version.0);
    Feedback {
        object: "feedback",
        id: format!("{sample}:{}", entry.name),
        status,
        completion_id: entry.interaction.completion_id(),
        choice: entry.choice,
        name: entry.name.clone(),
        policy_version: version,
        weight: route.and_then(|route| route.weight(&entry.name)),
    }
}

/// The prompt of a completion. What was just served may still be on its way to the ledger, so a
/// prompt that is not there is looked for again behind everything that waits.
async fn recorded(state: &AppState, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
    if let Some(found) = state.store.interaction(id)? {
        return Ok(Some(found));
    }
    state.store.flush().await?;
    state.store.interaction(id)
}
