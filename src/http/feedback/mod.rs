//! `/v1/feedback`: a client's judgment of a completion, of a pair of completions or of a whole
//! conversation, or the text that a completion should have been.
//!
//! `post` reads one such object or a list, `list` shows what a key has posted on a completion.
//!
//! A conversation is the set of requests of one API key with the same `metadata.session_id`. Feedback
//! on it is recorded for every assistant turn that was served in it, so that the sample of each turn,
//! with its exact tokens, is credited. Feedback on one turn contains its `completion_id`. A turn with
//! several choices is not credited, because it is unknown with which one the conversation continued.
//!
//! The response is sent after the commit, so that acknowledged feedback survives a crash.

mod correction;
mod list;
pub(super) mod pair;
mod post;
pub(super) mod posted;
mod prospect;
mod rating;
pub(super) mod recording;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use hone_core::types::{Interaction, InteractionId, SampleId, SampleOrigin};
use hone_reward::Route;
use hone_store::{FeedbackEntry, FeedbackOutcome, Op};

use self::correction::CorrectionFeedback;
use self::pair::PairFeedback;
use self::posted::{PostedFeedback, Target};
use self::recording::{Refusal, check_rater, commit, find_interaction, prospect, reused};
use super::auth::Caller;
use super::error::ApiError;
use super::state::AppState;

pub(super) use list::{FeedbackRecord, LIST_FIELDS, list};
pub(super) use post::{ListedResponse, batch_schema, create};

/// Largest number of turns of a conversation that one post can judge.
const MAX_TURNS: usize = 1000;

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

/// The response to feedback on a conversation.
#[derive(Serialize, JsonSchema)]
pub(super) struct SessionFeedback {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    status: &'static str,
    session_id: String,
    name: String,
    /// Number of credited turns.
    turns: usize,
    /// Whether a turn will be trained on, unless something later prevents it.
    trained: bool,
    /// Why the last turn will not be, if none will be.
    reason: Option<String>,
}

/// Records one piece of feedback.
async fn record(
    state: &AppState,
    body: &Map<String, Value>,
    caller: Caller,
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
                    conversation(state, &posted, name, session).await
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
    state: &AppState,
    posted: &PostedFeedback<'_>,
    name: &str,
    id: InteractionId,
    choice: u32,
) -> Recorded {
    let interaction = find_interaction(state, id).await.map_err(Refusal::Failed)?;
    let interaction = interaction.ok_or_else(|| posted.unknown())?;
    check_rater(&posted.caller, &interaction)?;
    let completion_id = interaction.completion_id();
    let route = state.routes.get(&interaction.route).map(Arc::as_ref);
    let entry = posted.entry(state, route, name, &interaction, choice).map_err(Refusal::Invalid)?;
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
    if status == "recorded" {
        rating::rate(state, route, &entry, sample);
    }
    let response = response(state, route, status, &interaction, &entry, sample);
    Ok((status, FeedbackResponse::Completion(response)))
}

async fn conversation(
    state: &AppState,
    posted: &PostedFeedback<'_>,
    name: &str,
    session: &str,
) -> Recorded {
    // The last turn may still be queued for the ledger.
    state.store.flush().await?;
    let turns = state.store.turns_of(posted.caller.key_id.as_deref(), session, MAX_TURNS + 1)?;
    if turns.is_empty() {
        return Err(Refusal::Unknown(ApiError::no_such_session(session)));
    }
    let refuse = |reason: String| {
        let message = format!("session_id is {session:?}: {reason}");
        Err(Refusal::Invalid(ApiError::field("session_id", message)))
    };
    if turns.len() > MAX_TURNS {
        return refuse(format!(
            "it has more than {MAX_TURNS} turns, so judge each by completion_id"
        ));
    }
    let mut entries = Vec::with_capacity(turns.len());
    let mut interactions = Vec::with_capacity(turns.len());
    for id in turns {
        let Some(interaction) = state.store.interaction(id)? else { continue };
        let route = state.routes.get(&interaction.route).map(Arc::as_ref);
        entries.push(posted.entry(state, route, name, &interaction, 0).map_err(Refusal::Invalid)?);
        interactions.push(interaction);
    }
    let last = entries.last().cloned();
    let (status, turns) = match commit(state, Op::Conversation(entries)).await? {
        FeedbackOutcome::Credited(0) => {
            return refuse("no turn has exactly one finished completion".to_owned());
        }
        FeedbackOutcome::AlreadyCredited(turns) => ("duplicate", turns),
        FeedbackOutcome::Reused => return Err(reused(posted.idempotency_key)),
        FeedbackOutcome::Credited(turns) => ("recorded", turns),
        _ => return Err(Refusal::Unknown(ApiError::no_such_session(session))),
    };
    tracing::debug!(session, name, turns, status, "feedback on a conversation");
    if let Some(last) = last
        && status == "recorded"
    {
        // One opinion counts once. A session meets one version throughout a canary.
        rate_turn(state, &last)?;
    }
    let reason = untrained_turns(state, posted, name, &interactions);
    let name = name.to_owned();
    let session_id = session.to_owned();
    let object = "feedback";
    let trained = reason.is_none();
    let answer = SessionFeedback { object, status, session_id, name, turns, trained, reason };
    Ok((status, FeedbackResponse::Session(answer)))
}

/// Why the last turn of a conversation is not trained on; `None` if any turn is.
fn untrained_turns(
    state: &AppState,
    posted: &PostedFeedback<'_>,
    name: &str,
    turns: &[Interaction],
) -> Option<String> {
    let mut last = None;
    for interaction in turns {
        let mut served = state.store.samples_of(interaction.id).unwrap_or_default();
        served.retain(|sample| sample.origin == SampleOrigin::Served);
        if let [sample] = &served[..] {
            let rater = posted.rater(interaction);
            last = Some(prospect(state, name, rater.as_deref(), interaction, sample)?);
        }
    }
    last
}

fn rate_turn(state: &AppState, turn: &FeedbackEntry) -> Result<(), Refusal> {
    let Some(interaction) = state.store.interaction(turn.interaction)? else { return Ok(()) };
    let route = state.routes.get(&interaction.route).map(Arc::as_ref);
    for sample in state.store.samples_of(turn.interaction)? {
        if sample.origin == SampleOrigin::Served {
            rating::rate(state, route, turn, sample.id);
        }
    }
    Ok(())
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
