//! Passes ratings on to the evidence of a canary.

use hone_core::types::{SampleId, key_of_rater};
use hone_reward::Route;
use hone_store::FeedbackEntry;
use hone_train::policy::VersionRating;

use super::prospect::is_quarantined;
use crate::http::AppState;

/// Adds a recorded rating to the evidence of a canary in progress. A part without bounds cannot be
/// compared, one with the weight 0 is not what the policy is trained for, and a quarantined rater decides
/// nothing.
pub(super) fn rate(
    state: &AppState,
    route: Option<&Route>,
    entry: &FeedbackEntry,
    sample: SampleId,
) {
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
