//! A file of schema 1, which every later version must read.

use std::path::PathBuf;

use super::*;
use crate::write::LedgerTables;
use crate::{FeedbackOutcome, file, maintain, migrate};

const FILE: &str = "ledger-v1.redb";

fn fixture(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(file)
}

/// The operations that made the file: every kind of record, with every variant and option.
fn contents() -> Vec<Op> {
    let mut dataset = interaction(2);
    dataset.source = PromptSource::Dataset;
    dataset.key_id = None;
    dataset.messages = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool]
        .map(|role| Message::new(role, format!("{role:?} says ∑ 🦀")))
        .to_vec();
    let mut cut = sample(11, 1, SampleOrigin::Served, 1);
    cut.finish = FinishReason::Length;
    cut.logprobs = vec![-0.125, f32::MIN_POSITIVE, f32::NEG_INFINITY];
    let mut gone = shadow(12, 1);
    gone.finish = FinishReason::Cancelled;
    gone.params = SamplingParams {
        temperature: 0.7,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.05,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        logit_bias: BTreeMap::from([(0, 100.0), (151_643, -100.0)]),
        seed: u64::MAX,
        max_tokens: 1,
    };
    let thumb = |choice, key: &str| FeedbackEntry {
        choice,
        idempotency_key: Some(key.to_owned()),
        key_id: Some("key-1".to_owned()),
        ..thumbs(1, 0.5, 7000)
    };
    vec![
        Op::Interaction(Box::new(interaction(1))),
        Op::Interaction(Box::new(dataset)),
        Op::Sample(Box::new(served(10, 1))),
        Op::Sample(Box::new(cut)),
        Op::Sample(Box::new(gone)),
        Op::Reward(Box::new(graded(1, 10, "exact", Some(1.0)))),
        Op::Reward(Box::new(graded(2, 12, "length", None))),
        feedback(thumb(0, "first")),
        feedback(FeedbackEntry { idempotency_key: None, ..thumb(1, "") }),
        feedback(FeedbackEntry { name: "stars".to_owned(), ..thumb(1, "second") }),
        Op::Group(Box::new(group(1, 1, &[10, 11, 12], &["exact", "length"]))),
        Op::Group(Box::new(group(2, 1, &[10], &["thumbs"]))),
        Op::Group(Box::new(group(3, 1, &[12], &["length"]))),
        Op::GroupState(group_id(3), GroupState::Dropped("stale".to_owned())),
        Op::Step(Box::new(step(1, &[1]))),
        Op::Policy(Box::new(policy(0, PolicyState::Retired))),
        Op::Policy(Box::new(policy(1, PolicyState::Active))),
        Op::Policy(Box::new(policy(2, PolicyState::Candidate))),
        Op::Policy(Box::new(policy(3, PolicyState::Rejected))),
    ]
}

/// How the fixture was made. Schema 1 is released, so it must not be written again:
/// `cargo test --release -p hone-store write_the_fixture -- --ignored`.
#[test]
#[ignore = "writes tests/fixtures/ledger-v1.redb"]
fn write_the_fixture() {
    write_fixture(FILE, &contents());
}

/// Writes a file of the current schema.
pub(super) fn write_fixture(file: &str, contents: &[Op]) {
    let path = fixture(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    drop(std::fs::remove_file(&path));
    let database = file::create(&path).unwrap();
    migrate::to_current(&database).unwrap();
    file::write(&database, |tx| {
        let mut tables = LedgerTables::new(tx)?;
        for (n, op) in contents.iter().enumerate() {
            tables.apply(op, reward_id(100 + n as u64))?;
        }
        Ok(())
    })
    .unwrap();
    drop(database);
    maintain::compact(&path).unwrap();
}

/// Copies the fixture, so that the test does not migrate it.
pub(super) fn copy_fixture(file: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    std::fs::copy(fixture(file), &path).unwrap();
    (dir, path)
}

#[test]
fn every_record_of_schema_1_is_read() {
    let (_dir, path) = copy_fixture(FILE);
    let store = open(&path);
    let mut groups = BTreeMap::new();
    for op in contents() {
        match op {
            Op::Interaction(row) => assert_eq!(store.interaction(row.id).unwrap(), Some(*row)),
            Op::Sample(row) => assert_eq!(store.sample(row.id).unwrap(), Some(*row)),
            Op::Reward(row) => assert!(store.rewards_of(row.sample).unwrap().contains(&row)),
            Op::Policy(row) => assert_eq!(store.policy(row.version).unwrap(), Some(*row)),
            Op::Step(row) => {
                for group in &row.groups {
                    groups.entry(*group).and_modify(|g: &mut Group| {
                        g.state = GroupState::Trained(row.step);
                    });
                }
                assert_eq!(store.last_step().unwrap(), Some(*row));
            }
            Op::Group(row) => drop(groups.insert(row.id, *row)),
            Op::GroupState(id, state) => groups.get_mut(&id).unwrap().state = state,
            _ => {}
        }
    }
    let found = store.groups_of(interaction_id(1)).unwrap();
    assert_eq!(found, groups.into_values().collect::<Vec<_>>());
    assert_eq!(store.ready_groups(9).unwrap().len(), 1);
    assert_eq!(store.samples_of(interaction_id(1)).unwrap().len(), 3);
    assert_eq!(
        ungrouped(&store),
        [("stars", 11), ("thumbs", 11)].map(|(part, n)| (sample_id(n), part.to_owned()))
    );
    let thumb = Reward {
        id: reward_id(107),
        value: Some(0.5),
        source: RewardSource::Feedback,
        created: 7000,
        idempotency_key: Some("first".to_owned()),
        comment: Some("good".to_owned()),
        key_id: Some("key-1".to_owned()),
        ..graded(0, 10, "thumbs", None)
    };
    assert_eq!(store.rewards_of(sample_id(10)).unwrap()[1], thumb);
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.rewards, stats.feedback), (2, 3, 5, 3));
    assert_eq!((stats.groups, stats.policy_versions, stats.steps), (3, 4, 1));
    // The migration to schema 2 found each rater's newest rating.
    let rating =
        |key: &str| vec![Rating { key_id: Some(key.to_owned()), value: 0.5, created: 7000 }];
    for (sample, name) in [(10, "thumbs"), (11, "thumbs"), (11, "stars")] {
        assert_eq!(store.ratings_of(sample_id(sample), name).unwrap(), rating("key-1"));
    }
    assert_eq!(store.ratings_of(sample_id(10), "stars").unwrap(), []);
    drop(store);
    let report = maintain::check(&path).unwrap();
    assert!(report.is_healthy(), "{report:?}");
}

#[test]
fn a_migrated_file_accepts_new_writes() {
    let (_dir, path) = copy_fixture(FILE);
    let store = open(&path);
    let again = FeedbackEntry {
        idempotency_key: Some("first".to_owned()),
        key_id: Some("key-1".to_owned()),
        ..thumbs(1, 1.0, 8000)
    };
    let new = thumbs(5, 1.0, 8000);
    let mut ops = prompt_ops(5, 0);
    ops.extend([feedback(again), feedback(new)]);
    // The migrated rater corrects the rating, and another rater adds one.
    let mean = |key: &str, value, created| FeedbackEntry {
        key_id: Some(key.to_owned()),
        join: super::mean,
        ..thumbs(1, value, created)
    };
    ops.extend([feedback(mean("key-1", 1.0, 8001)), feedback(mean("key-2", 0.0, 8002))]);
    let outcomes = store.commit_blocking(ops).unwrap().feedback;
    let expected = [
        FeedbackOutcome::Duplicate(sample_id(10)),
        FeedbackOutcome::Recorded(sample_id(50)),
        FeedbackOutcome::Recorded(sample_id(10)),
        FeedbackOutcome::Recorded(sample_id(10)),
    ];
    assert_eq!(outcomes, expected);
    assert_eq!(store.stats().unwrap().interactions, 3);
    assert_eq!(store.rewards_of(sample_id(10)).unwrap()[1].value, Some(0.5));
    assert_eq!(store.ratings_of(sample_id(10), "thumbs").unwrap().len(), 2);
}
