//! Which groups and members reach a batch, and with which values.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use prometheus::IntCounterVec;

use hone_core::metrics::Metrics;
use hone_core::testing::policy;
use hone_core::types::{
    Continuation, FinishReason, Group, GroupId, GroupState, Interaction, InteractionId,
    PolicyRecord, PolicyVersion, PromptSource, Reward, RewardId, RewardSource, Sample, SampleId,
    SampleOrigin, SamplingParams,
};
use hone_reward::feedback::{Aggregate, aggregator};
use hone_store::{ERASED, FeedbackEntry, Op, QUARANTINED, QuarantinedKey, Store, StoreConfig};

use super::{StalenessLimits, TrainBatch, VersionAges, build_batch, load_ready, unused_reason};
use crate::data::advantage::{Advantages, GroupRewards, PartRewards};

const ROUTES: &str = "[[route]]\nname = \"users\"\n\
    reward = [{ name = \"stars\", kind = \"feedback\", aggregate = \"mean\", weight = 2.0 }]\n\
    [[route]]\nname = \"graded\"\n\
    reward = [{ name = \"stars\", kind = \"regex\", pattern = \"a\", weight = 2.0 }]";

fn interaction(id: InteractionId) -> Op {
    Op::Interaction(Box::new(Interaction {
        id,
        created: 1,
        source: PromptSource::Live,
        route: "users".to_owned(),
        model: "default".to_owned(),
        endpoint: Default::default(),
        key_id: None,
        messages: Vec::new(),
        metadata: BTreeMap::new(),
        params: SamplingParams::default(),
        prompt_ids: vec![1],
        template_hash: String::new(),
        stop: Vec::new(),
        held_out: false,
        chat: Default::default(),
        grammar: None,
        continues: None,
    }))
}

fn sample(interaction: InteractionId, version: u64) -> Sample {
    Sample {
        id: SampleId::new(),
        interaction,
        choice: 0,
        origin: SampleOrigin::Served,
        created: 2,
        ids: vec![1],
        logprobs: vec![-1.0],
        kept: Vec::new(),
        forced: Vec::new(),
        text: String::new(),
        finish: FinishReason::Stop,
        version: PolicyVersion(version),
        params: SamplingParams::default(),
        untrainable: None,
    }
}

fn group(members: &[Sample], created: u64) -> Group {
    Group {
        id: GroupId::new(),
        interaction: members[0].interaction,
        route: "users".to_owned(),
        members: members.iter().map(|sample| sample.id).collect(),
        parts: vec!["stars".to_owned()],
        oldest_version: members.iter().map(|sample| sample.version).min().unwrap(),
        created,
        state: GroupState::Ready,
    }
}

/// A ready group of one completion with `(API key, value)` ratings.
fn rated(store: &Store, ratings: &[(&str, f64)]) -> GroupId {
    let id = InteractionId::new();
    let sample = sample(id, 0);
    let group = group(std::slice::from_ref(&sample), 9);
    let (key, mut ops) = (group.id, vec![interaction(id), Op::Sample(Box::new(sample))]);
    ops.extend(ratings.iter().zip(3..).map(|((key, value), created)| {
        Op::Feedback(Box::new(FeedbackEntry {
            interaction: id,
            choice: 0,
            name: "stars".to_owned(),
            value: Some(*value),
            comment: None,
            idempotency_key: None,
            key_id: Some((*key).to_owned()),
            created,
            join: aggregator(Aggregate::Mean),
        }))
    }));
    ops.push(Op::Group(Box::new(group)));
    store.commit_blocking(ops).unwrap();
    key
}

/// A ready group of graded completions with `(version, value)`; `change` is applied before it is
/// recorded.
fn graded(
    store: &Store,
    created: u64,
    completions: &[(u64, Option<f64>)],
    change: impl FnOnce(&mut [Sample]),
) -> GroupId {
    let id = InteractionId::new();
    let mut samples: Vec<Sample> =
        completions.iter().map(|(version, _)| sample(id, *version)).collect();
    change(&mut samples);
    let group = Group { route: "graded".to_owned(), ..group(&samples, created) };
    let (key, mut ops) = (group.id, vec![interaction(id)]);
    for (sample, (_, value)) in samples.into_iter().zip(completions) {
        let reward = Reward {
            id: RewardId::new(),
            sample: sample.id,
            name: "stars".to_owned(),
            value: *value,
            source: RewardSource::Grader,
            created: 7,
            idempotency_key: None,
            comment: None,
            key_id: None,
        };
        ops.extend([Op::Sample(Box::new(sample)), Op::Reward(Box::new(reward))]);
    }
    ops.push(Op::Group(Box::new(group)));
    store.commit_blocking(ops).unwrap();
    key
}

/// The ages of versions below the newest one. `parents` has the parent of each version from 1 on.
fn ages(parents: &[u64]) -> VersionAges {
    let records: Vec<PolicyRecord> =
        parents.iter().zip(1..).map(|(parent, version)| policy(version, *parent)).collect();
    let head = PolicyVersion(parents.len() as u64);
    VersionAges { lineage: Arc::new(records.iter().collect()), head, ahead: 0 }
}

/// The same limit for graded and rated groups.
fn limits(limit: u64) -> StalenessLimits {
    StalenessLimits { graded: limit, rated: limit }
}

fn counter() -> IntCounterVec {
    Metrics::new().unwrap().train.dropped_groups
}

fn open(dir: &Path) -> Store {
    let metrics = Arc::new(Metrics::new().unwrap());
    Store::open(&dir.join("ledger.redb"), &StoreConfig::default(), metrics).unwrap()
}

#[test]
fn ratings_of_other_keys_on_the_same_sample_stay() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let build = || build_batch(&store, &routes, &ages(&[]), limits(4), 1, 8, &counter()).unwrap();
    let both = rated(&store, &[("alice", 4.0), ("mallory", 1.0)]);
    let alone = rated(&store, &[("mallory", 1.0)]);
    let values = |batch: &TrainBatch| -> Vec<f64> {
        batch.members().map(|(_, member)| member.parts["stars"]).collect()
    };
    assert_eq!(values(&build().unwrap()), [2.5, 1.0]);
    let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: "{}".to_owned(), since: 10 };
    store.commit_blocking(vec![Op::Quarantine(row)]).unwrap();
    let batch = build().unwrap();
    assert_eq!((values(&batch), batch.group_ids()), (vec![4.0], vec![both]));
    assert_eq!(batch.groups[0].members[0].feedback["stars"].key_id.as_deref(), Some("alice"));
    let state = store.group(alone).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped(QUARANTINED.to_owned()));
    store.commit_blocking(vec![Op::Release("mallory".to_owned())]).unwrap();
    assert_eq!(values(&build().unwrap()), [2.5]);
    assert_eq!(store.ungrouped_feedback(u64::MAX, 9).unwrap().len(), 1, "it comes back");
}

#[test]
fn a_batch_takes_the_oldest_groups_until_it_has_enough_samples() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let ready = |created, count| graded(&store, created, &[(0, Some(1.0))].repeat(count), |_| {});
    let (newest, oldest, middle) = (ready(30, 1), ready(10, 2), ready(20, 3));
    let build = |min, max| {
        let batch =
            build_batch(&store, &routes, &ages(&[]), limits(4), min, max, &counter()).unwrap();
        batch.map(|batch| batch.group_ids())
    };
    assert_eq!(build(1, 2), Some(vec![oldest]));
    assert_eq!(build(1, 3), Some(vec![oldest, middle]), "the last group may exceed the number");
    assert_eq!(build(5, 3), Some(vec![oldest, middle]));
    assert_eq!(build(6, 3), None);
    assert_eq!(build(6, 6), Some(vec![oldest, middle, newest]));
    assert_eq!(build(7, 9), None);
    // Graded groups have half of the batch although these ratings are older.
    let older: Vec<GroupId> = (0..40).map(|_| rated(&store, &[("alice", 4.0)])).collect();
    let found = build(1, 4).unwrap();
    assert_eq!((found[0], found.len()), (oldest, 3));
    assert!(found[1..].iter().all(|id| older.contains(id)));
}

#[test]
fn members_that_cannot_be_trained_on_do_not_block_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let build = || {
        build_batch(&store, &routes, &ages(&[]), limits(4), 4, 4, &counter())
            .unwrap()
            .map(|b| b.group_ids())
    };
    // Four recorded members, of which one has a value.
    let partly = |created| {
        let values = [Some(1.0), None, None, None];
        graded(&store, created, &values.map(|value| (0, value)), |_| {})
    };
    let mut groups = vec![partly(1), partly(2), partly(3)];
    assert_eq!(build(), None);
    groups.push(partly(4));
    assert_eq!(build(), Some(groups));
}

#[test]
fn groups_beyond_the_staleness_limit_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let ready = |created, versions: [u64; 2]| {
        graded(&store, created, &versions.map(|version| (version, Some(1.0))), |_| {})
    };
    let (stale, oldest, newer) = (ready(1, [2, 5]), ready(2, [3, 5]), ready(3, [5, 5]));
    let batch = build_batch(&store, &routes, &ages(&[0, 1, 2, 3, 4]), limits(2), 1, 8, &counter())
        .unwrap()
        .unwrap();
    assert_eq!(batch.group_ids(), [oldest, newer]);
    assert_eq!(batch.staleness(&ages(&[0, 1, 2, 3, 4])), 2.0 / 4.0);
    let state = store.group(stale).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("stale".to_owned()));
    assert_eq!(store.group(oldest).unwrap().unwrap().state, GroupState::Ready);
}

#[test]
fn groups_of_an_abandoned_branch_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let ready = |created, versions: [u64; 2]| {
        graded(&store, created, &versions.map(|version| (version, Some(1.0))), |_| {})
    };
    // Version 1 was activated again after version 3; version 4 descends from it.
    let ages = VersionAges { ahead: 1, ..ages(&[0, 1, 2, 1]) };
    let (abandoned, mixed) = (ready(1, [2, 3]), ready(2, [1, 3]));
    let (activated, newest) = (ready(3, [1, 1]), ready(4, [4, 4]));
    let dropped = counter();
    let batch = build_batch(&store, &routes, &ages, limits(2), 1, 8, &dropped).unwrap().unwrap();
    assert_eq!(dropped.with_label_values(&["abandoned"]).get(), 2);
    assert_eq!(batch.group_ids(), [activated, newest]);
    assert_eq!(batch.staleness(&ages), 1.5, "a version is being published");
    for group in [abandoned, mixed] {
        let state = store.group(group).unwrap().unwrap().state;
        assert_eq!(state, GroupState::Dropped("abandoned".to_owned()));
    }
}

#[test]
fn rated_completions_that_are_too_old_leave_their_group() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    // Version 1 was activated again after version 3; version 4 descends from it.
    let ages = ages(&[0, 1, 2, 1]);
    let rated = |versions: &[u64]| {
        let mut samples = Vec::new();
        let mut ops = Vec::new();
        for (version, created) in versions.iter().zip(3..) {
            let id = InteractionId::new();
            let sample = sample(id, *version);
            ops.extend([interaction(id), Op::Sample(Box::new(sample.clone()))]);
            ops.push(Op::Feedback(Box::new(FeedbackEntry {
                interaction: id,
                choice: 0,
                name: "stars".to_owned(),
                value: Some(1.0),
                comment: None,
                idempotency_key: None,
                key_id: None,
                created,
                join: aggregator(Aggregate::Last),
            })));
            samples.push(sample);
        }
        let group = group(&samples, 9);
        let id = group.id;
        ops.push(Op::Group(Box::new(group)));
        store.commit_blocking(ops).unwrap();
        id
    };
    let (mixed, gone) = (rated(&[0, 1, 3, 4]), rated(&[3, 2]));
    let dropped = counter();
    let batch = build_batch(&store, &routes, &ages, limits(1), 1, 8, &dropped).unwrap().unwrap();
    assert_eq!(batch.group_ids(), [mixed]);
    let versions: Vec<u64> = batch.members().map(|(_, m)| m.sample.version.0).collect();
    assert_eq!(versions, [1, 4]);
    let counts = ["stale", "abandoned"].map(|why| dropped.with_label_values(&[why]).get());
    assert_eq!(counts, [1, 2]);
    assert_eq!(store.group(mixed).unwrap().unwrap().members.len(), 2);
    let state = store.group(gone).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("abandoned".to_owned()));
}

#[test]
fn late_ratings_have_their_own_limit() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let ages = ages(&[0, 1, 2, 3]);
    let limits = StalenessLimits { graded: 1, rated: 4 };
    let late = rated(&store, &[("alice", 4.0)]);
    let grades = graded(&store, 10, &[(2, Some(1.0)), (3, Some(0.0))], |_| {});
    let fresh = graded(&store, 11, &[(3, Some(1.0))], |_| {});
    let batch = build_batch(&store, &routes, &ages, limits, 1, 8, &counter()).unwrap().unwrap();
    assert_eq!(batch.group_ids(), [fresh, late], "graded groups come first");
    let state = store.group(grades).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("stale".to_owned()));
    let values = vec![vec![Some(1.0)], vec![Some(1.0)]];
    let advantages = Advantages { values, ..Advantages::default() };
    let samples = batch.train_samples(&advantages);
    assert_eq!(samples.iter().map(|s| s.late).collect::<Vec<_>>(), [false, true]);
    // The trainer finds that the policy has moved too far away from the late sample.
    let (ops, left) = batch.without(&advantages, &[1]);
    assert_eq!(left, [fresh]);
    store.commit_blocking(ops).unwrap();
    let state = store.group(late).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("stale".to_owned()));
    let beyond = StalenessLimits { graded: 1, rated: 3 };
    let again = rated(&store, &[("alice", 4.0)]);
    build_batch(&store, &routes, &ages, beyond, 1, 8, &counter()).unwrap();
    let state = store.group(again).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("stale".to_owned()));
}

#[test]
fn a_member_with_another_prompt_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let other = InteractionId::new();
    let Op::Interaction(mut asked) = interaction(other) else { unreachable!() };
    asked.prompt_ids.push(2);
    store.commit_blocking(vec![Op::Interaction(asked)]).unwrap();
    let values = [(0, Some(1.0)), (0, Some(0.5))];
    graded(&store, 1, &values, |samples| samples[1].interaction = other);
    let batch =
        build_batch(&store, &routes, &ages(&[]), limits(4), 1, 8, &counter()).unwrap().unwrap();
    assert_eq!(batch.members().count(), 1);
}

#[test]
fn only_trainable_members_with_a_value_reach_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let build = || build_batch(&store, &routes, &ages(&[]), limits(4), 1, 8, &counter()).unwrap();
    let masked = |samples: &mut [Sample]| {
        samples[0].untrainable = Some("edited".to_owned());
        samples[1].ids.clear();
    };
    let unscored = graded(&store, 1, &[(0, Some(1.0)), (0, Some(1.0)), (0, None)], masked);
    assert!(build().is_none());
    let state = store.group(unscored).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("unscored".to_owned()));
    let values = [(0, Some(1.0)), (0, Some(1.0)), (0, None), (0, Some(0.25)), (0, Some(0.5))];
    let partly = graded(&store, 2, &values, |samples| {
        masked(samples);
        samples[3].ids = vec![7, 8];
        samples[3].logprobs = vec![-1.0, -2.0];
        samples[3].finish = FinishReason::Cancelled;
        samples[4].finish = FinishReason::Length;
        samples[4].kept = vec![0.5];
    });
    let rated = rated(&store, &[("alice", 4.0)]);
    let batch = build().unwrap();
    assert_eq!(batch.group_ids(), [partly, rated]);
    assert_eq!(batch.lengths().collect::<Vec<_>>(), [(2, false), (1, true), (1, false)]);
    assert_eq!(batch.feedback_times().collect::<Vec<_>>(), [3], "grades are not feedback");
    let rewards = |route: &str, values: &[f64]| GroupRewards {
        route: route.to_owned(),
        members: values.len(),
        parts: vec![PartRewards {
            name: "stars".to_owned(),
            weight: 2.0,
            values: values.iter().copied().map(Some).collect(),
            cap_weights: vec![1.0; values.len()],
        }],
        conversations: Vec::new(),
    };
    let found = batch.rewards().into_iter();
    let found: Vec<_> =
        found.map(|row| GroupRewards { conversations: Vec::new(), ..row }).collect();
    assert_eq!(found, [rewards("graded", &[0.25, 0.5]), rewards("users", &[4.0])]);
    // A member without an advantage has no sample.
    let values = vec![vec![None, Some(0.5)], vec![Some(-1.0)]];
    let advantages = Advantages { values, ..Advantages::default() };
    let samples = batch.train_samples(&advantages);
    let fields: Vec<_> = samples
        .iter()
        .map(|s| (s.prompt_ids.len(), s.ids.len(), s.advantage, s.truncated))
        .collect();
    assert_eq!(fields, [(1, 1, 0.5, true), (1, 1, -1.0, false)]);
    let logprobs: Vec<f32> = samples.iter().flat_map(|s| s.logprobs.clone()).collect();
    assert_eq!(logprobs, [-1.0 + 0.5_f32.ln(), -1.0], "before top-p, top-k and min-p");
    let values = vec![vec![Some(0.5), None], vec![None]];
    let cancelled = batch.train_samples(&Advantages { values, ..Advantages::default() });
    assert!(cancelled[0].truncated, "a cancelled completion is cut too");
    assert_eq!(batch.group_of(&advantages, 0), [partly]);
    assert_eq!(batch.group_of(&advantages, 1), [rated]);
    assert!(batch.group_of(&advantages, 2).is_empty());
}

#[test]
fn a_conversation_is_trained_on_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let (first, alone) = (rated(&store, &[("alice", 1.0)]), rated(&store, &[("alice", 2.0)]));
    let later = [rated(&store, &[("alice", 3.0)]), rated(&store, &[("alice", 4.0)])];
    let prompt = |group: GroupId| store.group(group).unwrap().unwrap().interaction;
    let conversation = prompt(first);
    for turn in later {
        let mut row = store.interaction(prompt(turn)).unwrap().unwrap();
        row.continues = Some(Continuation {
            conversation,
            interaction: conversation,
            choice: 0,
            prefix_tokens: 2,
            edited: false,
        });
        store.commit_blocking(vec![Op::Interaction(Box::new(row))]).unwrap();
    }
    let batch = build_batch(&store, &routes, &ages(&[]), limits(4), 1, 2, &counter()).unwrap();
    assert_eq!(batch.unwrap().group_ids(), [first, alone, later[0], later[1]]);
}

#[test]
fn erased_members_are_not_counted_as_unscored() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let (first, second) = (InteractionId::new(), InteractionId::new());
    let samples = [sample(first, 0), sample(second, 0)];
    let reward = |sample: &Sample| {
        Op::Reward(Box::new(Reward {
            id: RewardId::new(),
            sample: sample.id,
            name: "stars".to_owned(),
            value: Some(1.0),
            source: RewardSource::Grader,
            created: 7,
            idempotency_key: None,
            comment: None,
            key_id: None,
        }))
    };
    let mut ops = vec![interaction(first), interaction(second)];
    ops.extend(samples.iter().map(|sample| Op::Sample(Box::new(sample.clone()))));
    ops.extend(samples.iter().map(reward));
    let group = Group { route: "graded".to_owned(), ..group(&samples, 1) };
    ops.push(Op::Group(Box::new(group.clone())));
    store.commit_blocking(ops).unwrap();
    // The trainer has read the group before.
    let read = || load_ready(&store, &routes, &BTreeSet::new(), group.clone()).unwrap();
    store.commit_blocking(vec![Op::Erase(first, 9)]).unwrap();
    let loaded = read();
    assert_eq!(loaded.group.interaction, second);
    let members: Vec<SampleId> = loaded.members.iter().map(|member| member.sample.id).collect();
    assert_eq!(members, [samples[1].id], "the other one is trained on");
    store.commit_blocking(vec![Op::Erase(second, 9)]).unwrap();
    let loaded = read();
    assert!(loaded.members.is_empty());
    assert_eq!(unused_reason(&store, &loaded).unwrap(), ERASED);
}

#[test]
fn a_batch_without_members_has_a_staleness_of_zero() {
    assert_eq!(TrainBatch::default().staleness(&ages(&[])), 0.0);
}

mod corrections {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use hone_core::metrics::Metrics;
    use hone_core::types::{
        FinishReason, GroupState, Interaction, InteractionId, Lineage, PolicyVersion, PromptSource,
        Sample, SampleOrigin, SamplingParams,
    };
    use hone_store::{CorrectionEntry, Op, QuarantinedKey, StoreConfig};

    use super::super::*;
    use crate::data::advantage::Advantages;
    use crate::data::batch_builder::{StalenessLimits, TrainBatch, VersionAges, build_batch};

    /// Records a completion of an unknown version, and its correction by a client.
    fn corrected(store: &Store, key: &str, prompt: TokenId, created: UnixMillis) -> GroupId {
        let interaction = InteractionId::new();
        let ops = vec![
            Op::Interaction(Box::new(Interaction {
                id: interaction,
                created,
                source: PromptSource::Live,
                route: String::new(),
                model: "default".to_owned(),
                endpoint: Default::default(),
                key_id: Some(key.to_owned()),
                messages: Vec::new(),
                metadata: BTreeMap::new(),
                params: SamplingParams::default(),
                prompt_ids: vec![prompt, 9],
                template_hash: String::new(),
                stop: Vec::new(),
                held_out: false,
                chat: Default::default(),
                grammar: None,
                continues: None,
            })),
            Op::Sample(Box::new(Sample {
                id: SampleId::new(),
                interaction,
                choice: 0,
                origin: SampleOrigin::Served,
                created,
                ids: vec![1],
                logprobs: vec![-1.0],
                kept: Vec::new(),
                forced: Vec::new(),
                text: String::new(),
                finish: FinishReason::Stop,
                version: PolicyVersion(7),
                params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
                untrainable: Some("greedy".to_owned()),
            })),
            Op::Correction(Box::new(CorrectionEntry {
                interaction,
                choice: 0,
                text: "better".to_owned(),
                ids: vec![prompt, 5, 2],
                unused: None,
                rating: None,
                comment: None,
                idempotency_key: None,
                key_id: Some(key.to_owned()),
                created,
            })),
        ];
        store.commit_blocking(ops).unwrap();
        store.groups_of(interaction).unwrap()[0].id
    }

    #[test]
    fn corrections_fill_a_batch_whatever_the_version_of_the_completion() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), metrics.clone()).unwrap();
        let first = corrected(&store, "alice", 3, 10);
        let unwanted = corrected(&store, "mallory", 4, 20);
        let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: String::new(), since: 1 };
        store.commit_blocking(vec![Op::Quarantine(row)]).unwrap();
        let lineage = Arc::new(Lineage::default());
        let ages = VersionAges { lineage, head: PolicyVersion::BASE, ahead: 0 };
        let limits = StalenessLimits { graded: 0, rated: 0 };
        let routes = crate::testing::routes(
            "[[route]]\nname = \"users\"\nreward = [{ name = \"stars\", kind = \"feedback\" }]",
        );
        let dropped = &metrics.train.dropped_groups;
        let build =
            |wanted| build_batch(&store, &routes, &ages, limits, wanted, 2, dropped).unwrap();
        assert!(build(3).is_none(), "two are not enough");
        assert!(build(2).is_none(), "one of two is quarantined");
        let state = store.group(unwanted).unwrap().unwrap().state;
        assert_eq!(state, GroupState::Dropped(QUARANTINED.to_owned()));
        assert_eq!(dropped.with_label_values(&[QUARANTINED]).get(), 1);
        let second = corrected(&store, "bob", 6, 30);
        let batch: TrainBatch = build(2).unwrap();
        assert_eq!((batch.sample_count(), batch.members().count()), (2, 0));
        assert_eq!(batch.group_ids(), [first, second]);
        assert_eq!(batch.feedback_times().collect::<Vec<_>>(), [10, 30]);
        assert_eq!(batch.staleness(&ages), 0.0);
        let none = Advantages::default();
        let samples = batch.train_samples(&none);
        assert!(samples.iter().all(|s| s.correction && s.temperature == 1.0 && !s.late));
        assert_eq!(
            (&samples[0].prompt_ids[..], &samples[0].ids[..]),
            (&[3, 9][..], &[3, 5, 2][..])
        );
        assert_eq!((batch.group_of(&none, 1), batch.group_of(&none, 2)), (vec![second], vec![]));
        assert_eq!(batch.without(&none, &[]).1, [first, second], "they are never stale");
        assert_eq!(batch.corrections[0].tokens(), 5);
    }
}
