//! Reads what a group needs from the ledger.

use std::collections::{BTreeMap, BTreeSet};

use hone_core::types::{
    Group, GroupState, Interaction, InteractionId, Reward, RewardSource, SampleOrigin,
    include_rater,
};
use hone_reward::Routes;
use hone_reward::feedback::{Aggregate, aggregate, latest_per_rater};
use hone_store::{ERASED, QUARANTINED, RecordSource, Store, StoreError};

use super::group::{BatchGroup, FeedbackOrigin, GroupMember};

/// The conversations of a batch.
#[derive(Default)]
pub(super) struct BatchTurns {
    conversations: BTreeSet<[u8; 16]>,
    prompts: BTreeSet<InteractionId>,
}

impl BatchTurns {
    /// Adds the conversations of a group.
    pub(super) fn add(&mut self, group: &BatchGroup) {
        let members = || group.members.iter();
        self.conversations.extend(members().filter_map(|member| member.conversation));
        self.prompts.extend(members().map(|member| member.sample.interaction));
    }

    /// Whether the answers of a group are a further turn of one of the conversations.
    pub(super) fn go_on_in(&self, store: &Store, group: &Group) -> Result<bool, StoreError> {
        if group.is_correction() || self.prompts.contains(&group.interaction) {
            return Ok(false);
        }
        let prompt = store.interaction(group.interaction)?;
        Ok(prompt.is_some_and(|prompt| self.conversations.contains(&prompt.conversation())))
    }
}

/// Whether all values of a group are ratings by clients.
pub(super) fn is_rated(routes: &Routes, group: &Group) -> bool {
    let route = routes.get(&group.route);
    route.is_some_and(|route| group.parts.iter().all(|part| route.takes_feedback(part)))
}

/// Reads a group's prompt, trainable samples and rewards.
pub(crate) fn load(
    store: &impl RecordSource,
    routes: &Routes,
    quarantined: &BTreeSet<String>,
    group: Group,
) -> Result<BatchGroup, StoreError> {
    let route = routes.get(&group.route);
    let weights: BTreeMap<String, f64> =
        group.parts.iter().filter_map(|name| Some((name.clone(), route?.weight(name)?))).collect();
    let prompt = store.interaction(group.interaction)?;
    let conversation = prompt.as_ref().map(Interaction::conversation);
    let prompt_ids = prompt.map(|prompt| prompt.prompt_ids).unwrap_or_default();
    let mut members = Vec::new();
    let mut without_quarantined = false;
    for id in &group.members {
        let Some(sample) = store.sample(*id)? else { continue };
        if sample.untrainable.is_some() || sample.ids.is_empty() || prompt_ids.is_empty() {
            continue;
        }
        // Rated completions of a group may be answers to several requests with equal prompts.
        let conversation = if sample.interaction == group.interaction {
            conversation
        } else {
            let own = store.interaction(sample.interaction)?;
            let own = own.filter(|own| own.prompt_ids == prompt_ids);
            let Some(own) = own else { continue };
            Some(own.conversation())
        };
        let conversation = conversation.filter(|_| sample.origin == SampleOrigin::Served);
        let (mut parts, mut feedback) = (BTreeMap::new(), BTreeMap::new());
        for mut reward in store.rewards_of(*id)? {
            let from_clients = reward.source == RewardSource::Feedback;
            if from_clients && !quarantined.is_empty() {
                let rule = route.and_then(|r| r.feedback(&reward.name)).map(|p| p.aggregate);
                without_quarantined |=
                    leave_out(store, quarantined, rule.unwrap_or_default(), &mut reward)?;
            }
            if let Some(value) = reward.value
                && weights.contains_key(&reward.name)
            {
                if from_clients {
                    let origin = FeedbackOrigin { created: reward.created, key_id: reward.key_id };
                    feedback.insert(reward.name.clone(), origin);
                }
                parts.insert(reward.name, value);
            }
        }
        if !parts.is_empty() {
            let cap_weights = BTreeMap::new();
            members.push(GroupMember {
                sample,
                parts,
                feedback,
                cap_weights,
                late: false,
                conversation,
            });
        }
    }
    let is_rated = is_rated(routes, &group);
    Ok(BatchGroup { group, prompt_ids, weights, members, without_quarantined, is_rated })
}

/// Reads a group that was ready, without the members that were erased meanwhile.
pub(super) fn load_ready(
    store: &Store,
    routes: &Routes,
    quarantined: &BTreeSet<String>,
    group: Group,
) -> Result<BatchGroup, StoreError> {
    let mut loaded = load(store, routes, quarantined, group)?;
    // An erasure of the first member's prompt gives the group the prompt of another member.
    while loaded.members.is_empty()
        && let Some(group) = store.group(loaded.group.id)?
        && group.state == GroupState::Ready
        && group != loaded.group
    {
        loaded = load(store, routes, quarantined, group)?;
    }
    Ok(loaded)
}

/// Why a group without a trainable member is dropped. The ledger has dropped an erased one already.
pub(super) fn unused_reason(
    store: &Store,
    loaded: &BatchGroup,
) -> Result<&'static str, StoreError> {
    if loaded.without_quarantined {
        return Ok(QUARANTINED);
    }
    let is_erased = store.interaction(loaded.group.interaction)?.is_none();
    Ok(if is_erased { ERASED } else { "unscored" })
}

/// Aggregates a feedback reward again without the ratings of quarantined keys; returns whether it
/// had such ratings.
fn leave_out(
    store: &impl RecordSource,
    quarantined: &BTreeSet<String>,
    rule: Aggregate,
    reward: &mut Reward,
) -> Result<bool, StoreError> {
    let mut ratings = store.ratings_of(reward.sample, &reward.name)?;
    let all = ratings.len();
    ratings.retain(|rating| {
        rating.key_id.as_ref().is_none_or(|rater| !include_rater(quarantined, rater))
    });
    if ratings.len() == all {
        return Ok(false);
    }
    reward.value = aggregate(rule, &ratings);
    if let Some(last) = latest_per_rater(&ratings).last() {
        reward.created = last.created;
        reward.key_id.clone_from(&last.key_id);
    }
    Ok(true)
}
