//! Corrections: a sample and a group of their own, counted like ratings.

use super::*;
use crate::{CorrectionEntry, FeedbackOutcome, QUARANTINED, QuarantinedKey};

fn correction(of: u64, text: &str, key: &str) -> CorrectionEntry {
    CorrectionEntry {
        interaction: interaction_id(of),
        choice: 0,
        text: text.to_owned(),
        ids: vec![7, 8, 2],
        unused: None,
        rating: None,
        comment: None,
        idempotency_key: None,
        key_id: Some(key.to_owned()),
        created: 9_000 + of,
    }
}

fn op(entry: CorrectionEntry) -> Op {
    Op::Correction(Box::new(entry))
}

/// The groups of corrections of a prompt.
fn groups(store: &Store, of: u64) -> Vec<Group> {
    let mut found = store.groups_of(interaction_id(of)).unwrap();
    found.retain(Group::is_correction);
    found
}

#[test]
fn a_correction_is_a_sample_with_a_group_of_its_own() {
    let store = TestLedger::with_prompts();
    let entry = CorrectionEntry {
        rating: Some(thumbs(1, 0.0, 5)),
        comment: Some("wrong sum".to_owned()),
        ..correction(1, "five", "alice")
    };
    let outcome = store.commit_blocking(vec![op(entry)]).unwrap().feedback;
    assert_eq!(outcome, [FeedbackOutcome::Recorded(sample_id(10))]);
    let [group] = &groups(&store, 1)[..] else { panic!() };
    assert_eq!((&group.state, group.route.as_str()), (&GroupState::Ready, "default"));
    let sample = store.sample(group.members[0]).unwrap().unwrap();
    assert_eq!((sample.origin, sample.text.as_str()), (SampleOrigin::Correction, "five"));
    assert_eq!((&sample.ids[..], sample.logprobs.len()), (&[7, 8, 2][..], 0));
    assert_eq!(sample.version, served(10, 1).version);
    let row = store.correction(sample.id).unwrap().unwrap();
    assert_eq!((row.key_id.as_deref(), row.sample), (Some("alice"), sample_id(10)));
    assert_eq!(row.comment.as_deref(), Some("wrong sum"));
    // The rating waits as if it had been posted alone, and the correction has no rating.
    assert_eq!(ungrouped(&store), [(sample_id(10), "thumbs".to_owned())]);
    assert_eq!(store.rewards_of(sample.id).unwrap(), []);
    assert_eq!(
        (store.metrics.feedback_received.get(), store.metrics.feedback_waiting.get()),
        (1, 1)
    );
    assert_eq!(store.ready_groups(9).unwrap().len(), 1);
    store.check_corrections(1, &[]);
}

#[test]
fn every_correction_is_received_and_ends_once() {
    let store = TestLedger::with_prompts();
    let commit = |ops: Vec<Op>| drop(store.commit_blocking(ops).unwrap());
    let step = |n, groups: &[&Group]| {
        let groups = groups.iter().map(|group| group.id).collect();
        Op::Step(Box::new(StepRecord { groups, ..step(n, &[]) }))
    };
    // Replaced while it waits, by the same client only.
    commit(vec![op(correction(1, "a", "alice")), op(correction(1, "b", "bob"))]);
    commit(vec![op(correction(1, "c", "alice"))]);
    let all = groups(&store, 1);
    let ready = |group: &&Group| group.state == GroupState::Ready;
    assert_eq!((all.len(), all.iter().filter(ready).count()), (3, 2));
    // Trained on; then the step is undone, and its correction waits and is trained on again.
    let waiting: Vec<&Group> = all.iter().filter(ready).collect();
    commit(vec![step(1, &waiting)]);
    commit(vec![Op::GroupState(waiting[0].id, GroupState::Ready)]);
    commit(vec![step(2, &waiting[..1])]);
    // After that, a further correction waits.
    commit(vec![op(correction(1, "d", "alice"))]);
    // Never trained on.
    let unused = Some("unchanged".to_owned());
    commit(vec![op(CorrectionEntry { unused, ..correction(2, "same", "alice") })]);
    // Quarantined, released and waiting again.
    commit(vec![op(correction(3, "e", "mallory"))]);
    let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: String::new(), since: 1 };
    let dropped = GroupState::Dropped(QUARANTINED.to_owned());
    commit(vec![Op::Quarantine(row), Op::GroupState(groups(&store, 3)[0].id, dropped)]);
    commit(vec![Op::Release("mallory".to_owned())]);
    assert_eq!(groups(&store, 3)[0].state, GroupState::Ready);
    assert_eq!(store.metrics.feedback_received.get(), 0, "no rating was posted");
    let outcomes = [("replaced", 1), ("trained", 3), ("unchanged", 1), (QUARANTINED, 1)];
    store.check_corrections(8, &outcomes);
}

#[test]
fn a_correction_is_recorded_once_and_only_for_a_served_choice() {
    let store = TestLedger::with_prompts();
    let outcome = |entry| store.commit_blocking(vec![op(entry)]).unwrap().feedback;
    assert_eq!(outcome(correction(9, "a", "alice")), [FeedbackOutcome::UnknownCompletion]);
    let choice = CorrectionEntry { choice: 4, ..correction(1, "a", "alice") };
    assert_eq!(outcome(choice), [FeedbackOutcome::UnknownChoice]);
    assert_eq!(store.stats().unwrap().feedback, 0);
    let once = |of, text| CorrectionEntry {
        idempotency_key: Some("once".to_owned()),
        rating: Some(thumbs(of, 0.0, 5)),
        ..correction(of, text, "alice")
    };
    assert_eq!(outcome(once(1, "a")), [FeedbackOutcome::Recorded(sample_id(10))]);
    assert_eq!(outcome(once(1, "a")), [FeedbackOutcome::Duplicate(sample_id(10))]);
    assert_eq!(outcome(once(1, "b")), [FeedbackOutcome::Reused]);
    assert_eq!(outcome(once(2, "a")), [FeedbackOutcome::Reused]);
    let unrated = CorrectionEntry { rating: None, ..once(1, "a") };
    assert_eq!(outcome(unrated), [FeedbackOutcome::Reused]);
    assert_eq!((groups(&store, 2).len(), store.metrics.feedback_received.get()), (0, 1));
    store.check_corrections(1, &[]);
}
