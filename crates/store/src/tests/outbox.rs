//! Outboxes, intakes and replays.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::format::codec::{decode, encode};
use crate::op::{LoggedBatch, TakeIn};
use crate::{
    CorrectionEntry, ErasureFilter, FeedbackOutcome, Outbox, OutboxBatch, QuarantinedKey, SHIPPED,
    backup, format, restore,
};

fn try_open(path: &Path, outbox: Option<Outbox>) -> Result<Store, StoreError> {
    Store::open(
        path,
        &StoreConfig { group_commit_ms: 0, outbox, ..StoreConfig::default() },
        metrics(),
    )
}

fn ledger(outbox: Outbox) -> TestLedger {
    let (dir, metrics) = (tempfile::tempdir().unwrap(), metrics());
    let config = StoreConfig { group_commit_ms: 0, outbox: Some(outbox), ..StoreConfig::default() };
    let store = Store::open(&dir.path().join("ledger.redb"), &config, metrics.clone()).unwrap();
    TestLedger { dir, store, metrics }
}

fn log(store: &Store) -> Uuid {
    store.outbox_state().unwrap().unwrap().log
}

fn batches(store: &Store, after: u64) -> Vec<OutboxBatch> {
    store.outbox(after, usize::MAX).unwrap()
}

fn take_in(
    store: &Store,
    from: &Store,
    batches: Vec<OutboxBatch>,
) -> Result<crate::Committed, StoreError> {
    futures::executor::block_on(store.take_in(log(from), batches))
}

fn replay(store: &Store, batches: &[OutboxBatch]) -> Result<(), StoreError> {
    futures::executor::block_on(store.replay(batches.to_vec()))
}

/// Removes the batches from the outbox, as if they were put into a fleet's store.
fn ship(store: &Store) -> Vec<OutboxBatch> {
    let batches = batches(store, 0);
    store.commit_blocking(vec![Op::Shipped(u64::MAX)]).unwrap();
    batches
}

fn content(store: &Store) -> BTreeMap<&'static str, Vec<String>> {
    format::dump(&store.inner.file.snapshot().unwrap()).unwrap()
}

fn rate(of: u64, value: f64, created: u64) -> Op {
    feedback(thumbs(of, value, created))
}

#[test]
fn without_an_outbox_nothing_is_recorded() {
    let store = TestLedger::with_prompts();
    store.flush_blocking();
    assert_eq!((store.outbox_state().unwrap(), batches(&store, 0)), (None, vec![]));
}

impl TestLedger {
    fn flush_blocking(&self) {
        self.commit_blocking(Vec::new()).unwrap();
    }
}

#[test]
fn an_outbox_has_what_others_need_until_it_is_shipped() {
    let store = ledger(Outbox::Server);
    store.commit_blocking(prompt_ops(1, 0)).unwrap();
    let audit = crate::AuditRecord::new("command", "x", "", serde_json::Value::Null, "ok");
    let unshipped = vec![
        Op::Audit(Box::new(audit)),
        Op::Policy(Box::new(policy(0, PolicyState::Active))),
        // It has no prompt.
        Op::Sample(Box::new(served(90, 9))),
    ];
    store.commit_blocking(unshipped).unwrap();
    store.commit_blocking(vec![rate(1, 1.0, 1)]).unwrap();
    let all = batches(&store, 0);
    assert_eq!(all.iter().map(|batch| batch.sequence).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(store.outbox(0, 1).unwrap(), all[..1]);
    assert_eq!(batches(&store, 1), all[1..]);
    assert_eq!(decode::<LoggedBatch>(&all[0].bytes).unwrap().ops.len(), 3);
    let since = store.outbox_state().unwrap().unwrap().oldest.unwrap();
    assert!(hone_core::types::now_ms() - since < 60_000);
    store.commit_blocking(vec![Op::Shipped(1)]).unwrap();
    let state = store.outbox_state().unwrap().unwrap();
    assert_eq!((state.shipped, state.last, batches(&store, 0)), (1, 2, all[1..].to_vec()));
    store.commit_blocking(vec![Op::Shipped(9)]).unwrap();
    store.commit_blocking(vec![rate(1, 0.0, 2)]).unwrap();
    assert_eq!(batches(&store, 0)[0].sequence, 3);
    store.check();
}

#[test]
fn a_ledger_stays_a_servers_or_a_trainers_until_it_leaves_the_fleet() {
    let TestLedger { dir, store, .. } = ledger(Outbox::Server);
    let path = dir.path().join("ledger.redb");
    store.commit_blocking(prompt_ops(1, 0)).unwrap();
    let own = store.outbox_state().unwrap();
    drop(store);
    for outbox in [None, Some(Outbox::Server)] {
        assert_eq!(try_open(&path, outbox).unwrap().outbox_state().unwrap(), own);
    }
    let refused = try_open(&path, Some(Outbox::Trainer)).err();
    assert!(matches!(refused, Some(StoreError::Unusable(_))), "{refused:?}");
    let store = try_open(&path, Some(Outbox::Off)).unwrap();
    assert_eq!((store.outbox_state().unwrap(), batches(&store, 0)), (None, vec![]));
    drop(store);
    let store = try_open(&path, Some(Outbox::Trainer)).unwrap();
    assert_eq!((log(&store), store.outbox_state().unwrap().unwrap().last), (Uuid::nil(), 0));
}

#[test]
fn a_restored_server_begins_another_log_and_a_restored_trainer_continues() {
    for outbox in [Outbox::Server, Outbox::Trainer] {
        let TestLedger { dir, store, .. } = ledger(outbox);
        store.commit_blocking(prompt_ops(1, 0)).unwrap();
        store.commit_blocking(vec![Op::Shipped(1)]).unwrap();
        store.commit_blocking(prompt_ops(2, 0)).unwrap();
        let own = store.outbox_state().unwrap();
        drop(store);
        let to = tempfile::tempdir().unwrap();
        let (copy, data) = (to.path().join("copy"), to.path().join("data"));
        backup(dir.path(), &copy).unwrap();
        assert!(restore(&copy, &data).unwrap().is_healthy());
        let path = data.join("ledger.redb");
        let restored = try_open(&path, None).unwrap().outbox_state().unwrap();
        assert_eq!(restored, own.clone().filter(|_| outbox == Outbox::Trainer));
        let store = try_open(&path, Some(outbox)).unwrap();
        assert_eq!(log(&store) == own.unwrap().log, outbox == Outbox::Trainer);
    }
}

#[test]
fn a_replay_continues_the_log() {
    let trainer = ledger(Outbox::Trainer);
    for n in 1..=3 {
        trainer.commit_blocking(prompt_ops(n, 0)).unwrap();
    }
    let all = batches(&trainer, 0);
    let replica = ledger(Outbox::Trainer);
    let gap = StoreError::Gap(Uuid::nil(), 1, 2);
    assert_eq!(replay(&replica, &all[1..]), Err(gap));
    replay(&replica, &all[..2]).unwrap();
    replay(&replica, &all[..2]).unwrap();
    let state = replica.outbox_state().unwrap().unwrap();
    assert_eq!((state.shipped, state.last, batches(&replica, 0)), (2, 2, vec![]));
    replica.commit_blocking(prompt_ops(4, 0)).unwrap();
    assert_eq!(batches(&replica, 0)[0].sequence, 3);
    assert!(matches!(replay(&replica, &all), Err(StoreError::Gap(..))), "it differs from the log");
    let policy = Op::Policy(Box::new(policy(1, PolicyState::Canary)));
    let base = Op::Policy(Box::new(super::policy(0, PolicyState::Active)));
    trainer.commit_blocking(vec![base, policy]).unwrap();
    let standby = ledger(Outbox::Trainer);
    replay(&standby, &batches(&trainer, 0)).unwrap();
    assert_eq!(standby.lineage().canary(), Some(PolicyVersion(1)));
    standby.check();
}

#[test]
fn nothing_waits_on_a_server() {
    let store = ledger(Outbox::Server);
    store.commit_blocking(prompt_ops(1, 1)).unwrap();
    store.commit_blocking(vec![rate(1, 1.0, 1)]).unwrap();
    store
        .commit_blocking(vec![Op::Group(Box::new(group(1, 1, &[10, 11], &["exact", "thumbs"])))])
        .unwrap();
    let found = store.group(group_id(1)).unwrap().unwrap();
    assert_eq!(found.state, GroupState::Dropped(SHIPPED.to_owned()));
    assert_eq!((ungrouped(&store), store.ready_groups(9).unwrap()), (vec![], vec![]));
    let done = store.commit_blocking(vec![rate(2, 1.0, 2)]).unwrap();
    assert_eq!(done.feedback, [FeedbackOutcome::Forwarded]);
    let trainer = ledger(Outbox::Trainer);
    let taken = take_in(&trainer, &store, batches(&store, 0)).unwrap();
    assert_eq!((taken.ratings.len(), taken.ratings[0].2), (1, served(10, 1).version));
    assert_eq!(trainer.ready_groups(9).unwrap().len(), 1);
    assert_eq!(trainer.held_feedback().unwrap(), 1);
    assert_eq!(store.metrics.feedback_waiting.get(), 0);
    trainer.check();
    store.check();
}

#[test]
fn batches_are_taken_in_once_and_in_order() {
    let (server, trainer) = (ledger(Outbox::Server), ledger(Outbox::Trainer));
    for n in 1..=4 {
        server.commit_blocking(prompt_ops(n, 0)).unwrap();
    }
    let all = batches(&server, 0);
    take_in(&trainer, &server, all[..2].to_vec()).unwrap();
    let gap = StoreError::Gap(log(&server), 3, 4);
    assert_eq!(take_in(&trainer, &server, all[3..].to_vec()), Err(gap));
    take_in(&trainer, &server, all.clone()).unwrap();
    take_in(&trainer, &server, all[..3].to_vec()).unwrap();
    assert_eq!(trainer.intake_positions().unwrap(), BTreeMap::from([(log(&server), 4)]));
    assert_eq!(trainer.stats().unwrap().interactions, 4);
    assert_eq!(batches(&trainer, 0).len(), 2, "a repeated batch leaves no trace");
    trainer.check();
}

#[test]
fn held_feedback_is_released_or_expires() {
    let (a, b, trainer) = (ledger(Outbox::Server), ledger(Outbox::Server), ledger(Outbox::Trainer));
    a.commit_blocking(prompt_ops(1, 0)).unwrap();
    let pair = Op::Feedback(vec![thumbs(1, 1.0, 5), thumbs(2, 0.0, 5)]);
    b.commit_blocking(vec![rate(1, 1.0, 4), pair, rate(3, 1.0, 6)]).unwrap();
    take_in(&trainer, &b, batches(&b, 0)).unwrap();
    assert_eq!(trainer.held_feedback().unwrap(), 3);
    let taken = take_in(&trainer, &a, batches(&a, 0)).unwrap();
    assert_eq!((taken.ratings.len(), trainer.held_feedback().unwrap()), (1, 2));
    a.commit_blocking(prompt_ops(2, 0)).unwrap();
    let taken = take_in(&trainer, &a, batches(&a, 0)).unwrap();
    assert_eq!((taken.ratings.len(), trainer.held_feedback().unwrap()), (2, 1));
    trainer.commit_blocking(vec![Op::ExpireHeld(u64::MAX)]).unwrap();
    assert_eq!(trainer.held_feedback().unwrap(), 0);
    assert_eq!(trainer.metrics.store_dropped.with_label_values(&["held"]).get(), 1);
    trainer.check();
}

#[test]
fn an_erasure_reaches_what_is_not_shipped() {
    let (server, trainer) = (ledger(Outbox::Server), ledger(Outbox::Trainer));
    let mut secret = prompt_ops(1, 0);
    if let Op::Sample(row) = &mut secret[1] {
        row.text = "quagga".to_owned();
    }
    server.commit_blocking(secret.clone()).unwrap();
    server.commit_blocking(prompt_ops(2, 0)).unwrap();
    let remark =
        |of, text: &str| FeedbackEntry { comment: Some(text.to_owned()), ..thumbs(of, 1.0, 5) };
    let pair = Op::Feedback(vec![remark(1, "quagga one"), remark(2, "pair")]);
    server.commit_blocking(vec![pair, feedback(remark(2, "kept"))]).unwrap();
    server.commit_blocking(vec![feedback(remark(7, "quagga two"))]).unwrap();
    take_in(&trainer, &server, batches(&server, 0)).unwrap();
    assert_eq!(trainer.held_feedback().unwrap(), 1);
    let unerased = batches(&server, 0);
    let forwarded = decode::<LoggedBatch>(&batches(&server, 3)[0].bytes).unwrap().ops[0].1;
    let erase = vec![Op::Erase(interaction_id(1), 9), Op::EraseFeedback(forwarded)];
    for store in [&server, &trainer] {
        store.commit_blocking(erase.clone()).unwrap();
        // A completion that ended after the erasure is not shipped either.
        store.commit_blocking(secret.clone()).unwrap();
        let has = |text: &str| {
            let at = |batch: &OutboxBatch| {
                batch.bytes.windows(text.len()).any(|at| at == text.as_bytes())
            };
            batches(store, 0).iter().any(at)
        };
        assert_eq!([has("quagga"), has("pair"), has("kept")], [false, false, true]);
    }
    assert_eq!(trainer.held_feedback().unwrap(), 0);
    // A trainer that takes all in at once.
    let late = ledger(Outbox::Trainer);
    let erased = batches(&server, unerased.len() as u64);
    take_in(&late, &server, [unerased, erased].concat()).unwrap();
    let bytes = batches(&late, 0).remove(0).bytes;
    assert!(!bytes.windows(6).any(|text| text == b"quagga"));
    late.check();
    let replica = ledger(Outbox::Trainer);
    replay(&replica, &batches(&trainer, 0)).unwrap();
    assert_eq!(replica.ratings_of(sample_id(20), "thumbs").unwrap().len(), 1);
    assert_eq!(replica.stats().unwrap().interactions, 1);
    for store in [replica, trainer, server] {
        store.check();
    }
}

#[test]
fn an_erasure_by_a_raters_key_finds_posts_without_a_row() {
    let (server, trainer) = (ledger(Outbox::Server), ledger(Outbox::Trainer));
    let by_key = FeedbackEntry { key_id: Some("k".to_owned()), ..thumbs(7, 1.0, 5) };
    server.commit_blocking(vec![Op::Feedback(vec![by_key])]).unwrap();
    take_in(&trainer, &server, batches(&server, 0)).unwrap();
    for store in [&server, &trainer] {
        let erased = store.erase(&ErasureFilter::Key("k".to_owned()), u64::MAX, false).unwrap();
        assert_eq!(erased.feedback, 1);
    }
    let left: LoggedBatch = decode(&batches(&server, 0)[0].bytes).unwrap();
    assert_eq!((left.ops.len(), trainer.held_feedback().unwrap()), (0, 0));
}

#[test]
fn a_batch_that_lost_operations_is_still_the_one_that_was_shipped() {
    let server = ledger(Outbox::Server);
    let others = |by: &str, of| FeedbackEntry { key_id: Some(by.to_owned()), ..thumbs(of, 1.0, 5) };
    let posts = [("k", 7), ("l", 8)].map(|(by, of)| Op::Feedback(vec![others(by, of)]));
    server.commit_blocking(posts.to_vec()).unwrap();
    let shipped = batches(&server, 0).remove(0);
    server.erase(&ErasureFilter::Key("k".to_owned()), 0, false).unwrap();
    assert_eq!(batches(&server, 0)[0], shipped, "it was made after the bound");
    server.erase(&ErasureFilter::Key("k".to_owned()), u64::MAX, false).unwrap();
    let left = batches(&server, 0).remove(0);
    assert_ne!(left, shipped);
    assert!(left.is_rest_of(&shipped) && !shipped.is_rest_of(&left));
    let other = ledger(Outbox::Server);
    other.commit_blocking(posts.to_vec()).unwrap();
    assert!(!batches(&other, 0)[0].is_rest_of(&shipped));
}

#[test]
fn requests_of_a_canary_reach_the_trainer_once_and_no_table() {
    let (server, trainer) = (ledger(Outbox::Server), ledger(Outbox::Trainer));
    let counts = [(PolicyVersion(3), crate::AnswerCounts { requests: 5, failures: 1 })];
    let before = content(&trainer);
    server.commit_blocking(vec![Op::Answers(counts.into())]).unwrap();
    assert_eq!(take_in(&trainer, &server, batches(&server, 0)).unwrap().answers, counts);
    assert_eq!(take_in(&trainer, &server, batches(&server, 0)).unwrap().answers, []);
    let changed: Vec<_> = content(&trainer)
        .into_iter()
        .filter(|(table, rows)| before.get(table) != Some(rows))
        .map(|(table, _)| table)
        .collect();
    assert!(
        changed.iter().all(|table| ["outbox", "intake_positions"].contains(table)),
        "{changed:?}"
    );
}

/// What a server or the trainer does.
#[derive(Clone, Debug)]
enum Action {
    Prompt {
        server: usize,
        n: u64,
    },
    Rate {
        server: usize,
        of: u64,
        also: Option<u64>,
        rater: u8,
        key: Option<u8>,
        value: i8,
    },
    Correct {
        server: usize,
        of: u64,
    },
    Erase {
        server: usize,
        of: u64,
    },
    Group {
        server: usize,
        of: u64,
    },
    /// The trainer takes in this number of batches, some of which it has.
    TakeIn {
        server: usize,
        back: u64,
        count: usize,
    },
    Step,
    DropMembers,
    Expire {
        before: u64,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let server = || 0..3_usize;
    prop_oneof![
        3 => (server(), 0..4_u64).prop_map(|(server, n)| Action::Prompt { server, n }),
        5 => (server(), 0..13_u64, proptest::option::of(0..13_u64), 0..3_u8,
              proptest::option::of(0..3_u8), 0..2_i8)
            .prop_map(|(server, of, also, rater, key, value)| Action::Rate { server, of, also, rater, key, value }),
        1 => (server(), 0..13_u64).prop_map(|(server, of)| Action::Correct { server, of }),
        1 => (server(), 0..13_u64).prop_map(|(server, of)| Action::Erase { server, of }),
        2 => (server(), 0..13_u64).prop_map(|(server, of)| Action::Group { server, of }),
        5 => (server(), 0..3_u64, 1..5_usize)
            .prop_map(|(server, back, count)| Action::TakeIn { server, back, count }),
        1 => Just(Action::Step),
        1 => Just(Action::DropMembers),
        1 => (0..2_u64).prop_map(|all| Action::Expire { before: all * u64::MAX }),
    ]
}

fn correction(of: u64) -> Op {
    Op::Correction(Box::new(CorrectionEntry {
        interaction: interaction_id(of),
        choice: 0,
        text: "better".to_owned(),
        ids: vec![1],
        unused: None,
        rating: Some(thumbs(of, 0.0, 8)),
        comment: None,
        idempotency_key: None,
        key_id: None,
        created: 9,
    }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn a_replay_of_the_trainers_outbox_gives_the_same_ledger(
        actions in proptest::collection::vec(action(), 1..50), step in 1..6_usize,
    ) {
        let servers = [Outbox::Server; 3].map(ledger);
        let (trainer, mut logged) = (ledger(Outbox::Trainer), Vec::new());
        for (clock, action) in (1..).zip(actions) {
            let on = |server: usize, ops: Vec<Op>| drop(servers[server].commit_blocking(ops).unwrap());
            match action {
                // Each server has its own prompts.
                Action::Prompt { server, n } => on(server, prompt_ops(1 + server as u64 * 4 + n, 1)),
                Action::Rate { server, of, also, rater, key, value } => {
                    let entry = |of| FeedbackEntry {
                        key_id: Some(format!("key-{rater}")),
                        idempotency_key: key.map(|key| format!("once {key}")),
                        aggregate: Aggregate::Mean,
                        ..thumbs(of, f64::from(value), clock)
                    };
                    on(server, vec![Op::Feedback([of].into_iter().chain(also).map(entry).collect())]);
                }
                Action::Correct { server, of } => on(server, vec![correction(of)]),
                Action::Erase { server, of } => on(server, vec![Op::Erase(interaction_id(of), clock)]),
                Action::Group { server, of } => {
                    let row = group(of, of, &[10 * of, 10 * of + 1], &["exact", "thumbs"]);
                    on(server, vec![Op::Group(Box::new(row))]);
                }
                Action::TakeIn { server, back, count } => {
                    let server = &servers[server];
                    let known = trainer.intake_positions().unwrap();
                    let known = known.get(&log(server)).copied().unwrap_or(0);
                    let mut some = batches(server, known.saturating_sub(back));
                    some.truncate(count);
                    take_in(&trainer, server, some).unwrap();
                }
                Action::Step => {
                    let groups = trainer.ready_groups(2).unwrap().iter().map(|g| g.id).collect();
                    let row = StepRecord { groups, ..super::step(clock, &[]) };
                    trainer.commit_blocking(vec![Op::Step(Box::new(row))]).unwrap();
                }
                Action::DropMembers => {
                    for group in trainer.ready_groups(1).unwrap() {
                        let members = group.members[..1].to_vec();
                        let reason = "stale".to_owned();
                        let op = Op::DropMembers { group: group.id, members, reason };
                        trainer.commit_blocking(vec![op]).unwrap();
                    }
                }
                Action::Expire { before } => {
                    trainer.commit_blocking(vec![Op::ExpireHeld(before)]).unwrap();
                }
            }
            logged.extend(ship(&trainer));
        }
        for server in &servers {
            take_in(&trainer, server, batches(server, 0)).unwrap();
            // An erasure of what is not shipped yet leaves less in a replica: no empty groups.
            logged.extend(ship(&trainer));
            prop_assert_eq!(server.ready_groups(9).unwrap(), vec![]);
            prop_assert_eq!(problems(server).first, Vec::<String>::new());
        }
        prop_assert_eq!(problems(&trainer).first, Vec::<String>::new());
        let replica = ledger(Outbox::Trainer);
        for some in logged.chunks(step) {
            replay(&replica, some).unwrap();
        }
        prop_assert_eq!(content(&replica), content(&trainer));
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/batch-v1")
}

fn every_operation() -> Vec<Op> {
    let key = QuarantinedKey { key_id: "k".to_owned(), reason: "{}".to_owned(), since: 1 };
    let mut ops = super::golden::contents();
    ops.extend(super::golden::further_contents());
    ops.extend([
        Op::Turn { digest: [7; 16], interaction: interaction_id(1), choice: Some(1) },
        Op::Conversation(vec![thumbs(1, 0.5, 1)]),
        correction(1),
        Op::Metadata(interaction_id(1), BTreeMap::from([("a".to_owned(), "b".to_owned())])),
        Op::Erase(interaction_id(1), 5),
        Op::EraseFeedback(reward_id(1)),
        Op::Quarantine(key),
        Op::Release("k".to_owned()),
        Op::DropMembers {
            group: group_id(1),
            members: vec![sample_id(1)],
            reason: "stale".to_owned(),
        },
        Op::ExpireHeld(1),
    ]);
    ops.retain(|op| !matches!(op, Op::Audit(_)));
    let inner = LoggedBatch { at: 6, ops: vec![(Op::Release("k".to_owned()), reward_id(1))] };
    let other = TakeIn { log: uuid(5, 1), at: 8, batches: vec![(7, inner)] };
    ops.push(Op::TakeIn(Box::new(other)));
    ops
}

fn golden_batch() -> LoggedBatch {
    LoggedBatch { at: 9, ops: every_operation().into_iter().zip((1..).map(reward_id)).collect() }
}

#[test]
#[ignore = "writes a fixture"]
fn write_the_batch() {
    assert!(!golden().exists(), "it is released");
    std::fs::write(golden(), encode(&golden_batch()).unwrap()).unwrap();
}

#[test]
fn a_batch_of_format_1_is_read() {
    let bytes = std::fs::read(golden()).unwrap();
    let found: LoggedBatch = decode(&bytes).unwrap();
    assert_eq!(format!("{found:?}"), format!("{:?}", golden_batch()));
    assert_eq!(encode(&found).unwrap(), bytes);
    assert!(decode::<LoggedBatch>(&bytes[..bytes.len() - 1]).is_err());
    assert!(decode::<LoggedBatch>(&[&[2][..], &bytes[1..]].concat()).is_err());
}
