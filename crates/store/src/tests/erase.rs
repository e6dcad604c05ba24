//! Erasure of prompts, and what a key's list of completions contains.

use proptest::prelude::*;

use super::*;
use crate::{CorrectionEntry, FeedbackOutcome, MERGED, maintain};

fn erase(of: u64) -> Op {
    Op::Erase(interaction_id(of), 9000)
}

fn correction(of: u64, key: &str) -> Op {
    Op::Correction(Box::new(CorrectionEntry {
        interaction: interaction_id(of),
        choice: 0,
        text: "quagga correction".to_owned(),
        ids: vec![7, 8, 2],
        unused: None,
        rating: None,
        comment: Some("quagga reason".to_owned()),
        idempotency_key: Some(format!("fix-{of}")),
        key_id: Some(key.to_owned()),
        created: 9000 + of,
    }))
}

fn turn(digest: u8, of: u64, choice: Option<u32>) -> Op {
    Op::Turn { digest: [digest; 16], interaction: interaction_id(of), choice }
}

/// A rating whose comment is `quagga remark`.
fn rate(of: u64, key: &str, value: f64, created: u64) -> FeedbackEntry {
    FeedbackEntry {
        key_id: Some(key.to_owned()),
        comment: Some("quagga remark".to_owned()),
        idempotency_key: Some(format!("{key}-{created}")),
        ..thumbs(of, value, created)
    }
}

/// [`prompt_ops`] with texts that contain `quagga`, and a session.
fn secret_prompt(n: u64, shadows: u64) -> Vec<Op> {
    let mut ops = prompt_ops(n, shadows);
    for op in &mut ops {
        match op {
            Op::Interaction(row) => {
                row.messages[1].content = "quagga question".to_owned();
                row.metadata.insert("session_id".to_owned(), "quagga session".to_owned());
                row.held_out = true;
            }
            Op::Sample(row) => row.text = "quagga answer".to_owned(),
            _ => {}
        }
    }
    ops
}

#[test]
fn nothing_of_an_erased_prompt_remains() {
    let store = TestLedger::new();
    let commit = |ops: Vec<Op>| store.commit_blocking(ops).unwrap().feedback;
    commit(secret_prompt(1, 1));
    commit(prompt_ops(2, 0));
    commit(vec![turn(7, 1, None), turn(8, 1, Some(0)), turn(7, 2, None)]);
    assert_eq!(store.turns([7; 16], 1).unwrap(), [(interaction_id(2), None)], "the newest first");
    assert_eq!(store.turns([8; 16], 9).unwrap(), [(interaction_id(1), Some(0))]);
    commit(vec![
        feedback(rate(1, "alice", 0.0, 1)),
        feedback(rate(1, "alice", 1.0, 2)),
        feedback(rate(1, "bob", 1.0, 3)),
        feedback(thumbs(2, 0.5, 4)),
        correction(1, "alice"),
    ]);
    // Two answers to equal prompts in one group, and a group that was trained on.
    commit(vec![
        Op::Group(Box::new(group(1, 1, &[10, 20], &["thumbs"]))),
        Op::Group(Box::new(group(2, 1, &[10, 11], &["exact"]))),
        Op::Step(Box::new(step(1, &[2]))),
    ]);
    assert_eq!(store.ready_groups(9).unwrap().len(), 2);
    assert_eq!(store.held_out("default", 9).unwrap().len(), 1);

    commit(vec![erase(1)]);
    assert_eq!(store.interaction(interaction_id(1)).unwrap(), None);
    assert!(store.samples_of(interaction_id(1)).unwrap().is_empty());
    for sample in [10, 11] {
        assert_eq!(store.sample(sample_id(sample)).unwrap(), None);
        assert!(store.rewards_of(sample_id(sample)).unwrap().is_empty());
    }
    assert!(store.ratings_of(sample_id(10), "thumbs").unwrap().is_empty());
    assert_eq!(store.turns([7; 16], 9).unwrap(), [(interaction_id(2), None)]);
    assert_eq!(store.turns([8; 16], 9).unwrap(), []);
    assert!(store.turns_of(Some("key-1"), "quagga session", 9).unwrap().is_empty());
    assert!(store.held_out("default", 9).unwrap().is_empty());
    assert_eq!(store.completions_of(Some("key-1"), None, false, 9).unwrap(), [interaction_id(2)]);
    assert_eq!(store.same_prompt(&interaction(2), 9).unwrap(), [interaction_id(2)]);
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.feedback), (1, 1, 1));
    // The other answer is still compared, under its own prompt.
    let [ready] = &store.ready_groups(9).unwrap()[..] else { panic!("one ready group") };
    assert_eq!((ready.id, ready.interaction), (group_id(1), interaction_id(2)));
    assert_eq!(ready.members, [sample_id(20)]);
    let trained = store.group(group_id(2)).unwrap().unwrap();
    assert_eq!((trained.members, trained.state), (vec![], GroupState::Trained(1)));
    let erased = store.metrics.feedback_ratings.with_label_values(&["erased"]).get();
    assert_eq!(erased, 1, "both raters' values are one rating");
    assert_eq!(store.metrics.train.corrections.with_label_values(&["erased"]).get(), 1);

    // What arrives later is ignored, and so is a second erasure.
    let late = vec![Op::Sample(Box::new(shadow(12, 1))), turn(9, 1, None), erase(1)];
    commit([secret_prompt(1, 0), late].concat());
    assert_eq!(store.stats().unwrap().samples, 1);
    assert_eq!(store.turns([9; 16], 9).unwrap(), []);
    let again = rate(1, "alice", 1.0, 2);
    assert_eq!(commit(vec![feedback(again.clone())]), [FeedbackOutcome::UnknownCompletion]);
    // Its idempotency keys are forgotten.
    let other = FeedbackEntry { interaction: interaction_id(2), comment: None, ..again };
    assert_eq!(commit(vec![feedback(other)]), [FeedbackOutcome::Recorded(sample_id(20))]);
    // An undone step does not make an empty group ready.
    commit(vec![Op::GroupState(group_id(2), GroupState::Ready)]);
    let state = store.group(group_id(2)).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped("erased".to_owned()));
    let dir = store.check();
    let path = dir.path().join("ledger.redb");
    maintain::compact(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(!bytes.windows(6).any(|window| window == b"quagga"));
}

#[test]
fn a_group_stays_ready_whose_successor_has_an_erased_member() {
    let store = TestLedger::new();
    let commit = |ops: Vec<Op>| drop(store.commit_blocking(ops).unwrap());
    let prompts = (1..=3).flat_map(|n| prompt_ops(n, 0));
    let stars = FeedbackEntry { name: "stars".to_owned(), ..thumbs(1, 4.0, 2) };
    let ratings = [thumbs(1, 1.0, 1), stars, thumbs(2, 0.0, 3), thumbs(3, 0.0, 4)];
    commit(prompts.chain(ratings.map(feedback)).collect());
    let both = group(1, 1, &[10], &["thumbs", "stars"]);
    commit(vec![Op::Group(Box::new(both.clone()))]);
    let other = |n, member| Op::Group(Box::new(group(n, 1, &[10, member], &["thumbs"])));
    let rest = || Op::Group(Box::new(group(3, 1, &[10], &["stars"])));
    let merge = || Op::GroupState(group_id(1), GroupState::Dropped(MERGED.to_owned()));
    // The sweep read the second completion before it was erased.
    commit(vec![erase(2), other(2, 20), rest(), merge()]);
    assert_eq!(store.group(group_id(2)).unwrap(), None);
    assert_eq!(store.ready_groups(9).unwrap(), [both], "no rating is lost or in two groups");
    assert_eq!(ungrouped(&store), [(sample_id(30), "thumbs".to_owned())]);
    // The next sweep merges it with the third.
    commit(vec![other(4, 30), rest(), merge()]);
    let ready: Vec<_> = store.ready_groups(9).unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(ready, [group_id(3), group_id(4)]);
    store.check();
}

#[test]
fn a_key_lists_its_own_completions_in_either_order() {
    let store = TestLedger::new();
    for n in 1..=6 {
        let mut row = interaction(n);
        match n {
            2 => row.key_id = Some("other".to_owned()),
            3 => row.source = PromptSource::Dataset,
            4 => row.template_hash.clear(),
            _ => {}
        }
        store.commit_blocking(vec![Op::Interaction(Box::new(row))]).unwrap();
    }
    let list = |key: &str, after: Option<u64>, newest_first, limit| {
        store.completions_of(Some(key), after.map(interaction_id), newest_first, limit).unwrap()
    };
    let ids = |numbers: &[u64]| numbers.iter().map(|n| interaction_id(*n)).collect::<Vec<_>>();
    assert_eq!(list("key-1", None, false, 9), ids(&[1, 5, 6]));
    assert_eq!(list("key-1", None, true, 2), ids(&[6, 5]));
    assert_eq!(list("key-1", Some(1), false, 9), ids(&[5, 6]));
    assert_eq!(list("key-1", Some(5), true, 9), ids(&[1]));
    assert_eq!(list("key-1", Some(6), false, 9), ids(&[]));
    assert_eq!(list("other", None, false, 9), ids(&[2]));
    assert!(store.completions_of(None, None, false, 9).unwrap().is_empty());
}

#[test]
fn other_metadata_moves_a_prompt_to_another_session() {
    let store = TestLedger::new();
    store.commit_blocking(secret_prompt(1, 0)).unwrap();
    let metadata: BTreeMap<_, _> = [("session_id".to_owned(), "b".to_owned())].into();
    let ops = vec![
        Op::Metadata(interaction_id(1), metadata.clone()),
        Op::Metadata(interaction_id(2), metadata.clone()),
    ];
    store.commit_blocking(ops).unwrap();
    assert_eq!(store.interaction(interaction_id(1)).unwrap().unwrap().metadata, metadata);
    assert!(store.turns_of(Some("key-1"), "quagga session", 9).unwrap().is_empty());
    assert_eq!(store.turns_of(Some("key-1"), "b", 9).unwrap(), [interaction_id(1)]);
    assert_eq!(store.interaction(interaction_id(2)).unwrap(), None);
    store.check();
}

/// One operation on prompts 1 to 3.
fn op() -> impl Strategy<Value = Vec<Op>> {
    let (of, state) = (1..4_u64, 0..3_u8);
    prop_oneof![
        2 => (of.clone(), 0..2_u64).prop_map(|(n, shadows)| secret_prompt(n, shadows)),
        4 => (of.clone(), any::<bool>(), 0..3_u8, 1..900_u64).prop_map(|(of, key, value, at)| {
            let key = if key { "alice" } else { "bob" };
            vec![feedback(rate(of, key, f64::from(value), at))]
        }),
        2 => of.clone().prop_map(|of| vec![correction(of, "alice")]),
        3 => (1..5_u64, of.clone(), of.clone()).prop_map(|(n, of, other)| {
            let members: std::collections::BTreeSet<u64> = [10 * of, 10 * other].into();
            let members: Vec<u64> = members.into_iter().collect();
            vec![Op::Group(Box::new(group(n, of, &members, &["thumbs"])))]
        }),
        2 => (1..5_u64, state).prop_map(|(n, state)| {
            let state = match state {
                0 => GroupState::Ready,
                1 => GroupState::Trained(1),
                _ => GroupState::Dropped("stale".to_owned()),
            };
            vec![Op::GroupState(group_id(n), state)]
        }),
        2 => of.prop_map(|of| vec![erase(of)]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_is_consistent_after_any_erasure(ops in prop::collection::vec(op(), 1..30)) {
        let TestLedger { dir, store, .. } = TestLedger::new();
        store.commit_blocking(ops.concat()).unwrap();
        drop(store);
        let report = maintain::check(&dir.path().join("ledger.redb")).unwrap();
        prop_assert!(report.is_healthy(), "{:?}", report);
    }
}
