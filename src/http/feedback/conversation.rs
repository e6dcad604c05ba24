//! Feedback on a whole conversation, which credits the completion of each turn.
//!
//! A turn with one completion is credited. Of several choices, those are credited with which a later
//! request of the session continued ([`Continuation`]); the others were not part of the conversation.

use std::collections::HashSet;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{Continuation, Interaction, InteractionId, Sample, SampleOrigin};
use hone_store::{FeedbackOutcome, Op, Store, StoreError};

use super::posted::PostedFeedback;
use super::rating;
use super::recording::{Refusal, commit, prospect, reused};
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// Largest number of turns of a conversation that one post can judge.
const MAX_TURNS: usize = 1000;

/// The response to feedback on a conversation.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct SessionFeedback {
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

/// A turn of a conversation, with the completion that is credited.
struct CreditedTurn {
    interaction: Interaction,
    sample: Sample,
}

pub(super) async fn record(
    state: &AppState,
    posted: &PostedFeedback<'_>,
    name: &str,
    session: &str,
) -> Result<(&'static str, SessionFeedback), Refusal> {
    let refuse = |reason: &str| {
        let message = format!("session_id is {session:?}: {reason}");
        Err(Refusal::Invalid(ApiError::field("session_id", message)))
    };
    // The last turn may still be queued for the ledger.
    state.store.flush().await?;
    let (key, of) = (posted.caller.key_id.clone(), session.to_owned());
    let requests = state.read_ledger(move |store| requests_of(store, key.as_deref(), &of)).await;
    let requests = requests.map_err(Refusal::Failed)?;
    if requests.is_empty() {
        return Err(Refusal::Unknown(ApiError::no_such_session(session)));
    }
    if requests.len() > MAX_TURNS {
        return refuse(&format!(
            "it has more than {MAX_TURNS} turns, so judge each by completion_id"
        ));
    }
    let turns = credited(requests);
    let mut entries = Vec::with_capacity(turns.len());
    for CreditedTurn { interaction, sample } in &turns {
        let route = state.routes.get(&interaction.route).map(Arc::as_ref);
        let entry = posted.entry(state, route, name, interaction, sample.choice);
        entries.push(entry.map_err(Refusal::Invalid)?);
    }
    let last = entries.last().cloned();
    let (status, count) = match commit(state, Op::Conversation(entries)).await? {
        FeedbackOutcome::Credited(0) => {
            return refuse(
                "no turn has exactly one finished completion, or one that was continued",
            );
        }
        FeedbackOutcome::AlreadyCredited(turns) => ("duplicate", turns),
        FeedbackOutcome::Reused => return Err(reused(posted.idempotency_key)),
        FeedbackOutcome::Credited(turns) => ("recorded", turns),
        _ => return Err(Refusal::Unknown(ApiError::no_such_session(session))),
    };
    tracing::debug!(session, name, turns = count, status, "feedback on a conversation");
    if let (Some(entry), Some(turn), "recorded") = (last, turns.last(), status) {
        // One opinion counts once. A session meets one version throughout a canary.
        let route = state.routes.get(&turn.interaction.route).map(Arc::as_ref);
        rating::rate(state, route, &entry, turn.sample.id);
    }
    let reason = untrained_turns(state, posted, name, &turns);
    let answer = SessionFeedback {
        object: "feedback",
        status,
        session_id: session.to_owned(),
        name: name.to_owned(),
        turns: count,
        trained: reason.is_none(),
        reason,
    };
    Ok((status, answer))
}

/// The requests of a session with their served completions, in order; one more than [`MAX_TURNS`] if
/// there are too many.
fn requests_of(
    store: &Store,
    key: Option<&str>,
    session: &str,
) -> Result<Vec<(Interaction, Vec<Sample>)>, StoreError> {
    let mut requests = Vec::new();
    for id in store.turns_of(key, session, MAX_TURNS + 1)? {
        let Some(interaction) = store.interaction(id)? else { continue };
        let mut served = store.samples_of(id)?;
        served.retain(|sample| sample.origin == SampleOrigin::Served);
        requests.push((interaction, served));
    }
    Ok(requests)
}

fn credited(requests: Vec<(Interaction, Vec<Sample>)>) -> Vec<CreditedTurn> {
    let continued: HashSet<_> = requests
        .iter()
        .filter_map(|(interaction, _)| continued_choice(interaction.continues.as_ref()?))
        .collect();
    let turns = requests.into_iter().flat_map(|(interaction, mut served)| {
        if served.len() > 1 {
            served.retain(|sample| continued.contains(&(interaction.id, sample.choice)));
        }
        served
            .into_iter()
            .map(move |sample| CreditedTurn { interaction: interaction.clone(), sample })
    });
    turns.collect()
}

/// The completion with which a request continued. It is unknown if the client edited the first one
/// that it returned, of which no token was kept.
fn continued_choice(from: &Continuation) -> Option<(InteractionId, u32)> {
    let is_known = !from.edited || from.prefix_tokens > 0;
    is_known.then_some((from.interaction, from.choice))
}

/// Why the last turn of a conversation is not trained on; `None` if any turn is.
fn untrained_turns(
    state: &AppState,
    posted: &PostedFeedback<'_>,
    name: &str,
    turns: &[CreditedTurn],
) -> Option<String> {
    let mut last = None;
    for CreditedTurn { interaction, sample } in turns {
        let rater = posted.rater(interaction);
        last = Some(prospect(state, name, rater.as_deref(), interaction, sample)?);
    }
    last
}
