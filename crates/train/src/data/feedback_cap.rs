//! How much of a batch's feedback one key may give.

use std::collections::BTreeMap;

use hone_core::metrics::Metrics;
use hone_reward::Routes;
use hone_reward::feedback::cap_shares;

use super::batch_builder::{GroupMember, TrainBatch};

/// Where a piece of feedback is in a batch: group and member.
type Place = (usize, usize);

/// Applies `max_key_share` of every feedback part to the batch. A dropped value is missing, and
/// never becomes nought; a weighed one keeps its value and moves the weights less.
pub(crate) fn cap(batch: &mut TrainBatch, routes: &Routes, metrics: &Metrics) {
    for ((route, part), places) in pieces(batch) {
        let params = routes.get(&route).and_then(|found| found.feedback(&part));
        let Some(params) = params.filter(|params| params.max_key_share < 1.0) else { continue };
        let keys: Vec<Option<String>> =
            places.iter().map(|place| key_of(batch, *place, &part)).collect();
        let keys: Vec<Option<&str>> = keys.iter().map(Option::as_deref).collect();
        let shares = cap_shares(&keys, params.max_key_share, params.share_rule);
        let mut capped = 0;
        for (place, share) in places.into_iter().zip(shares.weights) {
            let Some(member) = member(batch, place).filter(|_| share < 1.0) else { continue };
            capped += 1;
            if share > 0.0 {
                member.shares.insert(part.clone(), share);
            } else {
                member.parts.remove(&part);
                member.feedback.remove(&part);
            }
        }
        metrics.reward_feedback_capped.with_label_values(&[&route, &part]).inc_by(capped);
        if capped > 0 {
            tracing::debug!(route, part, capped, "a key gave more than its share of feedback");
        }
    }
}

/// All feedback of the batch by route and part, the newest last.
fn pieces(batch: &TrainBatch) -> BTreeMap<(String, String), Vec<Place>> {
    let mut found: BTreeMap<(String, String), Vec<(u64, Place)>> = BTreeMap::new();
    for (g, group) in batch.groups.iter().enumerate() {
        for (m, member) in group.members.iter().enumerate() {
            for (part, given) in &member.feedback {
                let key = (group.group.route.clone(), part.clone());
                found.entry(key).or_default().push((given.created, (g, m)));
            }
        }
    }
    let sorted = found.into_iter().map(|(key, mut pieces)| {
        pieces.sort_unstable();
        (key, pieces.into_iter().map(|(_, place)| place).collect())
    });
    sorted.collect()
}

fn key_of(batch: &TrainBatch, (group, member): Place, part: &str) -> Option<String> {
    batch.groups.get(group)?.members.get(member)?.feedback.get(part)?.key_id.clone()
}

fn member(batch: &mut TrainBatch, (group, member): Place) -> Option<&mut GroupMember> {
    batch.groups.get_mut(group)?.members.get_mut(member)
}

#[cfg(test)]
mod tests {
    use hone_core::types::{
        FinishReason, Group, GroupId, GroupState, InteractionId, PolicyVersion, Sample, SampleId,
        SampleOrigin, SamplingParams,
    };

    use super::*;
    use crate::data::batch_builder::{Given, Loaded};

    fn loaded(key: &str, value: f64, created: u64) -> Loaded {
        let sample = Sample {
            id: SampleId::new(),
            interaction: InteractionId::new(),
            choice: 0,
            origin: SampleOrigin::Served,
            created,
            ids: vec![1],
            logprobs: vec![-1.0],
            kept_mass: 1.0,
            text: String::new(),
            finish: FinishReason::Stop,
            version: PolicyVersion::BASE,
            params: SamplingParams::default(),
            untrainable: None,
        };
        let given = Given { created, key_id: Some(key.to_owned()) };
        Loaded {
            group: Group {
                id: GroupId::new(),
                interaction: sample.interaction,
                route: "users".to_owned(),
                members: vec![sample.id],
                parts: vec!["thumbs".to_owned()],
                oldest_version: PolicyVersion::BASE,
                created,
                state: GroupState::Ready,
            },
            prompt_ids: vec![1],
            weights: BTreeMap::from([("thumbs".to_owned(), 1.0)]),
            members: vec![GroupMember {
                sample,
                parts: BTreeMap::from([("thumbs".to_owned(), value)]),
                feedback: BTreeMap::from([("thumbs".to_owned(), given)]),
                shares: BTreeMap::new(),
            }],
            set_aside: false,
        }
    }

    /// A batch in which `a` gave four of six, its newest first, under a cap of one half.
    fn capped(rule: &str) -> (TrainBatch, u64) {
        let keys = [("a", 9), ("a", 2), ("b", 3), ("a", 4), ("c", 5), ("a", 1)];
        let groups = keys.map(|(key, created)| loaded(key, 1.0, created)).into();
        let mut batch = TrainBatch { groups };
        let text = format!(
            "[[route]]\nname = \"users\"\nreward = [{{ name = \"thumbs\", kind = \"feedback\", \
             max_key_share = 0.5, share_rule = \"{rule}\" }}]"
        );
        let routes = crate::testing::routes(&text);
        let metrics = Metrics::new().unwrap();
        cap(&mut batch, &routes, &metrics);
        let count = metrics.reward_feedback_capped.with_label_values(&["users", "thumbs"]).get();
        (batch, count)
    }

    #[test]
    fn weighing_keeps_values_and_lessens_what_they_count() {
        let (batch, count) = capped("weight");
        assert_eq!(count, 4);
        let rewards = batch.rewards();
        let shares: Vec<f64> = rewards.iter().map(|g| g.parts[0].shares[0]).collect();
        assert_eq!(shares, [0.5, 0.5, 1.0, 0.5, 1.0, 0.5]);
        assert!(rewards.iter().all(|g| g.parts[0].values == [Some(1.0)]));
        assert_eq!(batch.feedback_times().count(), 6);
    }

    #[test]
    fn dropping_leaves_the_newest_and_makes_the_rest_missing() {
        let (batch, count) = capped("drop");
        assert_eq!(count, 2);
        let rewards = batch.rewards();
        let values: Vec<Option<f64>> = rewards.iter().map(|g| g.parts[0].values[0]).collect();
        assert_eq!(values, [Some(1.0), None, Some(1.0), Some(1.0), Some(1.0), None]);
        let times: Vec<u64> = batch.feedback_times().collect();
        assert_eq!(times, [9, 3, 4, 5]);
    }

    #[test]
    fn no_cap_changes_nothing() {
        let mut batch = TrainBatch { groups: vec![loaded("a", 1.0, 1), loaded("b", 0.0, 2)] };
        let text = "[[route]]\nname = \"users\"\n\
                    reward = [{ name = \"thumbs\", kind = \"feedback\" }]";
        let routes = crate::testing::routes(text);
        cap(&mut batch, &routes, &Metrics::new().unwrap());
        assert!(batch.rewards().iter().all(|g| g.parts[0].shares == [1.0]));
    }
}
