//! The kinds of feedback: on a completion, on a pair of completions, on a whole conversation, and corrections.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value};
use tokio::sync::Mutex;

use hone_core::types::{
    Continuation, Interaction, InteractionId, Sample, SampleOrigin, TokenId, now_ms,
};
use hone_reward::Route;
use hone_reward::feedback::{FeedbackParams, FeedbackType};
use hone_store::{CorrectionEntry, FeedbackEntry, FeedbackOutcome, Op, Store, StoreError};

use super::posted::{
    COMMENT_CHARS, FeedbackResponse, Judged, KEY_CHARS, MAX_CHOICE, NAME_CHARS, PostedFeedback,
    RatingProspect, USER_CHARS, after_commit, commit, completion_id, end_user, find_choice,
    id_schema, judged, no_such_choice, prospect, rate, rated, rater, unknown_completion,
};
use crate::auth::Caller;
use crate::body::{Field, FieldTable, Fields};
use crate::error::{ApiError, ErrorCode};
use crate::generate::prompt::{RecordedTurn, check_size, encode_apart};
use crate::state::AppState;

/// Records a rating of one choice of a completion.
pub async fn completion(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    name: &str,
    id: InteractionId,
    choice: u32,
) -> Result<FeedbackResponse, ApiError> {
    let (interaction, is_here) = rated(state, posted, id).await?;
    let completion_id = interaction.completion_id();
    let route = state.routes.get(&interaction.route).cloned();
    let mut entry = posted.entry(state, route.as_deref(), name, &interaction, choice)?;
    if !is_here {
        entry.elsewhere = Some(posted.elsewhere());
    }
    let op = Op::Feedback(vec![entry.clone()]);
    let (status, sample) = match commit(state, op, posted.idempotency_key).await? {
        FeedbackOutcome::Forwarded => {
            let completion_id = posted.fields.text("completion_id")?.unwrap_or_default().to_owned();
            let judged = Judged::Completion {
                id: format!("{completion_id}-{choice}:{name}"),
                completion_id,
                choice,
                policy_version: None,
                weight: route.and_then(|route| route.weight(name)),
                name: entry.name,
            };
            return Ok(FeedbackResponse::new("recorded", None, judged));
        }
        FeedbackOutcome::Recorded(sample) => ("recorded", sample),
        FeedbackOutcome::Duplicate(sample) => ("duplicate", sample),
        FeedbackOutcome::UnknownChoice => return Err(no_such_choice("choice", choice)),
        _ => return Err(unknown_completion(&posted.fields, "completion_id")),
    };
    tracing::debug!(completion_id, name = entry.name, value = entry.value, status, "feedback");
    let response = after_commit(state, move |state| {
        if status == "recorded" {
            rate(state, &entry, sample);
        }
        // Committed feedback is acknowledged even if its sample cannot be read back.
        let found = state.store.sample(sample).ok().flatten();
        let turn = found.map(|sample| RecordedTurn { interaction, sample });
        let by = entry.key_id.as_deref();
        let reason = turn.as_ref().and_then(|turn| prospect(state, &entry.name, by, turn));
        let judged = Judged::Completion {
            id: format!("{sample}:{}", entry.name),
            completion_id,
            choice: entry.choice,
            policy_version: turn.map(|turn| turn.sample.version.0),
            weight: route.and_then(|route| route.weight(&entry.name)),
            name: entry.name,
        };
        FeedbackResponse::new(status, reason, judged)
    });
    response.await
}

// A whole conversation, with the completion of each turn. A turn with one completion is credited. Of several choices,
// those are credited with which a later request of the session continued ([`Continuation`]); the others were not part
// of the conversation.

/// Largest number of turns of a conversation that one post can judge.
const MAX_TURNS: usize = 1000;
/// Turns that the pieces of one request can judge together. Each turn is a row of the ledger.
const MAX_CREDITED: usize = 10_000;
/// A turn counts once more for so many bytes of its comment, which each row has.
const COMMENT_BYTES: usize = 512;

/// The conversations that the pieces of one request judge. Each is read once.
#[derive(Default)]
pub struct Sessions {
    read: Mutex<BTreeMap<String, Arc<[RecordedTurn]>>>,
    credited: AtomicUsize,
}

/// Records feedback on each turn of a conversation.
pub async fn conversation(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    name: &str,
    session: &str,
    sessions: &Sessions,
) -> Result<FeedbackResponse, ApiError> {
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
    for RecordedTurn { interaction, sample } in turns.iter() {
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
            rate(state, &entry, turn.sample.id);
        }
        // The reason of the last turn, unless any turn is trained on.
        let reasons = turns.iter().zip(&raters);
        let mut reasons =
            reasons.map(|(turn, rater)| prospect(state, &part, rater.as_deref(), turn));
        reasons.try_fold(None, |_, reason| reason.map(Some)).flatten()
    });
    let reason = reason.await?;
    let (session_id, name) = (session.to_owned(), name.to_owned());
    Ok(FeedbackResponse::new(status, reason, Judged::Session { session_id, name, turns: count }))
}

impl Sessions {
    /// The credited turns of a session; `None` if it has too many.
    async fn turns(
        &self,
        state: &AppState,
        key: Option<&str>,
        session: &str,
    ) -> Result<Option<Arc<[RecordedTurn]>>, ApiError> {
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
        let turns: Arc<[RecordedTurn]> = credited(requests).into();
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

fn credited(requests: Vec<(Interaction, Vec<Sample>)>) -> Vec<RecordedTurn> {
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
            .map(move |sample| RecordedTurn { interaction: interaction.clone(), sample })
    });
    turns.collect()
}

/// The completion with which a request continued; unknown if the client edited the first one that it returned.
fn continued_choice(from: &Continuation) -> Option<(InteractionId, u32)> {
    let is_known = !from.edited || from.prefix_tokens > 0;
    is_known.then_some((from.interaction, from.choice))
}

// Corrections: the text that a completion should have been. It becomes the tokens of an answer to the recorded prompt,
// which the trainer learns from by supervised training (`train.correction_weight`).

/// Records a correction of one choice, with its rating if there is one.
pub async fn correction(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    text: &str,
    id: InteractionId,
    choice: u32,
) -> Result<FeedbackResponse, ApiError> {
    let named = ("completion_id", id);
    let interaction = judged(state, &posted.caller, &posted.fields, named).await?;
    let completion_id = interaction.completion_id();
    let sample = find_choice(state, id, choice, "choice").await?;
    if interaction.prompt_ids.is_empty() {
        let message = format!(
            "completion_id is {completion_id:?}: its prompt was recorded without token ids, which a \
             correction needs"
        );
        return Err(ApiError::field("completion_id", message));
    }
    let ids = tokenize(state, text, &interaction).await?;
    let special = || posted.fields.invalid("correction", "text without special tokens");
    let ids = ids.ok_or_else(special)?;
    let route = state.routes.get(&interaction.route).cloned();
    let entry = |name| posted.entry(state, route.as_deref(), name, &interaction, choice);
    let rating = posted.name.map(entry).transpose()?;
    let unused = unused(state, &interaction, &sample, text, ids.len()).map(str::to_owned);
    let rater = posted.rater(&interaction);
    let op = Op::Correction(Box::new(CorrectionEntry {
        interaction: id,
        choice,
        text: text.to_owned(),
        ids,
        unused: unused.clone(),
        rating: rating.clone(),
        comment: posted.comment.map(str::to_owned),
        idempotency_key: posted.idempotency_key.map(str::to_owned),
        key_id: rater.clone(),
        created: posted.arrived,
    }));
    let status = match commit(state, op, posted.idempotency_key).await? {
        FeedbackOutcome::Duplicate(_) => "duplicate",
        FeedbackOutcome::Recorded(_) => "recorded",
        _ => return Err(unknown_completion(&posted.fields, "completion_id")),
    };
    tracing::debug!(completion_id, status, unused, "a correction");
    let (policy_version, weight) = (sample.version.0, state.learning.correction_weight);
    let turn = RecordedTurn { interaction, sample };
    let prospects = after_commit(state, move |state| {
        let reason = match unused {
            None if !state.learning.enabled => Some("disabled".to_owned()),
            None if state.store.is_quarantined(rater.as_deref())? => Some("quarantined".to_owned()),
            other => other,
        };
        let rating_prospect = |rating: FeedbackEntry| {
            if status == "recorded" {
                rate(state, &rating, turn.sample.id);
            }
            let reason = prospect(state, &rating.name, rating.key_id.as_deref(), &turn);
            let weight = route.as_ref().and_then(|route| route.weight(&rating.name));
            RatingProspect { name: rating.name, weight, trained: reason.is_none(), reason }
        };
        Ok::<_, StoreError>((reason, rating.map(rating_prospect)))
    });
    let (reason, rating) = prospects.await??;
    let judged = Judged::Correction { completion_id, choice, policy_version, weight, rating };
    Ok(FeedbackResponse::new(status, reason, judged))
}

/// The tokens of a text that fits into the context of its prompt; `None` if it contains a special token.
async fn tokenize(
    state: &AppState,
    text: &str,
    interaction: &Interaction,
) -> Result<Option<Vec<TokenId>>, ApiError> {
    check_size(state, "correction", (text.len(), "bytes")).map_err(ApiError::unprocessable)?;
    let own = text.to_owned();
    let ids = encode_apart(state, move |codec| codec.answer(&own)).await?;
    let (prompt, context) = (interaction.prompt_ids.len(), state.engine.info().context);
    match ids.as_ref().map(Vec::len) {
        Some(tokens) if prompt + tokens > context => {
            let message = format!(
                "correction has {tokens} tokens: it may have {}, because its prompt has {prompt} and the \
                 model's context is {context}",
                context.saturating_sub(prompt)
            );
            Err(ApiError::too_large("correction", message).unprocessable())
        }
        _ => Ok(ids),
    }
}

/// Why a corrected text of `tokens` tokens is never trained on; `None` if it waits for the trainer.
fn unused(
    state: &AppState,
    interaction: &Interaction,
    sample: &Sample,
    text: &str,
    tokens: usize,
) -> Option<&'static str> {
    // 0 until the trainer has started, which then drops a text that is too long.
    let longest = state.train.status().max_sample_tokens;
    if interaction.held_out {
        Some("held_out")
    } else if text == sample.text {
        Some("unchanged")
    } else if longest > 0 && interaction.prompt_ids.len() + tokens > longest {
        Some("too_long")
    } else if state.learning.correction_weight == 0.0 {
        Some("correction_weight")
    } else {
        None
    }
}

// Preferences: of two completions of one prompt, the client chose one and rejected the other. That is two ratings for
// one part, recorded together: its greatest value and its least. The rollout service makes them one group, because
// their prompts are equal.

const CHOSEN: &str = "chosen";
const REJECTED: &str = "rejected";
pub const PAIR_FIELDS: FieldTable = &[&[
    Field::json(CHOSEN, id_schema, "The id of the better completion.").required(),
    Field::json(REJECTED, id_schema, "The id of the worse completion.").required(),
    Field::integer("chosen_choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::integer("rejected_choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::short_text("name", NAME_CHARS, "A feedback part of the route; default its only one."),
    Field::short_text("comment", COMMENT_CHARS, "Text about the preference."),
    Field::short_text("end_user", USER_CHARS, "Who prefers."),
    Field::short_text("idempotency_key", KEY_CHARS, "The same post with it changes nothing."),
]];

pub fn is_pair(body: &Map<String, Value>) -> bool {
    [CHOSEN, REJECTED].iter().any(|name| body.get(*name).is_some_and(|value| !value.is_null()))
}

pub async fn preference(
    state: &Arc<AppState>,
    body: &Map<String, Value>,
    caller: &Caller,
) -> Result<FeedbackResponse, ApiError> {
    let fields = Fields::of(body, PAIR_FIELDS)?;
    let (named, comment) = (fields.text("name")?, fields.text("comment")?);
    let (key, user) = (fields.text("idempotency_key")?, end_user(&fields)?);
    let chosen = find(state, caller, &fields, CHOSEN, "chosen_choice").await?;
    let rejected = find(state, caller, &fields, REJECTED, "rejected_choice").await?;
    let route = comparable(state, &chosen, &rejected)?;
    let (name, params) = part(route, named)?;
    let [least, greatest] = params.range.unwrap_or([0.0, 1.0]);
    let created = now_ms();
    let by = rater(caller, user, &chosen.interaction);
    let entry = |preferred: &RecordedTurn, value| FeedbackEntry {
        interaction: preferred.interaction.id,
        choice: preferred.sample.choice,
        name: name.to_owned(),
        value: Some(value),
        comment: comment.map(str::to_owned),
        idempotency_key: key.map(str::to_owned),
        // One client rates both.
        key_id: by.clone(),
        created,
        aggregate: params.aggregate,
        elsewhere: None,
    };
    let pair = vec![entry(&chosen, greatest), entry(&rejected, least)];
    let status = match commit(state, Op::Feedback(pair), key).await? {
        FeedbackOutcome::Duplicate(_) => "duplicate",
        FeedbackOutcome::Recorded(_) => "recorded",
        _ => return Err(ApiError::internal()),
    };
    tracing::debug!(name, status, "a preference");
    let judged = Judged::Pair {
        chosen: chosen.interaction.completion_id(),
        rejected: rejected.interaction.completion_id(),
        chosen_choice: chosen.sample.choice,
        rejected_choice: rejected.sample.choice,
        name: name.to_owned(),
    };
    let part = name.to_owned();
    let reason = after_commit(state, move |state| {
        let mut both = [&chosen, &rejected].into_iter();
        both.find_map(|one| prospect(state, &part, by.as_deref(), one))
    });
    Ok(FeedbackResponse::new(status, reason.await?, judged))
}

/// The completion that a field names.
async fn find(
    state: &AppState,
    caller: &Caller,
    fields: &Fields<'_>,
    name: &str,
    choice_name: &str,
) -> Result<RecordedTurn, ApiError> {
    let id = completion_id(fields, name)?;
    let choice = u32::try_from(fields.whole(choice_name).unwrap_or(0)).unwrap_or(u32::MAX);
    let interaction = judged(state, caller, fields, (name, id)).await?;
    let sample = find_choice(state, id, choice, choice_name).await?;
    Ok(RecordedTurn { interaction, sample })
}

/// The route of both completions, if they can be compared.
fn comparable<'s>(
    state: &'s AppState,
    chosen: &RecordedTurn,
    rejected: &RecordedTurn,
) -> Result<&'s Arc<Route>, ApiError> {
    let (a, b) = (&chosen.interaction, &rejected.interaction);
    let refuse = |reason: &str| {
        let (a, b) = (a.completion_id(), b.completion_id());
        ApiError::field(REJECTED, format!("chosen is {a} and rejected is {b}: {reason}"))
    };
    let differ = [
        (chosen.sample.id == rejected.sample.id, "they must be different completions or choices"),
        (a.prompt_ids != b.prompt_ids, "their prompts must be equal"),
        (a.grammar != b.grammar, "their response formats must be equal"),
        (
            a.end_rules() != b.end_rules(),
            "stop, stop_token_ids, min_tokens and ignore_eos must be equal",
        ),
        (
            a.route != b.route || a.api_key() != b.api_key(),
            "they must have the same route and API key",
        ),
    ];
    if let Some((_, reason)) = differ.iter().find(|(is_wrong, _)| *is_wrong) {
        return Err(refuse(reason));
    }
    let route = state.routes.get(&a.route);
    route.ok_or_else(|| refuse("no route of the configuration applies to them"))
}

/// The feedback part that a preference rates: the named one, or the route's only one.
fn part<'r>(
    route: &'r Route,
    named: Option<&str>,
) -> Result<(&'r str, &'r FeedbackParams), ApiError> {
    let rated = |name: &'r str| Some((name, route.feedback(name)?));
    let parts: Vec<_> = route
        .parts
        .iter()
        .filter_map(|part| rated(&part.name))
        .filter(|(_, params)| params.r#type != FeedbackType::Comment)
        .collect();
    let names = || parts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let (found, problem) = match named {
        Some(named) => {
            let found = parts.iter().find(|(name, _)| *name == named);
            (found, format!("name is {named:?}: it must be a feedback part with values"))
        }
        None if parts.len() == 1 => (parts.first(), String::new()),
        None => (None, "name is missing: it must be a feedback part with values".to_owned()),
    };
    found.copied().ok_or_else(|| {
        let known = if parts.is_empty() { "none".to_owned() } else { names() };
        let message = format!("{problem}; the route {:?} has {known}", route.name);
        ApiError::field("name", message)
    })
}
