//! Which groups and members reach a batch, and with which values.

use std::collections::BTreeSet;
use std::sync::Arc;

use prometheus::IntCounterVec;

use hone_core::metrics::Metrics;
use hone_core::testing::policy;
use hone_core::types::{
    Continuation, FinishReason, Group, GroupId, GroupState, Interaction, InteractionId,
    PolicyRecord, PolicyState, PolicyVersion, RewardSource, Sample, SampleId, SamplingParams,
    TokenId, UnixMillis,
};
use hone_reward::Routes;
use hone_store::{ERASED, Op, QUARANTINED, QuarantinedKey, Store};

use super::{MOST_WAITING, TrainBatch, VersionAges, build_batch, load_ready, unused_reason};
use crate::config::TrainConfig;
use crate::data::advantage::{Advantages, GroupRewards, PartRewards};
use crate::testing::{correction, group, interaction, open_store, rating, reward, routes, sample};

const ROUTES: &str = "[[route]]\nname = \"users\"\n\
    reward = [{ name = \"stars\", kind = \"feedback\", aggregate = \"mean\", weight = 2.0 }]\n\
    [[route]]\nname = \"graded\"\n\
    reward = [{ name = \"stars\", kind = \"regex\", pattern = \"a\", weight = 2.0 }]";

/// A ledger, from which batches are built.
struct Ledger {
    _dir: tempfile::TempDir,
    store: Store,
    routes: Routes,
    ages: VersionAges,
    rated_factor: usize,
    dropped: IntCounterVec,
}

impl Ledger {
    /// With versions below the newest one. `parents` has the parent of each version from 1 on.
    fn new(parents: &[u64]) -> Self {
        let records: Vec<PolicyRecord> =
            parents.iter().zip(1..).map(|(parent, version)| policy(version, *parent)).collect();
        let head = PolicyVersion(parents.len() as u64);
        let dir = tempfile::tempdir().unwrap();
        Self {
            store: open_store(dir.path()),
            _dir: dir,
            routes: routes(ROUTES),
            ages: VersionAges { lineage: Arc::new(records.iter().collect()), head, ahead: 0 },
            rated_factor: 1,
            dropped: Metrics::new().unwrap().train.dropped_groups,
        }
    }

    /// A batch of `min` to `max` samples, at most 4 versions old.
    fn build(&self, min: usize, max: usize) -> Option<TrainBatch> {
        self.build_within(4, 4, min, max)
    }

    /// The same with limits on the age of graded and rated samples.
    fn build_within(&self, graded: u64, rated: u64, min: usize, max: usize) -> Option<TrainBatch> {
        let config = TrainConfig {
            max_staleness: graded,
            feedback_max_staleness: rated,
            samples_per_step: max,
            rated_factor: self.rated_factor,
            ..TrainConfig::default()
        };
        build_batch(&self.store, &self.routes, &self.ages, &config, min, &self.dropped).unwrap()
    }

    fn commit(&self, ops: Vec<Op>) {
        self.store.commit_blocking(ops).unwrap();
    }

    fn state(&self, group: GroupId) -> GroupState {
        self.store.group(group).unwrap().unwrap().state
    }

    fn is_dropped(&self, group: GroupId, reason: &str) -> bool {
        self.state(group) == GroupState::Dropped(reason.to_owned())
    }

    /// Number of counted drops.
    fn drops(&self, reason: &str) -> u64 {
        self.dropped.with_label_values(&[reason]).get()
    }

    fn quarantine(&self, key: &str) {
        let (key_id, reason) = (key.to_owned(), "{}".to_owned());
        self.commit(vec![Op::Quarantine(QuarantinedKey { key_id, reason, since: 10 })]);
    }

    /// A ready group of one completion with `(API key, value)` ratings.
    fn rated(&self, ratings: &[(&str, f64)]) -> GroupId {
        self.rated_at(9, 0, ratings)
    }

    fn rated_at(&self, created: u64, version: u64, ratings: &[(&str, f64)]) -> GroupId {
        let id = InteractionId::new();
        let sample = sample(id, version);
        let group = group("users", "stars", std::slice::from_ref(&sample), created);
        let (key, mut ops) = (group.id, vec![prompt(id), Op::Sample(Box::new(sample))]);
        let ratings = ratings.iter().zip(3..);
        ops.extend(ratings.map(|((key, value), created)| rating(id, *value, Some(key), created)));
        ops.push(Op::Group(Box::new(group)));
        self.commit(ops);
        key
    }

    /// A ready group of graded completions with `(version, value)`; `change` is applied before it is
    /// recorded.
    fn graded(
        &self,
        created: u64,
        completions: &[(u64, Option<f64>)],
        change: impl FnOnce(&mut [Sample]),
    ) -> GroupId {
        let id = InteractionId::new();
        let mut samples: Vec<Sample> =
            completions.iter().map(|(version, _)| sample(id, *version)).collect();
        change(&mut samples);
        let group = group("graded", "stars", &samples, created);
        let (key, mut ops) = (group.id, vec![prompt(id)]);
        for (sample, (_, value)) in samples.into_iter().zip(completions) {
            let reward = reward(sample.id, "stars", *value, RewardSource::Grader);
            ops.extend([Op::Sample(Box::new(sample)), Op::Reward(Box::new(reward))]);
        }
        ops.push(Op::Group(Box::new(group)));
        self.commit(ops);
        key
    }

    /// The same with two members of reward 1.
    fn pair(&self, created: u64, versions: [u64; 2]) -> GroupId {
        self.graded(created, &versions.map(|version| (version, Some(1.0))), |_| {})
    }

    /// Records a completion of an unknown version, and its correction by a client.
    fn corrected(&self, key: &str, prompt: TokenId, created: UnixMillis) -> GroupId {
        let id = InteractionId::new();
        let asked =
            Interaction { key_id: Some(key.to_owned()), ..interaction(id, "", vec![prompt, 9]) };
        let greedy = Sample {
            params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            untrainable: Some("greedy".to_owned()),
            ..sample(id, 7)
        };
        self.commit(vec![
            Op::Interaction(Box::new(asked)),
            Op::Sample(Box::new(greedy)),
            correction(id, vec![prompt, 5, 2], Some(key), created),
        ]);
        self.store.groups_of(id).unwrap()[0].id
    }
}

fn prompt(id: InteractionId) -> Op {
    Op::Interaction(Box::new(interaction(id, "users", vec![1])))
}

fn ids(batch: Option<TrainBatch>) -> Option<Vec<GroupId>> {
    batch.map(|batch| batch.group_ids())
}

/// The input of `train_samples`.
fn advantages(values: &[&[Option<f64>]]) -> Advantages {
    let values = values.iter().map(|group| group.to_vec()).collect();
    Advantages { values, ..Advantages::default() }
}

#[test]
fn ratings_of_other_keys_on_the_same_sample_stay() {
    let ledger = Ledger::new(&[]);
    let both = ledger.rated(&[("alice", 4.0), ("mallory", 1.0)]);
    let alone = ledger.rated(&[("mallory", 1.0)]);
    let values = |batch: &TrainBatch| -> Vec<f64> {
        batch.members().map(|(_, member)| member.parts["stars"]).collect()
    };
    assert_eq!(values(&ledger.build(1, 8).unwrap()), [1.0, 2.5]);
    ledger.quarantine("mallory");
    let batch = ledger.build(1, 8).unwrap();
    assert_eq!((values(&batch), batch.group_ids()), (vec![4.0], vec![both]));
    assert_eq!(batch.groups[0].members[0].feedback["stars"].key_id.as_deref(), Some("alice"));
    assert!(ledger.is_dropped(alone, QUARANTINED));
    ledger.commit(vec![Op::Release("mallory".to_owned())]);
    assert_eq!(values(&ledger.build(1, 8).unwrap()), [2.5]);
    assert_eq!(ledger.store.ungrouped_feedback(u64::MAX, 9).unwrap().len(), 1, "it comes back");
}

#[test]
fn a_batch_takes_groups_until_it_has_enough_samples() {
    let ledger = Ledger::new(&[]);
    let ready = |created, count| ledger.graded(created, &[(0, Some(1.0))].repeat(count), |_| {});
    let (newest, oldest, middle) = (ready(30, 1), ready(10, 2), ready(20, 3));
    let build = |min, max| ids(ledger.build(min, max));
    assert_eq!(build(1, 2), Some(vec![oldest]));
    assert_eq!(build(1, 3), Some(vec![oldest, middle]), "the last group may exceed the number");
    assert_eq!(build(5, 3), Some(vec![oldest, middle]));
    assert_eq!(build(6, 3), None);
    assert_eq!(build(6, 6), Some(vec![oldest, middle, newest]));
    assert_eq!(build(7, 9), None);
    // Graded groups have half of the batch, and the newest ratings the other half.
    let rated: Vec<GroupId> =
        (0..40).map(|n| ledger.rated_at(40 + n, 0, &[("alice", 4.0)])).collect();
    assert_eq!(build(1, 4), Some(vec![oldest, rated[39], rated[38]]));
    // A step chooses from four times as many ratings as it computes.
    let ledger = Ledger { rated_factor: 4, ..ledger };
    let newest = [oldest].into_iter().chain(rated.into_iter().rev().take(14));
    assert_eq!(ids(ledger.build(1, 4)), Some(newest.collect()));
}

/// Ratings arrive faster than they are trained on.
#[test]
fn ratings_behind_many_newer_ones_are_dropped_and_counted() {
    let ledger = Ledger::new(&[]);
    let id = InteractionId::new();
    let graded = ledger.pair(1, [0, 0]);
    let mut ops = vec![prompt(id)];
    let members: Vec<_> = (0..=MOST_WAITING as u64 + 1).map(|n| (n, sample(id, 0))).collect();
    let mut groups = Vec::new();
    for (n, sample) in members {
        let group = group("users", "stars", std::slice::from_ref(&sample), 10 + n);
        groups.push(group.id);
        ops.extend([Op::Sample(Box::new(sample)), Op::Group(Box::new(group))]);
    }
    ledger.commit(ops);
    ledger.build(1, 8);
    assert_eq!(ledger.drops("backlog"), 2);
    assert!(groups[..2].iter().all(|id| ledger.is_dropped(*id, "backlog")));
    assert_eq!([graded, groups[2]].map(|id| ledger.state(id)), [const { GroupState::Ready }; 2]);
}

/// A step on few ratings is worth its time, one on few graded completions is not.
#[test]
fn a_quarter_of_a_batch_is_enough_if_it_is_rated() {
    let ledger = Ledger { rated_factor: 4, ..Ledger::new(&[]) };
    ledger.graded(1, &[(0, Some(1.0)); 4], |_| {});
    let rated: Vec<GroupId> =
        (0..3).map(|n| ledger.rated_at(40 + n, 0, &[("alice", 4.0)])).collect();
    assert_eq!(ids(ledger.build(16, 16)), None);
    let last = ledger.rated_at(50, 0, &[("alice", 4.0)]);
    let batch = ids(ledger.build(16, 16)).unwrap();
    assert_eq!(batch[1..], [last, rated[2], rated[1], rated[0]]);
}

#[test]
fn members_that_cannot_be_trained_on_do_not_block_a_batch() {
    let ledger = Ledger::new(&[]);
    // Four recorded members, of which one has a value.
    let partly = |created| {
        let values = [Some(1.0), None, None, None];
        ledger.graded(created, &values.map(|value| (0, value)), |_| {})
    };
    let mut groups = vec![partly(1), partly(2), partly(3)];
    assert!(ledger.build(4, 4).is_none());
    groups.push(partly(4));
    assert_eq!(ids(ledger.build(4, 4)), Some(groups));
}

#[test]
fn groups_beyond_the_staleness_limit_are_dropped() {
    let ledger = Ledger::new(&[0, 1, 2, 3, 4]);
    let stale = ledger.pair(1, [2, 5]);
    let (oldest, newer) = (ledger.pair(2, [3, 5]), ledger.pair(3, [5, 5]));
    let batch = ledger.build_within(2, 2, 1, 8).unwrap();
    assert_eq!(batch.group_ids(), [oldest, newer]);
    assert_eq!(batch.staleness(&ledger.ages), 2.0 / 4.0);
    assert!(ledger.is_dropped(stale, "stale"));
    assert_eq!(ledger.state(oldest), GroupState::Ready);
    assert_eq!(TrainBatch::default().staleness(&ledger.ages), 0.0);
}

#[test]
fn groups_of_an_abandoned_branch_are_dropped() {
    // Version 1 was activated again after version 3; version 4 descends from it.
    let mut ledger = Ledger::new(&[0, 1, 2, 1]);
    ledger.ages.ahead = 1;
    let (abandoned, mixed) = (ledger.pair(1, [2, 3]), ledger.pair(2, [1, 3]));
    let (activated, newest) = (ledger.pair(3, [1, 1]), ledger.pair(4, [4, 4]));
    let batch = ledger.build_within(2, 2, 1, 8).unwrap();
    assert_eq!(ledger.drops("abandoned"), 2);
    assert_eq!(batch.group_ids(), [activated, newest]);
    assert_eq!(batch.staleness(&ledger.ages), 1.5, "a version is being published");
    assert!([abandoned, mixed].iter().all(|group| ledger.is_dropped(*group, "abandoned")));
}

/// Version 2 was a canary that users disliked, and version 3 is the next one after version 1.
#[test]
fn ratings_of_a_withdrawn_version_are_late_feedback() {
    let mut ledger = Ledger::new(&[0, 1, 1]);
    let disliked = PolicyRecord { state: PolicyState::RolledBack, ..policy(2, 1) };
    Arc::make_mut(&mut ledger.ages.lineage).add(&disliked);
    let rated = ledger.rated_at(9, 2, &[("alice", 1.0)]);
    let batch = ledger.build(1, 8).unwrap();
    assert_eq!(batch.group_ids(), [rated]);
    assert!(batch.members().all(|(_, member)| member.late));
    assert_eq!(batch.staleness(&ledger.ages), 2.0);
    // A graded group keeps a member of the canary, and loses one of a version that an operator abandoned.
    let graded = ledger.graded(10, &[(2, Some(1.0)), (1, Some(0.0)), (3, Some(0.0))], |_| {});
    let members = |batch: TrainBatch| -> Vec<_> {
        batch.groups[0].members.iter().map(|m| (m.sample.version.0, m.late)).collect()
    };
    assert_eq!(members(ledger.build(1, 8).unwrap()), [(2, true), (1, false), (3, false)]);
    Arc::make_mut(&mut ledger.ages.lineage).add(&policy(2, 1));
    assert_eq!(members(ledger.build(1, 8).unwrap()), [(1, false), (3, false)]);
    assert_eq!(ledger.store.group(graded).unwrap().unwrap().members.len(), 2);
    assert!(ledger.is_dropped(rated, "abandoned"));
}

#[test]
fn rated_completions_that_are_too_old_leave_their_group() {
    // Version 1 was activated again after version 3; version 4 descends from it.
    let ledger = Ledger::new(&[0, 1, 2, 1]);
    let rated = |versions: &[u64]| {
        let (mut samples, mut ops) = (Vec::new(), Vec::new());
        for (version, created) in versions.iter().zip(3..) {
            let id = InteractionId::new();
            let sample = sample(id, *version);
            ops.extend([prompt(id), Op::Sample(Box::new(sample.clone()))]);
            ops.push(rating(id, 1.0, None, created));
            samples.push(sample);
        }
        let group = group("users", "stars", &samples, 9);
        let id = group.id;
        ops.push(Op::Group(Box::new(group)));
        ledger.commit(ops);
        id
    };
    let (mixed, gone) = (rated(&[0, 1, 3, 4]), rated(&[3, 2]));
    let batch = ledger.build_within(1, 1, 1, 8).unwrap();
    assert_eq!(batch.group_ids(), [mixed]);
    let versions: Vec<u64> = batch.members().map(|(_, m)| m.sample.version.0).collect();
    assert_eq!(versions, [1, 4]);
    assert_eq!(["stale", "abandoned"].map(|why| ledger.drops(why)), [1, 2]);
    assert_eq!(ledger.store.group(mixed).unwrap().unwrap().members.len(), 2);
    assert!(ledger.is_dropped(gone, "abandoned"));
}

#[test]
fn late_ratings_have_their_own_limit() {
    let ledger = Ledger::new(&[0, 1, 2, 3]);
    let late = ledger.rated(&[("alice", 4.0)]);
    let grades = ledger.graded(10, &[(2, Some(1.0)), (3, Some(0.0))], |_| {});
    let fresh = ledger.graded(11, &[(3, Some(1.0))], |_| {});
    let batch = ledger.build_within(1, 4, 1, 8).unwrap();
    assert_eq!(batch.group_ids(), [fresh, late], "graded groups come first");
    assert!(ledger.is_dropped(grades, "stale"));
    let advantages = advantages(&[&[Some(1.0)], &[Some(1.0)]]);
    let samples = batch.train_samples(&advantages);
    assert_eq!(samples.iter().map(|s| s.late).collect::<Vec<_>>(), [false, true]);
    // The trainer finds that the policy has moved too far away from the late sample.
    let (ops, left) = batch.without(&advantages, &[1]);
    assert_eq!(left, [fresh]);
    ledger.commit(ops);
    assert!(ledger.is_dropped(late, "stale"));
    let again = ledger.rated(&[("alice", 4.0)]);
    ledger.build_within(1, 3, 1, 8);
    assert!(ledger.is_dropped(again, "stale"));
}

#[test]
fn a_member_with_another_prompt_is_left_out() {
    let ledger = Ledger::new(&[]);
    let other = InteractionId::new();
    let asked = interaction(other, "users", vec![1, 2]);
    ledger.commit(vec![Op::Interaction(Box::new(asked))]);
    let values = [(0, Some(1.0)), (0, Some(0.5))];
    ledger.graded(1, &values, |samples| samples[1].interaction = other);
    assert_eq!(ledger.build(1, 8).unwrap().members().count(), 1);
}

#[test]
fn only_trainable_members_with_a_value_reach_a_batch() {
    let ledger = Ledger::new(&[]);
    let masked = |samples: &mut [Sample]| {
        samples[0].untrainable = Some("edited".to_owned());
        samples[1].ids.clear();
    };
    let unscored = ledger.graded(1, &[(0, Some(1.0)), (0, Some(1.0)), (0, None)], masked);
    assert!(ledger.build(1, 8).is_none());
    assert!(ledger.is_dropped(unscored, "unscored"));
    let values = [(0, Some(1.0)), (0, Some(1.0)), (0, None), (0, Some(0.25)), (0, Some(0.5))];
    let partly = ledger.graded(2, &values, |samples| {
        masked(samples);
        samples[3].ids = vec![7, 8];
        samples[3].logprobs = vec![-1.0, -2.0];
        samples[3].finish = FinishReason::Cancelled;
        samples[4].finish = FinishReason::Length;
        samples[4].kept = vec![0.5];
    });
    let rated = ledger.rated(&[("alice", 4.0)]);
    let batch = ledger.build(1, 8).unwrap();
    assert_eq!(batch.group_ids(), [partly, rated]);
    assert_eq!(batch.lengths().collect::<Vec<_>>(), [(2, false), (1, true), (1, false)]);
    assert_eq!(batch.feedback_times().collect::<Vec<_>>(), [3], "grades are not feedback");
    let rewards = |route: &str, values: &[f64]| GroupRewards {
        is_rated: route == "users",
        route: route.to_owned(),
        members: values.len(),
        parts: vec![PartRewards {
            name: "stars".to_owned(),
            weight: 2.0,
            values: values.iter().copied().map(Some).collect(),
            cap_weights: vec![1.0; values.len()],
            raters: values.iter().map(|_| (route == "users").then(|| "alice".to_owned())).collect(),
        }],
        conversations: Vec::new(),
    };
    let found = batch.rewards().into_iter();
    let found: Vec<_> =
        found.map(|row| GroupRewards { conversations: Vec::new(), ..row }).collect();
    assert_eq!(found, [rewards("graded", &[0.25, 0.5]), rewards("users", &[4.0])]);
    // What graders and users think is never one mean.
    assert_eq!(batch.mean_rewards().collect::<Vec<_>>(), [("graded", 0.75), ("rated", 8.0)]);
    // A member without an advantage has no sample.
    let some = advantages(&[&[None, Some(0.5)], &[Some(-1.0)]]);
    let samples = batch.train_samples(&some);
    let fields: Vec<_> = samples
        .iter()
        .map(|s| (s.prompt_ids.len(), s.ids.len(), s.advantage, s.truncated))
        .collect();
    assert_eq!(fields, [(1, 1, 0.5, true), (1, 1, -1.0, false)]);
    let logprobs: Vec<f32> = samples.iter().flat_map(|s| s.logprobs.clone()).collect();
    assert_eq!(logprobs, [-1.0 + 0.5_f32.ln(), -1.0], "before top-p, top-k and min-p");
    let cancelled = batch.train_samples(&advantages(&[&[Some(0.5), None], &[None]]));
    assert!(cancelled[0].truncated, "a cancelled completion is cut too");
    assert_eq!(batch.group_of(&some, 0), [partly]);
    assert_eq!(batch.group_of(&some, 1), [rated]);
    assert!(batch.group_of(&some, 2).is_empty());
}

#[test]
fn a_conversation_is_trained_on_as_a_whole() {
    let ledger = Ledger::new(&[]);
    let [first, alone, third, fourth] =
        [1.0, 2.0, 3.0, 4.0].map(|value| ledger.rated(&[("alice", value)]));
    let asked = |group: GroupId| ledger.store.group(group).unwrap().unwrap().interaction;
    let conversation = asked(first);
    for turn in [third, fourth] {
        let mut row = ledger.store.interaction(asked(turn)).unwrap().unwrap();
        row.continues = Some(Continuation {
            conversation,
            interaction: conversation,
            choice: 0,
            prefix_tokens: 2,
            edited: false,
        });
        ledger.commit(vec![Op::Interaction(Box::new(row))]);
    }
    assert_eq!(ids(ledger.build(1, 2)), Some(vec![fourth, third, first]));
    assert_eq!(ledger.state(alone), GroupState::Ready);
}

#[test]
fn erased_members_are_not_counted_as_unscored() {
    let ledger = Ledger::new(&[]);
    let (first, second) = (InteractionId::new(), InteractionId::new());
    let samples = [sample(first, 0), sample(second, 0)];
    let group: Group = group("graded", "stars", &samples, 1);
    let mut ops = vec![prompt(first), prompt(second)];
    ops.extend(samples.iter().map(|sample| Op::Sample(Box::new(sample.clone()))));
    for sample in &samples {
        let reward = reward(sample.id, "stars", Some(1.0), RewardSource::Grader);
        ops.push(Op::Reward(Box::new(reward)));
    }
    ops.push(Op::Group(Box::new(group.clone())));
    ledger.commit(ops);
    // The trainer has read the group before.
    let (store, routes) = (&ledger.store, &ledger.routes);
    let read = || load_ready(store, routes, &BTreeSet::new(), group.clone()).unwrap();
    ledger.commit(vec![Op::Erase(first, 9)]);
    let loaded = read();
    assert_eq!(loaded.group.interaction, second);
    let members: Vec<SampleId> = loaded.members.iter().map(|member| member.sample.id).collect();
    assert_eq!(members, [samples[1].id], "the other one is trained on");
    ledger.commit(vec![Op::Erase(second, 9)]);
    let loaded = read();
    assert!(loaded.members.is_empty());
    assert_eq!(unused_reason(store, &loaded).unwrap(), ERASED);
}

#[test]
fn corrections_fill_a_batch_whatever_the_version_of_the_completion() {
    let ledger = Ledger::new(&[]);
    let first = ledger.corrected("alice", 3, 10);
    let unwanted = ledger.corrected("mallory", 4, 20);
    ledger.quarantine("mallory");
    let build = |wanted| ledger.build_within(0, 0, wanted, 2);
    assert!(build(3).is_none(), "two are not enough");
    assert!(build(2).is_none(), "one of two is quarantined");
    assert!(ledger.is_dropped(unwanted, QUARANTINED));
    assert_eq!(ledger.drops(QUARANTINED), 1);
    let second = ledger.corrected("bob", 6, 30);
    let batch = build(2).unwrap();
    assert_eq!((batch.sample_count(), batch.members().count()), (2, 0));
    assert_eq!(batch.group_ids(), [first, second]);
    assert_eq!(batch.feedback_times().collect::<Vec<_>>(), [10, 30]);
    assert_eq!(batch.staleness(&ledger.ages), 0.0);
    let none = Advantages::default();
    let samples = batch.train_samples(&none);
    assert!(samples.iter().all(|s| s.correction && s.temperature == 1.0 && !s.late));
    assert_eq!((&samples[0].prompt_ids[..], &samples[0].ids[..]), (&[3, 9][..], &[3, 5, 2][..]));
    assert_eq!((batch.group_of(&none, 1), batch.group_of(&none, 2)), (vec![second], vec![]));
    assert_eq!(batch.without(&none, &[]).1, [first, second], "they are never stale");
    assert_eq!(batch.corrections[0].tokens(), 5);
}
