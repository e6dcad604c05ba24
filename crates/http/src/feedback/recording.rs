//! Steps that every kind of feedback shares: lookup, commit, whether it will be trained on, and the evidence of a
//! canary.

use std::sync::Arc;

use serde_json::{Value, json};

use hone_core::types::{
    Interaction, InteractionId, PolicyState, Sample, SampleId, SampleOrigin, concerns_rater,
    key_of_rater,
};
use hone_reward::Route;
use hone_reward::feedback::FeedbackType;
use hone_store::{FeedbackEntry, FeedbackOutcome, Op, StoreError};
use hone_train::policy::VersionRating;

use crate::auth::Caller;
use crate::body::Fields;
use crate::config::KeyScope;
use crate::error::{ApiError, ErrorCode};
use crate::state::AppState;

/// The form of a completion's id.
pub const ID_FORM: &str =
    "a completion's id, such as \"chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7\"";

/// The completion that a required field names.
pub fn completion_id(fields: &Fields<'_>, name: &str) -> Result<InteractionId, ApiError> {
    let text = fields.text(name)?.ok_or_else(|| fields.missing(name, ID_FORM))?;
    InteractionId::from_completion_id(text).ok_or_else(|| fields.invalid(name, ID_FORM))
}

/// The JSON schema of a completion's id.
pub fn id_schema() -> Value {
    json!({"type": "string", "pattern": "^(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{32}$"})
}

/// The interaction of a completion. One that was just served may be queued for the ledger, which is then flushed.
pub async fn find_interaction(
    state: &AppState,
    id: InteractionId,
) -> Result<Option<Interaction>, ApiError> {
    if id.is_unstored() {
        return Ok(None);
    }
    if let Some(found) = state.read_ledger(move |store| store.interaction(id)).await? {
        return Ok(Some(found));
    }
    state.store.flush().await?;
    state.read_ledger(move |store| store.interaction(id)).await
}

/// The completion that the field `name` has: one of the caller, or any if it has the scope `feedback`.
pub async fn judged(
    state: &AppState,
    caller: &Caller,
    fields: &Fields<'_>,
    (name, id): (&str, InteractionId),
) -> Result<Interaction, ApiError> {
    let interaction = find_interaction(state, id).await?;
    let interaction = interaction.ok_or_else(|| unknown_completion(fields, name))?;
    let Some(key) = &caller.key else { return Ok(interaction) };
    let is_own = interaction.api_key() == Some(key.id.as_str());
    if is_own || key.has_one_of(&[KeyScope::Feedback]) {
        return Ok(interaction);
    }
    let message = format!(
        "the key {:?} lacks the scope feedback, which rating another key's completion requires",
        key.name
    );
    Err(ApiError::new(ErrorCode::MissingScope, message))
}

/// The error for a completion that is not in the ledger; the field `name` has its id.
pub fn unknown_completion(fields: &Fields<'_>, name: &str) -> ApiError {
    let text = fields.get(name).and_then(Value::as_str).unwrap_or_default();
    match InteractionId::from_completion_id(text).is_some_and(|id| id.is_unstored()) {
        true => ApiError::unstored_completion(name, text),
        false => ApiError::no_such_completion(name, text),
    }
}

/// The sample of a served choice, which the field `name` has.
pub async fn find_choice(
    state: &AppState,
    id: InteractionId,
    choice: u32,
    name: &str,
) -> Result<Sample, ApiError> {
    let is_named =
        |sample: &Sample| sample.origin == SampleOrigin::Served && sample.choice == choice;
    let look_up = || state.read_ledger(move |store| store.samples_of(id));
    let mut sample = look_up().await?.into_iter().find(is_named);
    if sample.is_none() {
        // Another choice of the completion may still be queued for the ledger.
        state.store.flush().await?;
        sample = look_up().await?.into_iter().find(is_named);
    }
    sample.ok_or_else(|| no_such_choice(name, choice))
}

/// The error for a choice that a known completion does not have.
pub fn no_such_choice(name: &str, choice: u32) -> ApiError {
    let message = format!("{name} is {choice}: the completion has no such choice");
    ApiError::field(name, message).unknown()
}

/// Records feedback, unless its idempotency key was used for something else.
pub async fn commit(
    state: &AppState,
    op: Op,
    key: Option<&str>,
) -> Result<FeedbackOutcome, ApiError> {
    match state.store.commit(vec![op]).await?.feedback.into_iter().next() {
        Some(FeedbackOutcome::Reused) => {
            let key = key.unwrap_or_default();
            let message = format!(
                "idempotency_key is {key:?}: it was used for another target or another content"
            );
            let reused = ApiError::new(ErrorCode::IdempotencyKeyReused, message);
            Err(reused.param("idempotency_key"))
        }
        Some(outcome) => Ok(outcome),
        None => {
            tracing::error!("the ledger returned no outcome for feedback");
            Err(ApiError::internal())
        }
    }
}

/// Does what follows a commit on a thread that may wait for the disk.
pub async fn after_commit<T: Send + 'static>(
    state: &Arc<AppState>,
    work: impl FnOnce(&AppState) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let own = Arc::clone(state);
    state.read_ledger(move |_| Ok(work(&own))).await
}

/// Why recorded feedback is not trained on. A ledger that cannot be read is no reason to refuse the feedback.
pub fn prospect(
    state: &AppState,
    name: &str,
    rater: Option<&str>,
    interaction: &Interaction,
    sample: &Sample,
) -> Option<String> {
    let rewards = state.store.rewards_of(sample.id).unwrap_or_default();
    let value = rewards.into_iter().find(|reward| reward.name == name).and_then(|r| r.value);
    untrained_reason(state, interaction, sample, name, value, rater).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot determine whether feedback will be trained on");
        None
    })
}

/// Why feedback on a completion is not trained on, as the ledger and `hone_feedback_ratings_total` name it; `None`
/// if it is, unless the completion becomes too old or another version is activated. `value` combines all raters.
fn untrained_reason(
    state: &AppState,
    interaction: &Interaction,
    sample: &Sample,
    name: &str,
    value: Option<f64>,
    rater: Option<&str>,
) -> Result<Option<String>, StoreError> {
    let route = state.routes.get(&interaction.route);
    let label = if interaction.route.is_empty() {
        "no_route"
    } else if route.is_none() {
        "unknown_route"
    } else if interaction.held_out {
        "held_out"
    } else if let Some(reason) = &sample.untrainable {
        reason.as_str()
    } else if !route.is_some_and(|route| route.takes_feedback(name)) {
        "unknown_part"
    } else if route
        .and_then(|r| r.feedback(name))
        .is_some_and(|p| p.r#type == FeedbackType::Comment)
    {
        "comment"
    } else if value.is_none() {
        "tied"
    } else if !state.learning.enabled {
        "disabled"
    } else if let Some(reason) = age_problem(state, sample)? {
        reason
    } else if is_quarantined(state, rater)? {
        "quarantined"
    } else {
        return Ok(None);
    };
    Ok(Some(label.to_owned()))
}

/// Why the version of a completion is too far from the active one.
fn age_problem(state: &AppState, sample: &Sample) -> Result<Option<&'static str>, StoreError> {
    match state.store.lineage().age(state.policies.active(), sample.version) {
        Some(age) if age > state.learning.max_staleness => Ok(Some("stale")),
        Some(_) => Ok(None),
        None => {
            // A canary becomes the active version, or is undone later.
            let record = state.store.policy(sample.version)?;
            let is_canary = record.is_some_and(|record| record.state == PolicyState::Canary);
            Ok((!is_canary).then_some("abandoned"))
        }
    }
}

/// Whether feedback of a rater is quarantined.
pub fn is_quarantined(state: &AppState, rater: Option<&str>) -> Result<bool, StoreError> {
    let Some(rater) = rater else { return Ok(false) };
    Ok(state.store.quarantined()?.iter().any(|row| concerns_rater(&row.key_id, rater)))
}

/// Adds a rating to the evidence of a canary. A part without bounds cannot be compared, one with the weight 0 is not
/// what the policy is trained for, and a quarantined rater decides nothing.
pub fn rate(state: &AppState, route: Option<&Route>, entry: &FeedbackEntry, sample: SampleId) {
    let Some(route) = route else { return };
    let (Some(params), Some(weight)) = (route.feedback(&entry.name), route.weight(&entry.name))
    else {
        return;
    };
    let scaled = entry.value.and_then(|value| params.scaled(value));
    let (Some(value), Ok(Some(found))) = (scaled, state.store.sample(sample)) else { return };
    let rater = entry.key_id.as_deref();
    // If the ledger cannot tell, the rating is left out.
    if weight == 0.0 || is_quarantined(state, rater).unwrap_or(true) {
        return;
    }
    state.policies.rate(&VersionRating {
        version: found.version,
        sample,
        sampled: found.created,
        route: route.name.clone(),
        part: entry.name.clone(),
        value: if weight > 0.0 { value } else { 1.0 - value },
        key: rater.and_then(key_of_rater).map(str::to_owned),
        max_key_share: params.max_key_share,
        keys: state.keys.raters(),
    });
}
