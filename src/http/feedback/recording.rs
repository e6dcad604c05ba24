//! Steps that every kind of feedback shares: lookup, commit, and whether it will be trained on.

use std::sync::Arc;

use serde_json::Value;

use hone_core::types::{Interaction, InteractionId, Sample, SampleOrigin};
use hone_store::{FeedbackOutcome, Op, StoreError};

use super::prospect::untrained_reason;
use crate::config::KeyScope;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::Fields;
use crate::http::error::ApiError;

/// The reason why nothing was recorded, as the metric counts it.
pub(super) enum Refusal {
    Invalid(ApiError),
    Unknown(ApiError),
    Failed(ApiError),
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid(error) | Refusal::Unknown(error) | Refusal::Failed(error) => error,
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Failed(error.into())
    }
}

/// The interaction of a completion. One that was just served may still be queued for the ledger, so a
/// missing one is looked up a second time after the queue is flushed.
pub(in crate::http) async fn find_interaction(
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

/// Refuses a completion that another key asked for, unless this one may rate every completion.
pub(super) fn check_rater(caller: &Caller, interaction: &Interaction) -> Result<(), Refusal> {
    let Some(key) = &caller.key else { return Ok(()) };
    let is_own = interaction.api_key() == Some(key.id.as_str());
    if is_own || key.has_one_of(&[KeyScope::Feedback]) {
        return Ok(());
    }
    Err(Refusal::Invalid(ApiError::missing_scope(format!(
        "the key {:?} lacks the scope feedback, which rating another key's completion requires",
        key.name
    ))))
}

/// The error of an idempotency key that was used for something else.
pub(super) fn reused(key: Option<&str>) -> Refusal {
    Refusal::Invalid(ApiError::reused_key(key.unwrap_or_default()))
}

/// The refusal for a completion that is not in the ledger; the field `name` has its id.
pub(super) fn unknown_completion(fields: &Fields<'_>, name: &str) -> Refusal {
    let text = fields.get(name).and_then(Value::as_str).unwrap_or_default();
    let is_unstored = InteractionId::from_completion_id(text).is_some_and(|id| id.is_unstored());
    Refusal::Unknown(if is_unstored {
        ApiError::unstored_completion(name, text)
    } else {
        ApiError::no_such_completion(name, text)
    })
}

/// The sample of a served choice, which the field `name` has.
pub(super) async fn find_choice(
    state: &AppState,
    id: InteractionId,
    choice: u32,
    name: &str,
) -> Result<Sample, Refusal> {
    let is_named =
        |sample: &Sample| sample.origin == SampleOrigin::Served && sample.choice == choice;
    let look_up = || state.read_ledger(move |store| store.samples_of(id));
    let found = |samples: Vec<Sample>| samples.into_iter().find(is_named);
    let mut sample = found(look_up().await.map_err(Refusal::Failed)?);
    if sample.is_none() {
        // Another choice of the completion may still be queued for the ledger.
        state.store.flush().await?;
        sample = found(look_up().await.map_err(Refusal::Failed)?);
    }
    sample.ok_or_else(|| {
        let message = format!("{name} is {choice}: the completion has no such choice");
        Refusal::Unknown(ApiError::field(name, message))
    })
}

/// Records feedback.
pub(super) async fn commit(state: &AppState, op: Op) -> Result<FeedbackOutcome, Refusal> {
    let outcome = state.store.commit(vec![op]).await?.feedback.into_iter().next();
    outcome.ok_or_else(|| {
        tracing::error!("the ledger returned no outcome for feedback");
        Refusal::Failed(ApiError::internal())
    })
}

/// Does what follows a commit on a thread that may wait for the disk.
pub(super) async fn after_commit<T: Send + 'static>(
    state: &Arc<AppState>,
    work: impl FnOnce(&AppState) -> T + Send + 'static,
) -> Result<T, Refusal> {
    let own = Arc::clone(state);
    state.read_ledger(move |_| Ok(work(&own))).await.map_err(Refusal::Failed)
}

/// Why recorded feedback is not trained on. Reads the ledger, see [`after_commit`]. Committed feedback is
/// acknowledged even if the ledger cannot be read.
pub(super) fn prospect(
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
