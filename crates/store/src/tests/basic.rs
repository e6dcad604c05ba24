use super::*;
use crate::{
    Committed, FeedbackOutcome, QUARANTINED, QuarantinedKey, StoreError, StoreStats, maintain,
};

#[tokio::test]
async fn committed_records_are_read_back_and_survive_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let store = open(&path);
    let mut ops = prompt_ops(1, 1);
    ops.push(Op::Reward(Box::new(graded(20, 11, "length", None))));
    ops.push(Op::Group(Box::new(group(1, 1, &[10, 11], &["exact"]))));
    ops.push(Op::Policy(Box::new(policy(0, PolicyState::Active))));
    ops.push(Op::Policy(Box::new(policy(1, PolicyState::Rejected))));
    assert_eq!(store.commit(ops).await.unwrap(), Committed::default());
    for store in [store.clone(), {
        store.close().await.unwrap();
        open(&path)
    }] {
        if store.stats().is_err() {
            // A closed store reports that it is closed.
            assert!(matches!(store.sample(sample_id(1)), Err(StoreError::Closed)));
            assert!(matches!(store.enqueue(prompt_ops(2, 0)), Err(StoreError::Closed)));
            assert!(matches!(store.commit(prompt_ops(2, 0)).await, Err(StoreError::Closed)));
            continue;
        }
        assert_eq!(store.interaction(interaction_id(1)).unwrap(), Some(interaction(1)));
        assert_eq!(store.interaction(interaction_id(2)).unwrap(), None);
        assert_eq!(store.sample(sample_id(11)).unwrap(), Some(shadow(11, 1)));
        assert_eq!(
            store.samples_of(interaction_id(1)).unwrap(),
            vec![served(10, 1), shadow(11, 1)]
        );
        assert_eq!(
            store.rewards_of(sample_id(11)).unwrap(),
            vec![graded(11, 11, "exact", Some(1.0)), graded(20, 11, "length", None)]
        );
        assert_eq!(store.rewards_of(sample_id(10)).unwrap().len(), 1);
        assert_eq!(store.group(group_id(1)).unwrap(), Some(group(1, 1, &[10, 11], &["exact"])));
        assert_eq!(store.groups_of(interaction_id(1)).unwrap().len(), 1);
        assert_eq!(store.ready_groups(10).unwrap().len(), 1);
        assert_eq!(*store.watch_ready().borrow(), 1);
        assert_eq!(
            store.policies().unwrap(),
            vec![policy(0, PolicyState::Active), policy(1, PolicyState::Rejected)]
        );
        assert_eq!(store.policy(PolicyVersion(1)).unwrap(), Some(policy(1, PolicyState::Rejected)));
        assert_eq!(store.lineage().age(PolicyVersion(1), PolicyVersion(0)), Some(1));
        let expected = StoreStats {
            interactions: 1,
            samples: 2,
            rewards: 3,
            groups: 1,
            policy_versions: 2,
            ..StoreStats::default()
        };
        assert_eq!(store.stats().unwrap(), expected);
    }
}

#[tokio::test]
async fn feedback_outcomes_depend_on_earlier_operations_of_the_same_batch() {
    let store = TestLedger::new();
    let mut bumps = store.watch_feedback();
    bumps.mark_unchanged();
    store.enqueue(prompt_ops(1, 1)).unwrap();
    store.enqueue(vec![Op::Sample(Box::new(sample(15, 1, SampleOrigin::Served, 1)))]).unwrap();
    let keyed = |choice, key: &str, api_key: Option<&str>| FeedbackEntry {
        choice,
        idempotency_key: Some(key.to_owned()),
        key_id: api_key.map(str::to_owned),
        ..thumbs(1, 1.0, 100)
    };
    let ops = vec![
        feedback(keyed(0, "a", None)),
        feedback(keyed(0, "a", None)),
        feedback(keyed(1, "a", None)),
        feedback(FeedbackEntry { value: Some(0.0), ..keyed(0, "a", None) }),
        feedback(FeedbackEntry { name: "stars".to_owned(), ..keyed(0, "a", None) }),
        feedback(FeedbackEntry { comment: None, ..keyed(0, "a", None) }),
        feedback(keyed(1, "a", Some("key-1"))),
        // Another end user of the same key.
        feedback(keyed(1, "a", Some("key-1.0123456789ab"))),
        feedback(thumbs(7, 1.0, 100)),
        feedback(FeedbackEntry { choice: 2, ..thumbs(1, 1.0, 100) }),
    ];
    let expected = vec![
        FeedbackOutcome::Recorded(sample_id(10)),
        FeedbackOutcome::Duplicate(sample_id(10)),
        FeedbackOutcome::Reused,
        FeedbackOutcome::Reused,
        FeedbackOutcome::Reused,
        FeedbackOutcome::Reused,
        FeedbackOutcome::Recorded(sample_id(15)),
        FeedbackOutcome::Reused,
        FeedbackOutcome::UnknownCompletion,
        FeedbackOutcome::UnknownChoice,
    ];
    assert_eq!(store.commit(ops).await.unwrap().feedback, expected);
    assert!(bumps.has_changed().unwrap());
    bumps.mark_unchanged();
    let again = store.commit(vec![feedback(keyed(0, "a", None))]).await.unwrap().feedback;
    assert_eq!(again, vec![FeedbackOutcome::Duplicate(sample_id(10))]);
    assert!(!bumps.has_changed().unwrap(), "a duplicate must not wake the watchers");
    assert_eq!(store.stats().unwrap().feedback, 2);
    let reward = &store.rewards_of(sample_id(10)).unwrap()[1];
    assert_eq!((reward.name.as_str(), reward.value), ("thumbs", Some(1.0)));
    assert_eq!(reward.source, RewardSource::Feedback);
    assert_eq!(reward.comment.as_deref(), Some("good"));
}

#[tokio::test]
async fn feedback_waits_until_a_group_trains_on_it() {
    let store = TestLedger::new();
    store.enqueue(prompt_ops(1, 0)).unwrap();
    store.enqueue(prompt_ops(2, 0)).unwrap();
    let first = (sample_id(10), "thumbs".to_owned());
    let second = (sample_id(20), "thumbs".to_owned());
    store.commit(vec![feedback(thumbs(2, 0.0, 200))]).await.unwrap();
    store.commit(vec![feedback(thumbs(1, 1.0, 100))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![first.clone(), second.clone()], "oldest first");
    assert_eq!(store.ungrouped_feedback(199, 10).unwrap(), vec![first.clone()]);
    assert_eq!(store.ungrouped_feedback(200, 1).unwrap(), vec![first.clone()]);

    // A second post replaces the entry.
    store.commit(vec![feedback(thumbs(1, 0.0, 300))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![second.clone(), first.clone()]);

    // A group of another part keeps the entry; a group of the same part removes it.
    let other = Op::Group(Box::new(group(1, 1, &[10], &["exact"])));
    store.commit(vec![other]).await.unwrap();
    assert_eq!(ungrouped(&store).len(), 2);
    store.commit(vec![Op::Group(Box::new(group(2, 1, &[10], &["thumbs"])))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![second.clone()]);

    // While that group is ready, the trainer will read the newest value.
    store.commit(vec![feedback(thumbs(1, 1.0, 400))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![second.clone()]);

    // After training, the same value adds no entry, but another value does.
    store.commit(vec![Op::Step(Box::new(step(1, &[2])))]).await.unwrap();
    store.commit(vec![feedback(thumbs(1, 1.0, 500))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![second.clone()]);
    store.commit(vec![feedback(thumbs(1, 0.0, 600))]).await.unwrap();
    assert_eq!(ungrouped(&store), vec![second, first]);
}

#[tokio::test]
async fn a_step_marks_its_groups_trained() {
    let store = TestLedger::new();
    let mut ready = store.watch_ready();
    let mut ops = prompt_ops(1, 1);
    ops.extend((1..=3).map(|n| Op::Group(Box::new(group(n, 1, &[10, 11], &["exact"])))));
    ops.push(Op::GroupState(group_id(3), GroupState::Dropped("stale".to_owned())));
    store.commit(ops).await.unwrap();
    assert_eq!(*ready.borrow_and_update(), 2);
    store.commit(vec![Op::Step(Box::new(step(1, &[1])))]).await.unwrap();
    assert!(ready.has_changed().unwrap());
    assert_eq!(*ready.borrow(), 1);
    assert_eq!(store.group(group_id(1)).unwrap().unwrap().state, GroupState::Trained(1));
    assert_eq!(store.ready_groups(10).unwrap(), vec![group(2, 1, &[10, 11], &["exact"])]);
    assert_eq!(store.last_step().unwrap(), Some(step(1, &[1])));
    store.commit(vec![Op::Step(Box::new(step(2, &[2])))]).await.unwrap();
    assert_eq!(store.steps(2, 10).unwrap(), vec![step(2, &[2])]);
    assert_eq!(store.steps(0, 1).unwrap(), vec![step(1, &[1])]);
}

#[tokio::test]
async fn rewards_and_groups_of_unknown_samples_are_dropped_and_counted() {
    let store = TestLedger::new();
    let metrics = store.metrics.clone();
    let mut ops = prompt_ops(1, 0);
    ops.push(Op::Reward(Box::new(graded(1, 99, "exact", Some(1.0)))));
    ops.push(Op::Group(Box::new(group(1, 1, &[10, 99], &["exact"]))));
    ops.push(Op::GroupState(group_id(9), GroupState::Ready));
    store.commit(ops).await.unwrap();
    let stats = store.stats().unwrap();
    assert_eq!((stats.rewards, stats.groups), (1, 0));
    let dropped = |table| metrics.store_dropped.with_label_values(&[table]).get();
    assert_eq!((dropped("rewards"), dropped("groups")), (1, 2));
    assert_eq!(metrics.store_records.with_label_values(&["interactions"]).get(), 1);
    assert_eq!(metrics.store_records.with_label_values(&["rewards"]).get(), 1);
    assert_eq!(metrics.store_commit_duration.get_sample_count(), 1);
    let known = Op::Group(Box::new(group(2, 1, &[10], &["exact"])));
    store.commit(vec![known]).await.unwrap();
    assert_eq!(metrics.store_records.with_label_values(&["groups"]).get(), 1);
}

#[tokio::test]
async fn files_in_use_and_files_that_are_no_ledger_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let store = open(&path);
    let config = StoreConfig::default();
    assert!(matches!(Store::open(&path, &config, metrics()), Err(StoreError::InUse(_))));
    drop(store);
    drop(open(&path));

    let other = dir.path().join("other.redb");
    let database = redb::Database::create(&other).unwrap();
    let tx = database.begin_write().unwrap();
    tx.open_table(redb::TableDefinition::<u64, u64>::new("theirs")).unwrap();
    tx.commit().unwrap();
    drop(database);
    let refused = Store::open(&other, &config, metrics());
    assert!(matches!(refused, Err(StoreError::Corrupt { table: "meta", .. })));
    std::fs::write(&other, b"not a database").unwrap();
    assert!(matches!(Store::open(&other, &config, metrics()), Err(StoreError::Failed(_))));
}

#[test]
fn creating_a_file_leaves_no_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(&dir.path().join("ledger.redb")));
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["ledger.redb"]);
}

#[tokio::test]
async fn the_newest_ratings_of_all_raters_are_combined_for_training() {
    let store = TestLedger::new();
    store.enqueue(prompt_ops(1, 0)).unwrap();
    let by = |key: Option<&str>, value, created, rule: Aggregate| {
        feedback(FeedbackEntry {
            key_id: key.map(str::to_owned),
            aggregate: rule,
            ..thumbs(1, value, created)
        })
    };
    let value = |store: &Store| {
        let rewards = store.rewards_of(sample_id(10)).unwrap();
        rewards.iter().find(|r| r.name == "thumbs").unwrap().value
    };
    store
        .commit(vec![
            by(Some("a"), 0.0, 100, Aggregate::Mean),
            by(Some("b"), 1.0, 101, Aggregate::Mean),
        ])
        .await
        .unwrap();
    assert_eq!(value(&store), Some(0.5));
    store.commit(vec![by(None, 1.0, 102, Aggregate::Mean)]).await.unwrap();
    // A correction replaces the rating of the same rater, even if others posted in between.
    store
        .commit(vec![
            by(Some("a"), 1.0, 103, Aggregate::Mean),
            by(None, 0.25, 104, Aggregate::Mean),
        ])
        .await
        .unwrap();
    assert_eq!(value(&store), Some(0.75));
    assert_eq!(store.ratings_of(sample_id(10), "thumbs").unwrap().len(), 3);
    assert_eq!(store.stats().unwrap().feedback, 5, "replaced ratings stay in the table");
    assert_eq!(ungrouped(&store), [(sample_id(10), "thumbs".to_owned())]);

    // A tie has no value, so it does not wait for a group until another rating resolves it.
    store
        .commit(vec![
            by(None, 0.0, 105, Aggregate::Majority),
            by(Some("c"), 0.0, 106, Aggregate::Majority),
        ])
        .await
        .unwrap();
    assert_eq!((value(&store), ungrouped(&store)), (None, vec![]));
    store.commit(vec![by(Some("d"), 1.0, 107, Aggregate::Majority)]).await.unwrap();
    assert_eq!((value(&store), ungrouped(&store).len()), (Some(1.0), 1));

    // After training, a rating that keeps the combined value adds no entry; one that changes it
    // does.
    store.commit(vec![Op::Group(Box::new(group(1, 1, &[10], &["thumbs"])))]).await.unwrap();
    store.commit(vec![Op::Step(Box::new(step(1, &[1])))]).await.unwrap();
    store.commit(vec![by(Some("e"), 1.0, 108, Aggregate::Majority)]).await.unwrap();
    assert_eq!(ungrouped(&store), []);
    store.commit(vec![by(Some("f"), 1.0, 109, Aggregate::Mean)]).await.unwrap();
    assert_eq!(ungrouped(&store).len(), 1);
    store.check();
}

#[tokio::test]
async fn feedback_on_a_conversation_is_recorded_once_for_each_turn() {
    let store = TestLedger::new();
    for n in 1..=3 {
        let mut ops = prompt_ops(n, 1);
        if let Op::Interaction(row) = &mut ops[0] {
            row.metadata.insert("session_id".to_owned(), "talk".to_owned());
        }
        store.enqueue(ops).unwrap();
    }
    store.enqueue(vec![Op::Sample(Box::new(sample(25, 2, SampleOrigin::Served, 1)))]).unwrap();
    store.flush().await.unwrap();
    let turns = store.turns_of(Some("key-1"), "talk", 9).unwrap();
    assert_eq!(turns, [1, 2, 3].map(interaction_id));
    assert_eq!(store.turns_of(Some("key-1"), "talk", 2).unwrap().len(), 2);
    assert_eq!(store.turns_of(None, "talk", 9).unwrap(), []);
    assert_eq!(store.turns_of(Some("key-1"), "tal", 9).unwrap(), []);
    let post = || {
        let key = Some("once".to_owned());
        // The second turn has the choices 0 and 1.
        let entry = |(n, choice)| FeedbackEntry {
            choice,
            idempotency_key: key.clone(),
            ..thumbs(n, 1.0, 100)
        };
        Op::Conversation([(1, 0), (2, 2), (3, 0)].map(entry).to_vec())
    };
    let with = |value, from| {
        let entry =
            |n| FeedbackEntry { idempotency_key: Some("once".to_owned()), ..thumbs(n, value, 100) };
        Op::Conversation((from..=3).map(entry).collect())
    };
    let single = FeedbackEntry { idempotency_key: Some("once".to_owned()), ..thumbs(1, 1.0, 100) };
    let ops = vec![
        post(),
        post(),
        with(0.0, 1),
        with(1.0, 2),
        feedback(single),
        Op::Conversation(vec![]),
    ];
    let done = store.commit(ops).await.unwrap();
    let expected = [
        FeedbackOutcome::Credited(2),
        FeedbackOutcome::AlreadyCredited(2),
        FeedbackOutcome::Reused,
        FeedbackOutcome::Reused,
        FeedbackOutcome::Reused,
        FeedbackOutcome::Credited(0),
    ];
    assert_eq!(done.feedback, expected);
    let waiting = [10, 30].map(|n| (sample_id(n), "thumbs".to_owned()));
    assert_eq!(ungrouped(&store), waiting);
    assert_eq!(store.stats().unwrap().feedback, 2);
    store.check();
}

#[tokio::test]
async fn feedback_dropped_by_a_quarantine_waits_again_after_the_release() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let store = open(&path);
    let row = |reason: &str| QuarantinedKey {
        key_id: "mallory".to_owned(),
        reason: reason.to_owned(),
        since: 5,
    };
    for n in 1..=3 {
        let entry = FeedbackEntry { key_id: Some("mallory".to_owned()), ..thumbs(n, 1.0, n) };
        let mut ops = prompt_ops(n, 0);
        ops.extend([feedback(entry), Op::Group(Box::new(group(n, n, &[10 * n], &["thumbs"])))]);
        store.enqueue(ops).unwrap();
    }
    let dropped = |n, why: &str| Op::GroupState(group_id(n), GroupState::Dropped(why.to_owned()));
    let ops = vec![
        Op::Quarantine(row("1")),
        Op::Quarantine(row("2")),
        dropped(1, QUARANTINED),
        dropped(2, "stale"),
    ];
    store.commit(ops).await.unwrap();
    store.close().await.unwrap();
    let store = open(&path);
    assert_eq!(store.quarantined().unwrap(), [row("1")]);
    assert_eq!(ungrouped(&store), []);
    store.commit(vec![Op::Release("mallory".to_owned())]).await.unwrap();
    assert_eq!(store.quarantined().unwrap(), []);
    // The second group was dropped as stale, and the third is still ready.
    assert_eq!(ungrouped(&store), [(sample_id(10), "thumbs".to_owned())]);
    store.commit(vec![Op::Release("mallory".to_owned())]).await.unwrap();
    drop(store);
    assert!(maintain::check(&path).unwrap().is_healthy());
}
