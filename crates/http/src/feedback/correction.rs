//! Corrections: the text that a completion should have been.
//!
//! The text becomes the tokens of an answer to the recorded prompt, which the trainer learns from by
//! supervised training (`train.correction_weight`). A rating may be posted with it.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{Interaction, InteractionId, Sample, TokenId};
use hone_store::{CorrectionEntry, FeedbackEntry, FeedbackOutcome, Op, StoreError};

use super::posted::PostedFeedback;
use super::recording::{
    after_commit, commit, find_choice, is_quarantined, judged, prospect, rate, unknown_completion,
};
use crate::error::ApiError;
use crate::generate::prompt::{check_size, encode_apart};
use crate::state::AppState;

/// The response to a correction.
#[derive(Serialize, JsonSchema)]
pub struct CorrectionFeedback {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    pub status: &'static str,
    completion_id: String,
    choice: u32,
    /// The version that generated the completion.
    policy_version: u64,
    /// `train.correction_weight`.
    weight: f64,
    /// Whether the text will be trained on, unless something later prevents it.
    trained: bool,
    /// Why it will not be: a label of `hone_train_corrections_total`, or `disabled`.
    reason: Option<String>,
    /// What becomes of the rating that was posted with it; null without one.
    rating: Option<RatingProspect>,
}

/// What becomes of a rating that was posted with a correction.
#[derive(Serialize, JsonSchema)]
struct RatingProspect {
    name: String,
    /// Weight of the part in the completion's route; null if the route has no such part.
    weight: Option<f64>,
    trained: bool,
    reason: Option<String>,
}

/// Records a correction of one choice, with its rating if there is one.
pub async fn record(
    state: &Arc<AppState>,
    posted: &PostedFeedback<'_>,
    text: &str,
    id: InteractionId,
    choice: u32,
) -> Result<CorrectionFeedback, ApiError> {
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
    let prospects = after_commit(state, move |state| {
        let reason = match unused {
            None if !state.learning.enabled => Some("disabled".to_owned()),
            None if is_quarantined(state, rater.as_deref())? => Some("quarantined".to_owned()),
            other => other,
        };
        let rating_prospect = |rating: FeedbackEntry| {
            if status == "recorded" {
                rate(state, route.as_deref(), &rating, sample.id);
            }
            let by = rating.key_id.as_deref();
            let reason = prospect(state, &rating.name, by, &interaction, &sample);
            let weight = route.as_ref().and_then(|route| route.weight(&rating.name));
            RatingProspect { name: rating.name, weight, trained: reason.is_none(), reason }
        };
        Ok::<_, StoreError>((reason, rating.map(rating_prospect)))
    });
    let (reason, rating) = prospects.await??;
    Ok(CorrectionFeedback {
        object: "feedback",
        status,
        completion_id,
        choice,
        policy_version,
        weight,
        trained: reason.is_none(),
        reason,
        rating,
    })
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
