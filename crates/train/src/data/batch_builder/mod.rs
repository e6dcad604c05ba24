//! Builds one optimizer step's batch from ready groups in the ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prometheus::IntCounterVec;

use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, Interaction, InteractionId, Lineage, PolicyVersion,
    Reward, RewardSource, Sample, SampleId, SampleOrigin, TokenId, TokenSpan, UnixMillis,
    include_rater,
};
use hone_reward::Routes;
use hone_reward::feedback::{Aggregate, aggregate, latest_per_rater};
use hone_store::{ERASED, Ledger, Op, QUARANTINED, Store, StoreError};

use super::advantage::{Advantages, GroupRewards, PartRewards};
use crate::TrainSample;
use crate::config::TrainConfig;

/// The newest ready groups, from which a batch is built.
const LOOKAHEAD: usize = 4096;

/// Groups of ratings that may wait for the trainer. The oldest ones beyond are dropped.
const MOST_WAITING: usize = 4 * LOOKAHEAD;

#[derive(Clone, Debug)]
pub(crate) struct GroupMember {
    pub(crate) sample: Sample,
    /// Value of each reward part that group and route have; missing values are absent.
    pub(crate) parts: BTreeMap<String, f64>,
    /// Origin of the parts that are clients' feedback.
    pub(crate) feedback: BTreeMap<String, FeedbackOrigin>,
    /// Weights below 1 that `feedback_cap` gave to parts.
    pub(crate) cap_weights: BTreeMap<String, f64>,
    /// Whether it is older than `train.max_staleness`, of a withdrawn version, or recorded by another process.
    pub(crate) late: bool,
    /// The conversation that it is a turn of, if a client received it.
    pub(crate) conversation: Option<[u8; 16]>,
}

/// Origin of a feedback value; of several ratings, that of the last one.
#[derive(Clone, Debug)]
pub(crate) struct FeedbackOrigin {
    pub(crate) created: UnixMillis,
    pub(crate) key_id: Option<String>,
}

/// A group with everything that training needs from the ledger.
#[derive(Clone, Debug)]
pub(crate) struct BatchGroup {
    pub(crate) group: Group,
    pub(crate) prompt_ids: Vec<TokenId>,
    /// Weight of each reward part on the group's route.
    pub(crate) weights: BTreeMap<String, f64>,
    pub(crate) members: Vec<GroupMember>,
    /// Whether ratings of quarantined API keys were left out.
    pub(crate) without_quarantined: bool,
    /// Whether all values are ratings by clients.
    pub(crate) is_rated: bool,
}

impl BatchGroup {
    /// The prompt with each completion.
    pub(crate) fn completions(&self) -> impl Iterator<Item = (&[TokenId], &[TokenId])> {
        let ids = self.members.iter().map(|member| member.sample.ids.as_slice());
        ids.map(|ids| (self.prompt_ids.as_slice(), ids))
    }

    /// Tokens of the prompt and the longest completion.
    pub(crate) fn longest_tokens(&self) -> usize {
        self.prompt_ids.len()
            + self.completions().map(|(_, ids)| ids.len()).max().unwrap_or_default()
    }

    /// A member as a sample to train on. Its log-probabilities are under `softmax(logits / temperature)`, without
    /// grammar and truncation: the recorded ones are renormalized over the kept tokens, so the log of the kept mass
    /// is added. Tokens that the grammar forced are masked.
    pub(crate) fn train_sample(&self, member: &GroupMember, advantage: f64) -> TrainSample {
        let sample = &member.sample;
        let kept = sample.kept.iter().copied().chain(std::iter::repeat(1.0));
        let logprobs = sample.logprobs.iter().zip(kept);
        TrainSample {
            prompt_ids: self.prompt_ids.clone(),
            ids: sample.ids.clone(),
            logprobs: logprobs.map(|(logprob, mass)| logprob + mass.ln()).collect(),
            masked: match sample.forced.is_empty() {
                true => Vec::new(),
                false => TokenSpan::mask(&sample.forced, sample.ids.len()),
            },
            temperature: sample.params.temperature,
            advantage,
            version: sample.version.0,
            truncated: sample.finish != FinishReason::Stop,
            late: member.late,
            correction: false,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct TrainBatch {
    pub(crate) groups: Vec<BatchGroup>,
    /// Corrections, each of which is a group in the ledger.
    pub(crate) corrections: Vec<BatchCorrection>,
}

impl TrainBatch {
    /// The prompt and the tokens of every member and of every correction.
    pub(crate) fn completions(&self) -> impl Iterator<Item = (&[TokenId], &[TokenId])> {
        let corrections = self.corrections.iter().map(|one| (&one.prompt_ids[..], &one.ids[..]));
        self.groups.iter().flat_map(BatchGroup::completions).chain(corrections)
    }

    /// Every member, group by group. Advantages and training samples have the same order.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&BatchGroup, &GroupMember)> {
        self.groups.iter().flat_map(|g| g.members.iter().map(move |m| (g, m)))
    }

    pub(crate) fn sample_count(&self) -> usize {
        self.members().count() + self.corrections.len()
    }

    pub(crate) fn rewards(&self) -> Vec<GroupRewards> {
        let part = |members: &[GroupMember], (name, weight): (&String, &f64)| PartRewards {
            name: name.clone(),
            weight: *weight,
            values: members.iter().map(|m| m.parts.get(name).copied()).collect(),
            cap_weights: members
                .iter()
                .map(|m| m.cap_weights.get(name).copied().unwrap_or(1.0))
                .collect(),
            raters: members
                .iter()
                .map(|m| m.feedback.get(name).and_then(|origin| origin.key_id.clone()))
                .collect(),
        };
        let group = |group: &BatchGroup| GroupRewards {
            route: group.group.route.clone(),
            members: group.members.len(),
            parts: group.weights.iter().map(|weight| part(&group.members, weight)).collect(),
            conversations: group.members.iter().map(|member| member.conversation).collect(),
            is_rated: group.is_rated,
        };
        self.groups.iter().map(group).collect()
    }

    fn trained<'a>(
        &'a self,
        advantages: &'a Advantages,
    ) -> impl Iterator<Item = (&'a BatchGroup, &'a GroupMember, f64)> {
        let all = self.members().zip(advantages.values.iter().flatten());
        all.filter_map(|((group, member), advantage)| Some((group, member, (*advantage)?)))
    }

    /// One sample for every member that has an advantage, then one for every correction.
    pub(crate) fn train_samples(&self, advantages: &Advantages) -> Vec<TrainSample> {
        let trained = self.trained(advantages);
        let samples =
            trained.map(|(group, member, advantage)| group.train_sample(member, advantage));
        samples.chain(self.corrections.iter().map(BatchCorrection::train_sample)).collect()
    }

    /// The groups' ids in order, then those of the corrections.
    pub(crate) fn group_ids(&self) -> Vec<GroupId> {
        let groups = self.groups.iter().map(|g| g.group.id);
        groups.chain(self.corrections.iter().map(|correction| correction.group)).collect()
    }

    /// The id of the group of [`Self::train_samples`]`[index]`; empty if out of range.
    pub(crate) fn group_of(&self, advantages: &Advantages, index: usize) -> Vec<GroupId> {
        let groups = self.trained(advantages).map(|(group, ..)| group.group.id);
        let all = groups.chain(self.corrections.iter().map(|correction| correction.group));
        all.skip(index).take(1).collect()
    }

    /// The operations that drop the members whose [`Self::train_samples`] have these indices, because
    /// the policy has moved too far away from them, and the ids of the groups that have other members.
    pub(crate) fn without(
        &self,
        advantages: &Advantages,
        indices: &[usize],
    ) -> (Vec<Op>, Vec<GroupId>) {
        let mut faded: BTreeMap<GroupId, Vec<SampleId>> = BTreeMap::new();
        for (index, (group, member, _)) in self.trained(advantages).enumerate() {
            if indices.contains(&index) {
                faded.entry(group.group.id).or_default().push(member.sample.id);
            }
        }
        let (mut ops, mut left) = (Vec::new(), Vec::new());
        for group in &self.groups {
            let id = group.group.id;
            let reason = STALE.to_owned();
            match faded.remove(&id) {
                Some(members) if members.len() == group.members.len() => {
                    ops.push(Op::GroupState(id, GroupState::Dropped(reason)));
                }
                Some(members) => {
                    ops.push(Op::DropMembers { group: id, members, reason });
                    left.push(id);
                }
                None => left.push(id),
            }
        }
        left.extend(self.corrections.iter().map(|correction| correction.group));
        (ops, left)
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn staleness(&self, ages: &VersionAges) -> f64 {
        let ages: Vec<u64> =
            self.members().filter_map(|(_, m)| ages.of(m.sample.version)).collect();
        ages.iter().sum::<u64>() as f64 / ages.len().max(1) as f64
    }

    /// Length of every completion in tokens, and whether its token limit cut it.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = (usize, bool)> {
        self.members().map(|(_, m)| (m.sample.ids.len(), m.sample.finish == FinishReason::Length))
    }

    /// The mean weighted reward of the members of graded groups and of groups that have ratings only.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(crate) fn mean_rewards(&self) -> impl Iterator<Item = (&'static str, f64)> {
        [("graded", false), ("rated", true)].into_iter().filter_map(|(kind, is_rated)| {
            let members =
                self.members().filter(|(g, m)| g.is_rated == is_rated && !m.parts.is_empty());
            let rewards: Vec<f64> = members
                .map(|(g, m)| g.weights.iter().filter_map(|(p, w)| Some(w * m.parts.get(p)?)).sum())
                .collect();
            (!rewards.is_empty())
                .then(|| (kind, rewards.iter().sum::<f64>() / rewards.len() as f64))
        })
    }

    pub(crate) fn feedback_times(&self) -> impl Iterator<Item = UnixMillis> {
        let ratings = self.members().flat_map(|(_, m)| m.feedback.values());
        let ratings = ratings.map(|origin| origin.created);
        ratings.chain(self.corrections.iter().map(|correction| correction.created))
    }
}

/// Takes ready groups until they have `train.samples_per_step` members: graded ones and corrections for half of the batch,
/// oldest first, because few wait; then ratings, newest first, because they can arrive faster than they are trained on,
/// and old ones teach less; then further graded ones. The last group may exceed the number, and so may further turns of the
/// batch's conversations. Of ratings a batch takes up to [`TrainConfig::rated_factor`] times as many: they all enter the baselines, and
/// [`Advantages::select`] chooses those that the step computes. `None` if fewer than `min_samples` trainable samples are
/// ready, or, of ratings, that part of them.
///
/// Groups that can never be trained on are dropped in the ledger, with the reason: those with a
/// member of an abandoned branch or of an age above the limit, those without a trainable
/// member that has a reward, and ratings beyond the newest [`MOST_WAITING`]. Of a group of ratings, and of a graded group
/// that keeps two members, only the members beyond the limits are dropped.
pub(crate) fn build_batch(
    store: &Store,
    routes: &Routes,
    ages: &VersionAges,
    config: &TrainConfig,
    min_samples: usize,
    dropped_groups: &IntCounterVec,
) -> Result<Option<TrainBatch>, StoreError> {
    let max_samples = config.samples_per_step;
    let (mut ready, mut drops) = (Vec::new(), Vec::new());
    let dropped = |id, reason: &str| (id, reason.to_owned());
    let is_enough = |all: usize, rated: usize| {
        all >= min_samples || rated >= min_samples.div_ceil(config.rated_factor)
    };
    let (mut members, mut rated_members) = (0, 0);
    let too_old = |version, is_rated| match ages.of(version) {
        None => Some(ABANDONED),
        Some(age) => {
            let limit = if is_rated { config.feedback_max_staleness } else { config.max_staleness };
            (age > limit).then_some(STALE)
        }
    };
    // At least one member of each group is trainable. As many again may be turns of the same conversations.
    let most_rated = max_samples.max(1).saturating_mul(config.rated_factor);
    let most = most_rated.saturating_mul(2);
    let surplus = store.watch_ready().borrow().saturating_sub(MOST_WAITING.max(most));
    if surplus > 0 {
        let oldest = store.ready_groups(surplus)?.into_iter();
        let ratings = oldest.filter(|group| is_rated(routes, group));
        drops.extend(ratings.map(|group| dropped(group.id, BACKLOG)));
    }
    for group in store.newest_ready_groups(most.max(LOOKAHEAD))? {
        if group.is_correction() {
            members += 1;
            ready.push(group);
            continue;
        }
        let is_rated = is_rated(routes, &group);
        match too_old(group.oldest_version, is_rated) {
            // Of several members, those within the limits may be used.
            Some(reason) if group.members.len() == 1 => {
                drops.push(dropped(group.id, reason));
            }
            _ => {
                members += group.members.len();
                rated_members += if is_rated { group.members.len() } else { 0 };
                ready.push(group);
            }
        }
    }
    let mut ready = graded_first(ready, routes, max_samples / 2);
    ready.truncate(most);
    let quarantined = store.quarantined()?.into_iter().map(|key| key.key_id).collect();
    let (mut groups, mut corrections) = (Vec::new(), Vec::new());
    let (mut samples, mut rated) = (0, 0);
    let mut turns = BatchTurns::default();
    if is_enough(members, rated_members) {
        for group in ready {
            // Some recorded members may not be trainable, so only the loaded ones count.
            let limit = if is_rated(routes, &group) { most_rated } else { max_samples };
            if samples >= limit && !turns.go_on_in(store, &group)? {
                continue;
            }
            if group.is_correction() {
                match BatchCorrection::load(store, &quarantined, &group)? {
                    Ok(correction) => {
                        samples += 1;
                        corrections.push(correction);
                    }
                    Err(reason) => drops.push(dropped(group.id, reason)),
                }
                continue;
            }
            let mut loaded = load_ready(store, routes, &quarantined, group)?;
            let is_rated = loaded.is_rated;
            let too_old = |member: &GroupMember| too_old(member.sample.version, is_rated);
            let least = if is_rated { 1 } else { 2 };
            drop_members(store, &mut loaded, too_old, least, dropped_groups)?;
            for member in &mut loaded.members {
                member.late = ages.are_late(member.sample.version, config.max_staleness);
            }
            let problem = loaded.members.iter().find_map(too_old);
            if let Some(reason) = problem {
                // The activation came while the group was sampled.
                drops.push(dropped(loaded.group.id, reason));
            } else if loaded.members.is_empty() {
                drops.push(dropped(loaded.group.id, unused_reason(store, &loaded)?));
            } else {
                samples += loaded.members.len();
                rated += if is_rated { loaded.members.len() } else { 0 };
                turns.add(&loaded);
                groups.push(loaded);
            }
        }
    }
    if !drops.is_empty() {
        drop_groups(store, drops, dropped_groups)?;
    }
    Ok((is_enough(samples, rated) && samples > 0).then_some(TrainBatch { groups, corrections }))
}

/// The oldest graded groups and corrections with `members` members, then the ratings in their order, the newest first,
/// and then the further graded ones.
fn graded_first(ready: Vec<Group>, routes: &Routes, members: usize) -> Vec<Group> {
    let (mut graded, others): (Vec<_>, Vec<_>) =
        ready.into_iter().partition(|group| !is_rated(routes, group));
    graded.reverse();
    let mut taken = 0;
    let first = graded.iter().take_while(|group| {
        let is_first = taken < members;
        taken += group.members.len();
        is_first
    });
    let further = graded.split_off(first.count());
    graded.into_iter().chain(others).chain(further).collect()
}

/// Takes the members that are too old out of a group, unless fewer than `least` remain.
fn drop_members(
    store: &Store,
    loaded: &mut BatchGroup,
    too_old: impl Fn(&GroupMember) -> Option<&'static str>,
    least: usize,
    dropped_groups: &IntCounterVec,
) -> Result<(), StoreError> {
    let mut leaving: BTreeMap<&str, Vec<SampleId>> = BTreeMap::new();
    for member in &loaded.members {
        if let Some(reason) = too_old(member) {
            leaving.entry(reason).or_default().push(member.sample.id);
        }
    }
    let remaining = loaded.members.len() - leaving.values().flatten().count();
    if leaving.is_empty() || remaining < least {
        return Ok(());
    }
    for (reason, members) in leaving {
        loaded.members.retain(|member| !members.contains(&member.sample.id));
        loaded.group.members.retain(|member| !members.contains(member));
        let (group, reason) = (loaded.group.id, reason.to_owned());
        dropped_groups.with_label_values(&[&reason]).inc();
        store.commit_blocking(vec![Op::DropMembers { group, members, reason }])?;
    }
    Ok(())
}

/// Drops groups in the ledger, each for a reason, and counts them.
pub(crate) fn drop_groups(
    store: &Store,
    groups: impl IntoIterator<Item = (GroupId, String)>,
    dropped_groups: &IntCounterVec,
) -> Result<(), StoreError> {
    let (mut ops, mut reasons) = (Vec::new(), Vec::new());
    for (id, reason) in groups {
        ops.push(Op::GroupState(id, GroupState::Dropped(reason.clone())));
        reasons.push(reason);
    }
    store.commit_blocking(ops)?;
    for reason in reasons {
        dropped_groups.with_label_values(&[&reason]).inc();
    }
    Ok(())
}

// What a group needs from the ledger.

#[derive(Default)]
struct BatchTurns {
    conversations: BTreeSet<[u8; 16]>,
    prompts: BTreeSet<InteractionId>,
}

impl BatchTurns {
    fn add(&mut self, group: &BatchGroup) {
        let members = || group.members.iter();
        self.conversations.extend(members().filter_map(|member| member.conversation));
        self.prompts.extend(members().map(|member| member.sample.interaction));
    }

    /// Whether the answers of a group are a further turn of one of the conversations.
    fn go_on_in(&self, store: &Store, group: &Group) -> Result<bool, StoreError> {
        if group.is_correction() || self.prompts.contains(&group.interaction) {
            return Ok(false);
        }
        let prompt = store.interaction(group.interaction)?;
        Ok(prompt.is_some_and(|prompt| self.conversations.contains(&prompt.conversation())))
    }
}

/// Whether all values of a group are ratings by clients. A correction has none.
fn is_rated(routes: &Routes, group: &Group) -> bool {
    let route = routes.get(&group.route).filter(|_| !group.is_correction());
    route.is_some_and(|route| group.parts.iter().all(|part| route.takes_feedback(part)))
}

pub(crate) fn load(
    store: &Ledger,
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
fn load_ready(
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
fn unused_reason(store: &Store, loaded: &BatchGroup) -> Result<&'static str, StoreError> {
    if loaded.without_quarantined {
        return Ok(QUARANTINED);
    }
    let is_erased = store.interaction(loaded.group.interaction)?.is_none();
    Ok(if is_erased { ERASED } else { "unscored" })
}

/// Aggregates feedback again without ratings of quarantined keys; returns whether it had any.
fn leave_out(
    store: &Ledger,
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

// How old the samples of a batch may be, in policy versions.

/// How many versions ago a sample's policy was the one that the trainer continues from.
#[derive(Clone, Debug)]
pub(crate) struct VersionAges {
    pub(crate) lineage: Arc<Lineage>,
    /// The newest version that the trainer's weights descend from.
    pub(crate) head: PolicyVersion,
    /// Versions that are being published on top of `head`.
    pub(crate) ahead: u64,
}

impl VersionAges {
    /// The age of a version, or the distance to a withdrawn one, whose ratings teach most; `None` if an operator
    /// abandoned it.
    pub(crate) fn of(&self, version: PolicyVersion) -> Option<u64> {
        Some(self.lineage.distance(self.head, version)? + self.ahead)
    }

    /// Whether samples of a version need the importance weight of late feedback: it is older than `limit`, or the
    /// weights do not descend from it.
    fn are_late(&self, version: PolicyVersion, limit: u64) -> bool {
        let age = self.lineage.age(self.head, version);
        age.is_none_or(|age| age + self.ahead > limit)
    }
}

/// Reason of a dropped group with a sample of a version that an operator abandoned.
const ABANDONED: &str = "abandoned";
/// Reason of a dropped group of ratings that newer ones kept from the trainer.
const BACKLOG: &str = "backlog";
/// Reason of a dropped group with a sample that is too old, or from which the policy has moved too far away.
pub(crate) const STALE: &str = "stale";

// The corrections of a batch: texts that clients wrote in place of a completion, each a ready group that counts
// like a completion. No policy sampled them, so they do not become stale and belong to no branch.

/// Reason of a dropped correction whose prompt or text has no token.
const UNSCORED: &str = "unscored";

/// One correction with everything that training needs from the ledger.
#[derive(Debug)]
pub(crate) struct BatchCorrection {
    pub(crate) group: GroupId,
    pub(crate) sample: SampleId,
    pub(crate) prompt_ids: Vec<TokenId>,
    /// The tokens of the text, the stop token included.
    pub(crate) ids: Vec<TokenId>,
    pub(crate) created: UnixMillis,
}

impl BatchCorrection {
    /// Reads a correction; the inner error is why it is not trained on.
    fn load(
        store: &Store,
        quarantined: &BTreeSet<String>,
        group: &Group,
    ) -> Result<Result<Self, &'static str>, StoreError> {
        let sample = group.members.first().map(|id| store.sample(*id)).transpose()?.flatten();
        let prompt = store.interaction(group.interaction)?;
        let Some((sample, prompt)) = sample.zip(prompt) else { return Ok(Err(ERASED)) };
        if sample.ids.is_empty() || prompt.prompt_ids.is_empty() {
            return Ok(Err(UNSCORED));
        }
        let rater = store.correction(sample.id)?.and_then(|row| row.key_id);
        if rater.is_some_and(|rater| include_rater(quarantined, &rater)) {
            return Ok(Err(QUARANTINED));
        }
        Ok(Ok(Self {
            group: group.id,
            sample: sample.id,
            prompt_ids: prompt.prompt_ids,
            ids: sample.ids,
            created: sample.created,
        }))
    }

    pub(crate) fn tokens(&self) -> usize {
        self.prompt_ids.len() + self.ids.len()
    }

    fn train_sample(&self) -> TrainSample {
        TrainSample {
            prompt_ids: self.prompt_ids.clone(),
            ids: self.ids.clone(),
            temperature: 1.0,
            version: u64::MAX,
            correction: true,
            ..TrainSample::default()
        }
    }
}

#[cfg(test)]
mod tests;
