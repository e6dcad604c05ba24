//! From ready groups in the ledger to one optimiser step's batch.

use std::collections::{BTreeMap, BTreeSet};

use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, PolicyVersion, Reward, RewardSource, Sample, TokenId,
    UnixMillis,
};
use hone_reward::Routes;
use hone_reward::feedback::{Aggregate, aggregate, latest_per_rater};
use hone_store::{Op, SET_ASIDE, Store, StoreError};

use super::advantage::{Advantages, GroupRewards, PartRewards};
use crate::TrainSample;

/// One trainable completion with the reward parts it is trained on.
#[derive(Debug)]
pub(crate) struct GroupMember {
    pub(crate) sample: Sample,
    /// Only parts that the group names, the route weighs, and that have a value.
    pub(crate) parts: BTreeMap<String, f64>,
    /// Where clients' feedback among those parts came from.
    pub(crate) feedback: BTreeMap<String, Given>,
    /// What feedback counts that does not count in full.
    pub(crate) shares: BTreeMap<String, f64>,
}

/// Where a piece of feedback came from.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// When it arrived; of several raters the last.
    pub(crate) created: UnixMillis,
    /// Which API key gave it; of several raters the last.
    pub(crate) key_id: Option<String>,
}

/// One group, loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) group: Group,
    pub(crate) prompt_ids: Vec<TokenId>,
    /// Weight of each part on the group's route.
    pub(crate) weights: BTreeMap<String, f64>,
    pub(crate) members: Vec<GroupMember>,
    /// Whether feedback of a key in quarantine was left out.
    pub(crate) set_aside: bool,
}

/// The groups of one optimiser step.
#[derive(Debug)]
pub(crate) struct TrainBatch {
    pub(crate) groups: Vec<Loaded>,
}

impl TrainBatch {
    /// Every member, group after group: the order of advantages and training samples alike.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&Loaded, &GroupMember)> {
        self.groups.iter().flat_map(|g| g.members.iter().map(move |m| (g, m)))
    }

    /// The reward parts as the advantages want them.
    pub(crate) fn rewards(&self) -> Vec<GroupRewards> {
        self.groups
            .iter()
            .map(|group| GroupRewards {
                route: group.group.route.clone(),
                members: group.members.len(),
                parts: group
                    .weights
                    .iter()
                    .map(|(name, weight)| PartRewards {
                        name: name.clone(),
                        weight: *weight,
                        values: group.members.iter().map(|m| m.parts.get(name).copied()).collect(),
                        shares: group
                            .members
                            .iter()
                            .map(|m| m.shares.get(name).copied().unwrap_or(1.0))
                            .collect(),
                    })
                    .collect(),
            })
            .collect()
    }

    /// What the learner trains on: every member that has an advantage.
    pub(crate) fn train_samples(&self, advantages: &Advantages) -> Vec<TrainSample> {
        self.members()
            .zip(advantages.values.iter().flatten())
            .filter_map(|((group, member), advantage)| {
                Some(TrainSample {
                    prompt_ids: group.prompt_ids.clone(),
                    ids: member.sample.ids.clone(),
                    logprobs: member.sample.logprobs.clone(),
                    temperature: member.sample.params.temperature,
                    advantage: (*advantage)?,
                    version: member.sample.version.0,
                    truncated: member.sample.finish == FinishReason::Length,
                })
            })
            .collect()
    }

    /// The groups' ids, in order.
    pub(crate) fn group_ids(&self) -> Vec<GroupId> {
        self.groups.iter().map(|g| g.group.id).collect()
    }

    /// The group of the training sample at `index` of [`Self::train_samples`].
    pub(crate) fn group_of(&self, advantages: &Advantages, index: usize) -> Vec<GroupId> {
        self.members()
            .zip(advantages.values.iter().flatten())
            .filter(|(_, advantage)| advantage.is_some())
            .nth(index)
            .map(|((group, _), _)| group.group.id)
            .into_iter()
            .collect()
    }

    /// Mean number of versions between sampling and now.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn staleness(&self, active: PolicyVersion) -> f64 {
        let behind: Vec<u64> =
            self.members().map(|(_, m)| active.0.saturating_sub(m.sample.version.0)).collect();
        behind.iter().sum::<u64>() as f64 / behind.len().max(1) as f64
    }

    /// The length of every completion, and whether it ended at its token limit.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = (usize, bool)> {
        self.members().map(|(_, m)| (m.sample.ids.len(), m.sample.finish == FinishReason::Length))
    }

    /// When the feedback that this batch trains on arrived.
    pub(crate) fn feedback_times(&self) -> impl Iterator<Item = UnixMillis> {
        self.members().flat_map(|(_, m)| m.feedback.values().map(|given| given.created))
    }
}

/// Takes ready groups, oldest first, until they hold `wanted` samples; `None` when there are
/// fewer. At most `limit` samples are exceeded by at most one group.
///
/// Groups with a member more than `max_staleness` versions behind `active`, and groups without a
/// trainable scored member, are dropped for good, with the reason in the ledger.
pub(crate) fn gather(
    store: &Store,
    routes: &Routes,
    active: PolicyVersion,
    max_staleness: u64,
    wanted: usize,
    limit: usize,
) -> Result<Option<TrainBatch>, StoreError> {
    let mut ready = Vec::new();
    let mut drops = Vec::new();
    let mut members = 0;
    // A group has at least one member, so that many groups are always enough.
    for group in store.ready_groups(limit.max(1))? {
        if active.0.saturating_sub(group.oldest_version.0) > max_staleness {
            drops.push(Op::GroupState(group.id, GroupState::Dropped("stale".to_owned())));
        } else if members < limit {
            members += group.members.len();
            ready.push(group);
        }
    }
    let aside: BTreeSet<String> = store.quarantined()?.into_iter().map(|key| key.key_id).collect();
    let mut groups = Vec::new();
    let mut samples = 0;
    if members >= wanted {
        for group in ready {
            let id = group.id;
            let loaded = load(store, routes, &aside, group)?;
            if loaded.members.is_empty() {
                let why = if loaded.set_aside { SET_ASIDE } else { "unscored" };
                drops.push(Op::GroupState(id, GroupState::Dropped(why.to_owned())));
            } else {
                samples += loaded.members.len();
                groups.push(loaded);
            }
        }
    }
    if !drops.is_empty() {
        store.commit_blocking(drops)?;
    }
    Ok((samples >= wanted && samples > 0).then_some(TrainBatch { groups }))
}

fn load(
    store: &Store,
    routes: &Routes,
    aside: &BTreeSet<String>,
    group: Group,
) -> Result<Loaded, StoreError> {
    let route = routes.get(&group.route);
    let weights: BTreeMap<String, f64> =
        group.parts.iter().filter_map(|name| Some((name.clone(), route?.weight(name)?))).collect();
    let prompt_ids =
        store.interaction(group.interaction)?.map(|i| i.prompt_ids).unwrap_or_default();
    let mut members = Vec::new();
    let mut set_aside = false;
    for id in &group.members {
        let Some(sample) = store.sample(*id)? else { continue };
        if sample.untrainable.is_some() || sample.ids.is_empty() || prompt_ids.is_empty() {
            continue;
        }
        let mut parts = BTreeMap::new();
        let mut feedback = BTreeMap::new();
        for mut reward in store.rewards_of(*id)? {
            if reward.source == RewardSource::Feedback && !aside.is_empty() {
                let rule = route.and_then(|r| r.feedback(&reward.name)).map(|p| p.aggregate);
                set_aside |= leave_out(store, aside, rule.unwrap_or_default(), &mut reward)?;
            }
            if let Some(value) = reward.value
                && weights.contains_key(&reward.name)
            {
                if reward.source == RewardSource::Feedback {
                    let given = Given { created: reward.created, key_id: reward.key_id };
                    feedback.insert(reward.name.clone(), given);
                }
                parts.insert(reward.name, value);
            }
        }
        if !parts.is_empty() {
            members.push(GroupMember { sample, parts, feedback, shares: BTreeMap::new() });
        }
    }
    Ok(Loaded { group, prompt_ids, weights, members, set_aside })
}

/// Makes a reward what it would be without the raters in quarantine; true where that changed it.
fn leave_out(
    store: &Store,
    aside: &BTreeSet<String>,
    rule: Aggregate,
    reward: &mut Reward,
) -> Result<bool, StoreError> {
    let mut ratings = store.ratings_of(reward.sample, &reward.name)?;
    let all = ratings.len();
    ratings.retain(|rating| rating.key_id.as_ref().is_none_or(|key| !aside.contains(key)));
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

#[cfg(test)]
mod tests;
