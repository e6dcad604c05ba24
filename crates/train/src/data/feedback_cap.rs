//! Limits the values of a batch's feedback, and the part of it that comes from one API key or rater.

use std::collections::BTreeMap;

use hone_core::metrics::Metrics;
use hone_core::types::key_of_rater;
use hone_reward::Routes;
use hone_reward::feedback::cap_shares;

use super::batch_builder::TrainBatch;

/// `(group, member)` within the batch, and rater of one piece of feedback.
type Feedback = ((usize, usize), Option<String>);

/// Limits feedback to the bounds of its part, and applies each feedback part's `max_key_share` to API keys, so
/// that a key gains nothing by naming many end users, and to raters: the weight of a value scales its advantage.
/// Without `metrics` nothing is counted.
pub(crate) fn cap(batch: &mut TrainBatch, routes: &Routes, metrics: Option<&Metrics>) {
    for ((route, part), feedback) in feedback_by_part(batch) {
        let Some(params) = routes.get(&route).and_then(|found| found.feedback(&part)) else {
            continue;
        };
        if let Some([low, high]) = params.bounds() {
            for ((group, member), _) in &feedback {
                let value = batch.groups[*group].members[*member].parts.get_mut(&part);
                value.into_iter().for_each(|value| *value = value.clamp(low, high));
            }
        }
        if params.max_key_share >= 1.0 {
            continue;
        }
        let raters: Vec<Option<&str>> =
            feedback.iter().map(|(_, rater)| rater.as_deref()).collect();
        let keys: Vec<Option<&str>> =
            raters.iter().map(|rater| rater.and_then(key_of_rater)).collect();
        let shares = |ids: &[Option<&str>]| cap_shares(ids, params.max_key_share);
        let of_raters = shares(&raters).weights;
        let weights = shares(&keys).weights.into_iter().zip(of_raters).map(|(a, b)| a.min(b));
        let mut capped = 0;
        for (((group, member), _), weight) in feedback.iter().zip(weights) {
            if weight >= 1.0 {
                continue;
            }
            capped += 1;
            let member = &mut batch.groups[*group].members[*member];
            member.cap_weights.insert(part.clone(), weight);
        }
        if let Some(metrics) = metrics {
            metrics.reward_feedback_capped.with_label_values(&[&route, &part]).inc_by(capped);
        }
        if capped > 0 {
            tracing::debug!(route, part, capped, "feedback of a key exceeded `max_key_share`");
        }
    }
}

/// All feedback of the batch by `(route, part)`.
fn feedback_by_part(batch: &TrainBatch) -> BTreeMap<(String, String), Vec<Feedback>> {
    let mut by_part: BTreeMap<_, Vec<Feedback>> = BTreeMap::new();
    for (g, group) in batch.groups.iter().enumerate() {
        for (m, member) in group.members.iter().enumerate() {
            for (part, origin) in &member.feedback {
                let key = (group.group.route.clone(), part.clone());
                by_part.entry(key).or_default().push(((g, m), origin.key_id.clone()));
            }
        }
    }
    by_part
}

#[cfg(test)]
mod tests {
    use hone_core::types::InteractionId;

    use super::*;
    use crate::data::batch_builder::{BatchGroup, FeedbackOrigin, GroupMember};
    use crate::testing::{group, routes, sample};

    fn rated(key: &str, value: f64, created: u64) -> BatchGroup {
        let sample = sample(InteractionId::new(), 0);
        let origin = FeedbackOrigin { created, key_id: Some(key.to_owned()) };
        BatchGroup {
            group: group("users", "thumbs", std::slice::from_ref(&sample), created),
            prompt_ids: vec![1],
            weights: BTreeMap::from([("thumbs".to_owned(), 1.0)]),
            members: vec![GroupMember {
                sample,
                parts: BTreeMap::from([("thumbs".to_owned(), value)]),
                feedback: BTreeMap::from([("thumbs".to_owned(), origin)]),
                cap_weights: BTreeMap::new(),
                late: false,
                conversation: None,
            }],
            without_quarantined: false,
            is_rated: true,
        }
    }

    /// The groups as a batch with their feedback capped by the keys of the part, and the number of capped values.
    fn capped_by(keys: &str, groups: impl IntoIterator<Item = BatchGroup>) -> (TrainBatch, u64) {
        let groups = groups.into_iter().collect();
        let mut batch = TrainBatch { groups, ..TrainBatch::default() };
        let part = format!("{{ name = \"thumbs\", kind = \"feedback\"{keys} }}");
        let routes = routes(&format!("[[route]]\nname = \"users\"\nreward = [{part}]"));
        let metrics = Metrics::new().unwrap();
        cap(&mut batch, &routes, Some(&metrics));
        let count = metrics.reward_feedback_capped.with_label_values(&["users", "thumbs"]).get();
        (batch, count)
    }

    #[test]
    fn the_share_of_a_key_counts_its_users_and_values_from_before_a_range() {
        for user in [None, Some("user")] {
            let raters = (0..32).map(|n| match user {
                Some(user) if n < 28 => format!("a.{user}{n}"),
                _ => if n < 28 { "a" } else { "b" }.to_owned(),
            });
            let groups = raters.map(|rater| rated(&rater, 1.0, 1));
            assert_eq!(capped_by(", max_key_share = 0.5", groups).1, 28, "{user:?}");
        }
        let groups = [1e6, -1e308, 0.5].map(|value| rated("a", value, 1));
        let (batch, _) = capped_by(", range = [0, 1]", groups);
        let values: Vec<_> = batch.rewards().iter().map(|g| g.parts[0].values[0]).collect();
        assert_eq!(values, [Some(1.0), Some(0.0), Some(0.5)]);
    }

    #[test]
    fn a_cap_keeps_the_values() {
        // Key `a` gave four of six ratings.
        let keys = [("a", 9), ("a", 2), ("b", 3), ("a", 4), ("c", 5), ("a", 1)];
        let groups = keys.map(|(key, created)| rated(key, 1.0, created));
        let (batch, count) = capped_by(", max_key_share = 0.5", groups);
        assert_eq!(count, 4);
        let rewards = batch.rewards();
        let weights: Vec<f64> = rewards.iter().map(|g| g.parts[0].cap_weights[0]).collect();
        assert_eq!(weights, [0.5, 0.5, 1.0, 0.5, 1.0, 0.5]);
        assert!(rewards.iter().all(|g| g.parts[0].values == [Some(1.0)]));
        assert_eq!(batch.feedback_times().count(), 6);
        let (batch, count) = capped_by("", [rated("a", 1.0, 1), rated("b", 0.0, 2)]);
        assert_eq!(count, 0);
        assert!(batch.rewards().iter().all(|g| g.parts[0].cap_weights == [1.0]));
    }
}
