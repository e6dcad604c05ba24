//! Ratings are counted when they arrive and when their outcome is final.

use super::*;
use crate::{FeedbackOutcome, MERGED, QUARANTINED, QuarantinedKey};

fn state(n: u64, state: GroupState) -> Op {
    Op::GroupState(group_id(n), state)
}

fn dropped(n: u64, why: &str) -> Op {
    state(n, GroupState::Dropped(why.to_owned()))
}

fn ready(n: u64, of: u64, members: &[u64], parts: &[&str]) -> Op {
    Op::Group(Box::new(group(n, of, members, parts)))
}

#[test]
fn each_key_has_its_own_newest_ratings() {
    let store = TestLedger::with_prompts();
    let by = |key: Option<&str>, of, name: &str, value, at| {
        let key_id = key.map(str::to_owned);
        feedback(FeedbackEntry { key_id, name: name.to_owned(), ..thumbs(of, value, at) })
    };
    let (alice, bob) = (Some("alice"), Some("bob"));
    let ops = vec![
        by(alice, 1, "thumbs", 0.0, 1),
        by(bob, 1, "thumbs", 0.5, 2),
        by(alice, 1, "stars", 4.0, 3),
        by(alice, 1, "thumbs", 1.0, 4),
        by(alice, 2, "thumbs", 0.25, 5),
        by(None, 1, "thumbs", 0.75, 6),
    ];
    store.commit_blocking(ops).unwrap();
    let of = |n, key| -> Vec<(String, f64)> {
        let rows = store.ratings_by(sample_id(n), key).unwrap();
        assert!(rows.iter().all(|row| row.key_id.as_deref() == key));
        rows.into_iter().map(|row| (row.name, row.value.unwrap())).collect()
    };
    let row = |name: &str, value| (name.to_owned(), value);
    assert_eq!(of(10, alice), [row("stars", 4.0), row("thumbs", 1.0)]);
    assert_eq!(of(10, bob), [row("thumbs", 0.5)]);
    assert_eq!(of(10, None), [row("thumbs", 0.75)]);
    assert_eq!(of(20, alice), [row("thumbs", 0.25)]);
    assert!(of(30, alice).is_empty());
}

#[test]
fn every_rating_is_received_and_ends_once() {
    let store = TestLedger::with_prompts();
    let commit = |ops: Vec<Op>| drop(store.commit_blocking(ops).unwrap());
    let rate = |of, value, at| commit(vec![feedback(thumbs(of, value, at))]);
    // Trained, then the same value again.
    rate(1, 1.0, 1);
    commit(vec![ready(1, 1, &[10], &["exact", "thumbs"])]);
    commit(vec![Op::Step(Box::new(step(1, &[1])))]);
    rate(1, 1.0, 2);
    // Replaced before and after it is grouped, then stale.
    rate(2, 1.0, 3);
    rate(2, 0.0, 4);
    commit(vec![ready(2, 2, &[20], &["thumbs"])]);
    rate(2, 1.0, 5);
    commit(vec![dropped(2, "stale")]);
    // Dropped as soon as it is grouped.
    rate(3, 1.0, 6);
    let unknown = GroupState::Dropped("unknown_part".to_owned());
    commit(vec![Op::Group(Box::new(Group { state: unknown, ..group(3, 3, &[30], &["thumbs"]) }))]);
    // A tie, which has no value, and a comment.
    let tie = FeedbackEntry {
        aggregate: Aggregate::Majority,
        key_id: Some("b".to_owned()),
        ..thumbs(4, 0.0, 8)
    };
    commit(vec![
        feedback(FeedbackEntry { aggregate: Aggregate::Majority, ..thumbs(4, 1.0, 7) }),
        feedback(tie),
    ]);
    let comment = FeedbackEntry { value: None, ..thumbs(4, 0.0, 9) };
    commit(vec![feedback(FeedbackEntry { name: "remark".to_owned(), ..comment })]);
    // Quarantined, released and waiting again.
    let entry = FeedbackEntry { key_id: Some("mallory".to_owned()), ..thumbs(5, 1.0, 10) };
    commit(vec![feedback(entry), ready(5, 5, &[50], &["thumbs"])]);
    let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: String::new(), since: 1 };
    commit(vec![Op::Quarantine(row), dropped(5, QUARANTINED)]);
    commit(vec![Op::Release("mallory".to_owned())]);
    let outcomes = [
        ("trained", 1),
        ("repeated", 1),
        ("replaced", 3),
        ("stale", 1),
        ("unknown_part", 1),
        ("tied", 1),
        ("comment", 1),
        (QUARANTINED, 1),
    ];
    store.check_ratings(11, &outcomes);
}

#[test]
fn a_rating_that_toggles_is_trained_on_twice_at_most() {
    let store = TestLedger::with_prompts();
    let mut trained = 0;
    for at in 1..=50 {
        store.commit_blocking(vec![feedback(thumbs(1, (at % 2) as f64, at))]).unwrap();
        if !ungrouped(&store).is_empty() {
            trained += 1;
            let step = Op::Step(Box::new(step(trained, &[trained])));
            store.commit_blocking(vec![ready(trained, 1, &[10], &["thumbs"]), step]).unwrap();
        }
    }
    assert_eq!(trained, 2);
    store.check_ratings(50, &[("trained", 2), ("repeated", 48)]);
}

#[test]
fn ratings_of_quarantined_keys_in_a_trained_group_are_not_trained() {
    let store = TestLedger::with_prompts();
    let by = |of, key: &str| {
        feedback(FeedbackEntry { key_id: Some(key.to_owned()), ..thumbs(of, 1.0, of) })
    };
    let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: String::new(), since: 1 };
    let both = ready(1, 1, &[10, 20], &["thumbs"]);
    let step = Op::Step(Box::new(step(1, &[1])));
    let ops = vec![by(1, "alice"), by(2, "mallory"), both, Op::Quarantine(row), step];
    store.commit_blocking(ops).unwrap();
    store.check_ratings(2, &[("trained", 1), (QUARANTINED, 1)]);
}

#[test]
fn a_merger_is_no_outcome() {
    let store = TestLedger::with_prompts();
    let rate = |of| feedback(thumbs(of, 1.0, of));
    store.commit_blocking(vec![rate(1), ready(1, 1, &[10], &["thumbs"]), rate(2)]).unwrap();
    let merged = vec![ready(2, 1, &[10, 20], &["thumbs"]), dropped(1, MERGED)];
    store.commit_blocking(merged).unwrap();
    assert_eq!(ungrouped(&store), []);
    // The group belongs to both prompts, so a new value of the second member does not wait.
    assert_eq!(store.groups_of(interaction_id(2)).unwrap().len(), 1);
    store.commit_blocking(vec![feedback(thumbs(2, 0.0, 9))]).unwrap();
    assert_eq!(ungrouped(&store), []);
    // A step that was skipped meanwhile does not drop the first group again.
    store.commit_blocking(vec![dropped(1, "non_finite")]).unwrap();
    let first = store.group(group_id(1)).unwrap().unwrap();
    assert_eq!(first.state, GroupState::Dropped(MERGED.to_owned()));
    store.commit_blocking(vec![Op::Step(Box::new(step(1, &[2])))]).unwrap();
    store.check_ratings(3, &[("trained", 2), ("replaced", 1)]);
}

#[test]
fn a_group_that_a_step_used_before_its_merger_is_trained_on_once() {
    let store = TestLedger::with_prompts();
    let rate =
        |of, name: &str| feedback(FeedbackEntry { name: name.to_owned(), ..thumbs(of, 1.0, of) });
    let ops = vec![
        rate(1, "thumbs"),
        ready(1, 1, &[10], &["thumbs"]),
        rate(1, "stars"),
        rate(2, "thumbs"),
        rate(2, "stars"),
        ready(2, 1, &[10, 20], &["thumbs", "stars"]),
        dropped(1, MERGED),
        // The step began before.
        Op::Step(Box::new(step(1, &[1]))),
    ];
    store.commit_blocking(ops).unwrap();
    let other = store.group(group_id(2)).unwrap().unwrap();
    assert_eq!((&other.members[..], &other.state), (&[sample_id(20)][..], &GroupState::Ready));
    assert_eq!(other.oldest_version, PolicyVersion(2));
    assert_eq!(ungrouped(&store), [(sample_id(10), "stars".to_owned())]);
    store.check_ratings(4, &[("trained", 1)]);
}

#[test]
fn members_leave_a_ready_group_with_a_reason() {
    let store = TestLedger::with_prompts();
    let rate = |of| feedback(thumbs(of, 1.0, of));
    let all = ready(1, 1, &[10, 20, 30], &["thumbs"]);
    let leave = |members: &[u64], reason: &str| Op::DropMembers {
        group: group_id(1),
        members: members.iter().map(|n| sample_id(*n)).collect(),
        reason: reason.to_owned(),
    };
    let ops = vec![rate(1), rate(2), rate(3), all, leave(&[10, 99], "stale")];
    store.commit_blocking(ops).unwrap();
    // As when a commit is repeated.
    store.commit_blocking(vec![leave(&[10], "stale")]).unwrap();
    let group = store.group(group_id(1)).unwrap().unwrap();
    assert_eq!(
        (group.members, group.state),
        (vec![sample_id(20), sample_id(30)], GroupState::Ready)
    );
    assert_eq!(group.oldest_version, PolicyVersion(0), "that of sample 30");
    let [first, own] = &store.groups_of(interaction_id(1)).unwrap()[..] else { panic!() };
    assert_eq!((first.id, &own.members[..]), (group_id(1), &[sample_id(10)][..]));
    assert_eq!(own.state, GroupState::Dropped("stale".to_owned()));
    store.commit_blocking(vec![leave(&[20, 30], "abandoned")]).unwrap();
    store.commit_blocking(vec![leave(&[20, 30], "stale")]).unwrap();
    assert_eq!(store.ready_groups(9).unwrap(), []);
    store.check_ratings(3, &[("stale", 1), ("abandoned", 2)]);
}

#[test]
fn a_prompt_whose_members_left_a_group_does_not_find_it() {
    for expired in [[1, 2, 3], [3, 2, 1], [2, 3, 1], [2, 1, 3], [3, 1, 2], [1, 3, 2]] {
        for reached in 1..=3 {
            let store = TestLedger::with_prompts();
            let rate = |of| feedback(thumbs(of, 1.0, of));
            let leave = Op::DropMembers {
                group: group_id(1),
                members: vec![sample_id(10), sample_id(30)],
                reason: "stale".to_owned(),
            };
            let all = ready(1, 1, &[10, 20, 30], &["thumbs"]);
            store.commit_blocking(vec![rate(1), rate(2), rate(3), all, leave]).unwrap();
            let expire = expired[..reached].iter().map(|n| Op::Expire(interaction_id(*n)));
            store.commit_blocking(expire.collect()).unwrap();
            store.check();
        }
    }
}

#[test]
fn a_preference_is_recorded_as_a_whole() {
    let store = TestLedger::with_prompts();
    let pair = |first, second, at| {
        let key = Some("once".to_owned());
        let [chosen, rejected] = [thumbs(first, 1.0, at), thumbs(second, 0.0, at)];
        Op::Feedback(vec![FeedbackEntry { idempotency_key: key, ..chosen }, rejected])
    };
    let outcome = |op| store.commit_blocking(vec![op]).unwrap().feedback;
    assert_eq!(outcome(pair(1, 9, 1)), [FeedbackOutcome::UnknownCompletion]);
    assert_eq!(store.stats().unwrap().feedback, 0, "its first half is not recorded either");
    assert_eq!(outcome(pair(1, 2, 2)), [FeedbackOutcome::Recorded(sample_id(10))]);
    assert_eq!(outcome(pair(1, 2, 3)), [FeedbackOutcome::Duplicate(sample_id(10))]);
    assert_eq!(outcome(pair(2, 1, 3)), [FeedbackOutcome::Reused]);
    let values = [10, 20].map(|n| store.rewards_of(sample_id(n)).unwrap()[1].value);
    assert_eq!(values, [Some(1.0), Some(0.0)]);
    assert_eq!(ungrouped(&store).len(), 2);
    store.check_ratings(2, &[]);
}

#[test]
fn a_group_that_was_trained_on_before_its_merger_keeps_its_members() {
    let store = TestLedger::with_prompts();
    let rate = |of| feedback(thumbs(of, 1.0, of));
    let ops = vec![
        rate(1),
        ready(1, 1, &[10], &["thumbs"]),
        rate(2),
        // The step is recorded after the sweep read the ready groups.
        Op::Step(Box::new(step(1, &[1]))),
        ready(2, 1, &[10, 20], &["thumbs"]),
        dropped(1, MERGED),
    ];
    store.commit_blocking(ops).unwrap();
    assert_eq!(store.group(group_id(1)).unwrap().unwrap().state, GroupState::Trained(1));
    let [other] = &store.ready_groups(9).unwrap()[..] else { panic!() };
    assert_eq!((other.id, &other.members[..]), (group_id(2), &[sample_id(20)][..]));
    store.check_ratings(2, &[("trained", 1)]);
}

#[test]
fn many_posts_on_one_completion_are_combined_once() {
    let store = TestLedger::with_prompts();
    let by = |rater: u64, value| {
        let key_id = Some(format!("key.{rater:05}"));
        feedback(FeedbackEntry { key_id, aggregate: Aggregate::Mean, ..thumbs(1, value, rater) })
    };
    // The work for each post does not grow with the number of raters: 100 as well as 6,000.
    store.commit_blocking(Vec::new()).unwrap();
    let combined = || store.metrics.store_records.with_label_values(&["rewards"]).get();
    let mut raters = 0;
    for more in [100, 5_900] {
        let before = combined();
        let posts = (raters..raters + more).map(|rater| by(rater, (rater % 2) as f64)).collect();
        store.commit_blocking(posts).unwrap();
        raters += more;
        assert_eq!(combined(), before + 1, "one commit combines the ratings once");
    }
    let value = || {
        let rewards = store.rewards_of(sample_id(10)).unwrap();
        rewards.into_iter().find(|reward| reward.name == "thumbs").unwrap().value
    };
    let is_near = |expected: f64| (value().unwrap() - expected).abs() < 1e-9;
    assert!(is_near(0.5));
    // A write that needs the combined value sees it within the commit.
    let ops = vec![by(1, 0.0), ready(1, 1, &[10], &["thumbs"]), by(3, 0.0)];
    store.commit_blocking(ops).unwrap();
    assert!(is_near(2_998.0 / 6_000.0));
    store.check_ratings(6_002, &[("replaced", 6_001)]);
}
