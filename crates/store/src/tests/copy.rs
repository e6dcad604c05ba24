//! Copies of the file, backups, erasure by selection, and retention.

use std::fs;

use serde_json::json;

use super::*;
use crate::erasure::ErasureFilter;
use crate::retention::{Retention, RetentionKind};
use crate::{AuditRecord, LEDGER, StartedBackup, backup, maintain, restore};

/// Whether a file below `dir` has `text`.
fn contains(dir: &Path, text: &str) -> bool {
    fs::read_dir(dir).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return contains(&path, text);
        }
        fs::read(path).unwrap().windows(text.len()).any(|window| window == text.as_bytes())
    })
}

fn of_user(n: u64, user: &str) -> Vec<Op> {
    let mut ops = prompt_ops(n, 1);
    for op in &mut ops {
        match op {
            Op::Interaction(row) => {
                row.key_id = hone_core::types::rater_id(Some("2bd806c97f0e"), Some(user));
                row.messages[1].content = format!("question of {user}");
            }
            Op::Sample(row) => row.text = format!("answer for {user}"),
            _ => {}
        }
    }
    ops
}

#[test]
fn no_file_has_a_text_of_an_erased_end_user() {
    let store = TestLedger::new();
    store.commit_blocking([of_user(1, "quagga"), of_user(2, "zebra")].concat()).unwrap();
    let by_user = FeedbackEntry {
        key_id: hone_core::types::rater_id(Some("2bd806c97f0e"), Some("quagga")),
        comment: Some("remark of quagga".to_owned()),
        ..thumbs(2, 1.0, 5)
    };
    store.commit_blocking(vec![feedback(thumbs(2, 0.0, 4)), feedback(by_user)]).unwrap();
    store.commit_blocking(vec![Op::Group(Box::new(group(1, 1, &[10, 11], &["exact"])))]).unwrap();
    store.commit_blocking(vec![Op::Step(Box::new(step(1, &[1])))]).unwrap();
    let version = |version: u64, parent: Option<u64>| PolicyRecord {
        parent: parent.map(PolicyVersion),
        step: version,
        ..policy(version, PolicyState::Retired)
    };
    let versions = [version(0, None), version(1, Some(0)), version(2, Some(1))];
    store.commit_blocking(versions.into_iter().map(|v| Op::Policy(Box::new(v))).collect()).unwrap();
    assert!(contains(store.dir.path(), "quagga"));

    let selection = ErasureFilter::EndUser("quagga".to_owned());
    let planned = store.erase(&selection, u64::MAX, true).unwrap();
    assert_eq!((planned.completions, planned.samples, planned.feedback), (1, 2, 1));
    assert_eq!(planned.versions, [1, 2]);
    assert_eq!(store.stats().unwrap().interactions, 2, "nothing is erased yet");
    assert_eq!(store.erase(&selection, u64::MAX, false).unwrap(), planned);
    store.rewrite().unwrap();
    assert!(!contains(store.dir.path(), "quagga"));
    assert!(contains(store.dir.path(), "zebra"));
    // The other rater's value is left.
    let rewards = store.rewards_of(sample_id(20)).unwrap();
    let thumbs = rewards.iter().find(|part| part.name == "thumbs").unwrap();
    assert_eq!((thumbs.value, &thumbs.comment), (Some(0.0), &None));
    assert_eq!(store.erase(&selection, u64::MAX, false).unwrap(), crate::Erasure::default());
    store.check();
}

#[test]
fn what_is_written_during_a_copy_is_in_the_new_file() {
    let store = TestLedger::new();
    (1..=300).for_each(|n| drop(store.commit_blocking(prompt_ops(n, 1)).unwrap()));
    for n in 1..=250 {
        store.commit_blocking(vec![Op::Erase(interaction_id(n), 1)]).unwrap();
    }
    let written = std::thread::scope(|scope| {
        let copies = scope.spawn(|| (0..5).map(|_| store.rewrite().unwrap()).collect::<Vec<_>>());
        let mut written = 300;
        while !copies.is_finished() {
            written += 1;
            store.commit_blocking(prompt_ops(written, 1)).unwrap();
            store.commit_blocking(vec![feedback(thumbs(written, 1.0, written))]).unwrap();
        }
        let first = copies.join().unwrap()[0];
        assert!(first.bytes_after < first.bytes_before, "{first:?}");
        written
    });
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.feedback), (written - 250, written - 300));
    store.check();
}

#[test]
fn a_backup_is_the_directory_of_one_moment() {
    let store = TestLedger::new();
    let data = store.dir.path().to_owned();
    store.commit_blocking(prompt_ops(1, 1)).unwrap();
    fs::create_dir_all(data.join("adapters/v000001")).unwrap();
    fs::write(data.join("adapters/v000001/weights"), "one").unwrap();
    fs::create_dir_all(data.join("models")).unwrap();
    let to = data.join("backups/first");
    let started = StartedBackup::begin(&store, &data, &to).unwrap();
    store.commit_blocking(prompt_ops(2, 1)).unwrap();
    assert!(!to.exists());
    let made = started.finish().unwrap();
    assert_eq!((&made.path, made.step, made.versions), (&to, 0, 0));
    assert!(StartedBackup::begin(&store, &data, &to).is_err(), "it exists");
    let place = tempfile::tempdir().unwrap();
    let restored = place.path().join("data");
    let report = restore(&to, &restored).unwrap();
    assert!(report.is_healthy(), "{report:?}");
    assert_eq!(report.rows.interactions, 1, "as of the begin");
    assert_eq!(fs::read_to_string(restored.join("adapters/v000001/weights")).unwrap(), "one");
    assert!(!restored.join("models").exists());
    let error = restore(&to, &restored).unwrap_err().to_string();
    assert!(error.contains("is not empty"), "{error}");
    let error = restore(&data.join("adapters"), &place.path().join("x")).unwrap_err().to_string();
    assert!(error.contains("is no backup"), "{error}");
    // Offline, the same.
    let error = backup(&data, &data.join("backups/second")).unwrap_err();
    assert!(matches!(error, StoreError::InUse(_)), "{error}");
    let dir = store.check();
    let made = backup(dir.path(), &place.path().join("third")).unwrap();
    assert!(made.bytes > 0);
    assert_eq!(maintain::stats(&place.path().join("third").join(LEDGER)).unwrap().interactions, 2);
}

#[test]
fn retention_keeps_the_directory_below_its_bound_and_removes_old_prompts() {
    let store = TestLedger::new();
    let bound = Retention { mebibytes: 4, ..RetentionKind::Limits.into() };
    let text = "long ".repeat(2000);
    for n in 1..=2000 {
        let mut ops = prompt_ops(n, 1);
        if let Op::Interaction(row) = &mut ops[0] {
            row.messages[1].content.clone_from(&text);
        }
        store.commit_blocking(ops).unwrap();
        store.keep_within_size(&bound, store.dir.path()).unwrap();
        let bytes = store.file_bytes().unwrap();
        assert!(bytes <= 4 << 20, "{bytes} after {n}");
    }
    let left = store.stats().unwrap().interactions;
    assert!((20..2000).contains(&left), "{left}");
    let by_age = Retention { days: 1, ..RetentionKind::Limits.into() };
    let created = store.interaction(interaction_id(2000)).unwrap().unwrap().created;
    store.keep_within_age(&by_age, created + 86_400_000).unwrap();
    assert_eq!(store.stats().unwrap().interactions, 1, "the newest is a day old");
    store.check();
}

#[test]
fn the_history_of_steps_and_versions_leaves_room_for_prompts() {
    let store = TestLedger::new();
    let base = policy(0, PolicyState::Retired);
    store.commit_blocking(vec![Op::Policy(Box::new(base))]).unwrap();
    let values: BTreeMap<_, _> = (0..40).map(|n| (format!("measurement_{n}"), 0.5)).collect();
    for first in (1..=4000).step_by(100) {
        let records = (first..first + 100).flat_map(|n| {
            let record = StepRecord { metrics: values.clone(), ..step(n, &[]) };
            let version = PolicyRecord {
                metrics: values.clone(),
                step: n,
                ..policy(n, PolicyState::Retired)
            };
            [Op::Step(Box::new(record)), Op::Policy(Box::new(version))]
        });
        store.commit_blocking(records.collect()).unwrap();
    }
    (1..=300).for_each(|n| drop(store.commit_blocking(prompt_ops(n, 1)).unwrap()));
    let bound = Retention { mebibytes: 4, ..RetentionKind::Limits.into() };
    for _ in 0..20 {
        store.keep_within_size(&bound, store.dir.path()).unwrap();
    }
    let stats = store.stats().unwrap();
    assert!(stats.steps <= 1001 && stats.interactions >= 100, "{stats:?}");
    let measured = |n| !store.policy(PolicyVersion(n)).unwrap().unwrap().metrics.is_empty();
    assert_eq!([1, 2999, 3001, 4000].map(measured), [false, false, true, true]);
    store.check();
}

#[test]
fn a_step_that_was_undone_does_not_name_groups_that_retention_removes() {
    let store = TestLedger::new();
    store.commit_blocking(prompt_ops(1, 2)).unwrap();
    store.commit_blocking(vec![Op::Group(Box::new(group(1, 1, &[10, 11], &["exact"])))]).unwrap();
    store.commit_blocking(vec![Op::Step(Box::new(step(1, &[1])))]).unwrap();
    store.commit_blocking(vec![Op::GroupState(group_id(1), GroupState::Ready)]).unwrap();
    let dropped = GroupState::Dropped("stale".to_owned());
    store.commit_blocking(vec![Op::GroupState(group_id(1), dropped)]).unwrap();
    store.commit_blocking(vec![Op::Expire(interaction_id(1))]).unwrap();
    assert_eq!(store.steps(1, 1).unwrap()[0].groups, []);
    store.check();
}

#[test]
fn limits_without_a_limit_and_tiny_bounds_are_refused() {
    let refused = |mebibytes| {
        let limits = Retention { mebibytes, ..RetentionKind::Limits.into() };
        limits.check_as("store.retention").err().map(|problem| problem.key + &problem.rest)
    };
    assert!(refused(0).unwrap().contains("without a limit"));
    let least = "store.retention: mebibytes is 15: it must be 0 for no bound, or at least 16";
    assert_eq!(refused(15).as_deref(), Some(least));
    assert_eq!(refused(16), None);
}

#[test]
fn actions_are_listed_newest_first() {
    let store = TestLedger::new();
    for target in ["1", "2", "3"] {
        let record = AuditRecord::new("ops", "policies.activate", target, json!({}), "ok");
        store.commit_blocking(vec![Op::Audit(Box::new(record))]).unwrap();
    }
    let found = store.audit(None, 2).unwrap();
    assert_eq!(found.iter().map(|r| &r.target[..]).collect::<Vec<_>>(), ["3", "2"]);
    let older = store.audit(Some(found[1].id), 9).unwrap();
    assert_eq!(older.iter().map(|r| &r.target[..]).collect::<Vec<_>>(), ["1"]);
    store.check();
}
