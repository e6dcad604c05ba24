//! Feedback on a whole conversation, which credits the completion of each turn.
//!
//! A turn with one completion is credited. Of several choices, those are credited with which a later
//! request of the session continued ([`Continuation`]); the others were not part of the conversation.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Mutex;

use hone_core::types::{Continuation, Interaction, InteractionId, Sample, SampleOrigin};
use hone_store::{FeedbackOutcome, Op, Store, StoreError};

use super::posted::PostedFeedback;
use super::recording::{after_commit, commit, prospect, rate};
use crate::error::{ApiError, ErrorCode};
use crate::state::AppState;

/// Largest number of turns of a conversation that one post can judge.
const MAX_TURNS: usize = 1000;
/// Turns that the pieces of one request can judge together. Each turn is a row of the ledger.
const MAX_CREDITED: usize = 10_000;
/// A turn counts once more for so many bytes of its comment, which each row has.
const COMMENT_BYTES: usize = 512;

/// The conversations that the pieces of one request judge. Each is read once.
#[derive(Default)]
pub struct Sessions {
    read: Mutex<BTreeMap<String, Arc<[CreditedTurn]>>>,
    credited: AtomicUsize,
}

/// The response to feedback on a conversation.
#[derive(Serialize, JsonSchema)]
pub struct SessionFeedback {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    pub status: &'static str,
    session_id: String,
    name: String,
    /// Number of credited turns.
    turns: usize,
    /// Whether a turn will be trained on, unless something later prevents it.
    trained: bool,
    /// Why the last turn will not be, if none will be.
    reason: Option<String>,
}

/// A turn of a conversation, with the completion that is credited, without their texts and tokens.
#[derive(Clone)]
struct CreditedTurn {
    interaction: Interaction,
    sample: Sample,
}

pub async fn record(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    name: &str,
    session: &str,
    sessions: &Sessions,
) -> Result<SessionFeedback, ApiError> {
    let refuse = |reason: &str| {
        Err(ApiError::field("session_id", format!("session_id is {session:?}: {reason}")))
    };
    let turns = sessions.turns(state, posted.caller.key_id.as_deref(), session).await?;
    let Some(turns) = turns else {
        return refuse(&format!(
            "it has more than {MAX_TURNS} turns, so judge each by completion_id"
        ));
    };
    let rows = turns.len() * (1 + posted.comment.map_or(0, str::len) / COMMENT_BYTES);
    if sessions.credited.fetch_add(rows, Ordering::Relaxed) + rows > MAX_CREDITED {
        return refuse(&format!(
            "the request judges more than {MAX_CREDITED} turns, of which one counts once more for each \
             {COMMENT_BYTES} bytes of its comment: post the others in further requests"
        ));
    }
    let mut entries = Vec::with_capacity(turns.len());
    for CreditedTurn { interaction, sample } in turns.iter() {
        let route = state.routes.get(&interaction.route).map(Arc::as_ref);
        entries.push(posted.entry(state, route, name, interaction, sample.choice)?);
    }
    let last = entries.last().cloned();
    let op = Op::Conversation(entries);
    let (status, count) = match commit(state, op, posted.idempotency_key).await? {
        FeedbackOutcome::Credited(0) => {
            return refuse(
                "no turn has exactly one finished completion, or one that was continued",
            );
        }
        FeedbackOutcome::AlreadyCredited(turns) => ("duplicate", turns),
        FeedbackOutcome::Credited(turns) => ("recorded", turns),
        _ => return Err(no_such_session(session)),
    };
    tracing::debug!(session, name, turns = count, status, "feedback on a conversation");
    let raters: Vec<_> = turns.iter().map(|turn| posted.rater(&turn.interaction)).collect();
    let part = name.to_owned();
    let reason = after_commit(state, move |state| {
        if let (Some(entry), Some(turn), "recorded") = (last, turns.last(), status) {
            // One opinion counts once. A session meets one version throughout a canary.
            let route = state.routes.get(&turn.interaction.route).map(Arc::as_ref);
            rate(state, route, &entry, turn.sample.id);
        }
        untrained_turns(state, &part, turns.iter().zip(&raters))
    });
    let reason = reason.await?;
    Ok(SessionFeedback {
        object: "feedback",
        status,
        session_id: session.to_owned(),
        name: name.to_owned(),
        turns: count,
        trained: reason.is_none(),
        reason,
    })
}

impl Sessions {
    /// The credited turns of a session; `None` if it has too many.
    async fn turns(
        &self,
        state: &AppState,
        key: Option<&str>,
        session: &str,
    ) -> Result<Option<Arc<[CreditedTurn]>>, ApiError> {
        let mut read = self.read.lock().await;
        if let Some(known) = read.get(session) {
            return Ok(Some(Arc::clone(known)));
        }
        // The last turn may still be queued for the ledger.
        state.store.flush().await?;
        let (key, of) = (key.map(str::to_owned), session.to_owned());
        let requests = state.read_ledger(move |store| requests_of(store, key.as_deref(), &of));
        let requests = requests.await?;
        if requests.is_empty() {
            return Err(no_such_session(session));
        }
        if requests.len() > MAX_TURNS {
            return Ok(None);
        }
        let turns: Arc<[CreditedTurn]> = credited(requests).into();
        read.insert(session.to_owned(), Arc::clone(&turns));
        Ok(Some(turns))
    }
}

fn no_such_session(session: &str) -> ApiError {
    let message = format!("session_id is {session:?}: this key made no request in this session");
    ApiError::new(ErrorCode::SessionNotFound, message).param("session_id").unknown()
}

/// The requests of a session with their served completions, in order: at most [`MAX_TURNS`] and one more.
fn requests_of(
    store: &Store,
    key: Option<&str>,
    session: &str,
) -> Result<Vec<(Interaction, Vec<Sample>)>, StoreError> {
    let mut requests = Vec::new();
    for id in store.turns_of(key, session, MAX_TURNS + 1)? {
        let Some(interaction) = store.interaction(id)? else { continue };
        let interaction =
            Interaction { messages: Vec::new(), prompt_ids: Vec::new(), ..interaction };
        let served = store.samples_of(id)?.into_iter();
        let served = served.filter(|sample| sample.origin == SampleOrigin::Served);
        let without_tokens = |sample| Sample {
            ids: Vec::new(),
            logprobs: Vec::new(),
            kept: Vec::new(),
            forced: Vec::new(),
            text: String::new(),
            ..sample
        };
        requests.push((interaction, served.map(without_tokens).collect()));
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

/// The completion with which a request continued; unknown if the client edited the first one that it returned.
fn continued_choice(from: &Continuation) -> Option<(InteractionId, u32)> {
    let is_known = !from.edited || from.prefix_tokens > 0;
    is_known.then_some((from.interaction, from.choice))
}

/// Why the last turn of a conversation is not trained on; `None` if any turn is.
fn untrained_turns<'a>(
    state: &AppState,
    name: &str,
    turns: impl Iterator<Item = (&'a CreditedTurn, &'a Option<String>)>,
) -> Option<String> {
    let mut last = None;
    for (CreditedTurn { interaction, sample }, rater) in turns {
        last = Some(prospect(state, name, rater.as_deref(), interaction, sample)?);
    }
    last
}
