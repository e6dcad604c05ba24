//! Whether feedback will be trained on.

use hone_core::types::{Interaction, PolicyState, Sample, concerns_rater};
use hone_reward::feedback::FeedbackType;
use hone_store::StoreError;

use crate::http::AppState;

/// Why feedback on a completion is not trained on, as the ledger and the metric
/// `hone_feedback_ratings_total` name it; `None` if it is, unless something later prevents it: the
/// completion may become too old while it waits, or an operator may activate another version.
///
/// `value` is the combined value of all raters.
pub(super) fn untrained_reason(
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
    } else if is_comment(state, interaction, name) {
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

fn is_comment(state: &AppState, interaction: &Interaction, name: &str) -> bool {
    let params = state.routes.get(&interaction.route).and_then(|route| route.feedback(name));
    params.is_some_and(|params| params.r#type == FeedbackType::Comment)
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
pub(super) fn is_quarantined(state: &AppState, rater: Option<&str>) -> Result<bool, StoreError> {
    let Some(rater) = rater else { return Ok(false) };
    Ok(state.store.quarantined()?.iter().any(|row| concerns_rater(&row.key_id, rater)))
}
