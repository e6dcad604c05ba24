use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::*;
use crate::{FeedbackOutcome, StoreError, file, maintain};

/// Blocks the writer inside its transactions while it is closed.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let closed = self.closed.lock().unwrap();
        drop(self.changed.wait_while(closed, |closed| *closed).unwrap());
    }
}

fn gated(path: &Path, queue_bytes: usize) -> (Store, Arc<Gate>, Arc<Metrics>) {
    let gate = Arc::new(Gate::default());
    let metrics = metrics();
    let config = StoreConfig { group_commit_ms: 0, queue_bytes, ..StoreConfig::default() };
    let inside = gate.clone();
    let store = Store::start(path, file::opener(path), &config, metrics.clone(), |writer| {
        writer.breakpoint = Box::new(move |_| inside.pass());
    })
    .unwrap();
    (store, gate, metrics)
}

/// Waits until the writer has taken what was queued.
fn until_taken(metrics: &Metrics) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while metrics.store_queue.get() > 0 {
        assert!(Instant::now() < deadline, "the writer does not take the queued batches");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_commits_are_all_recorded_and_visible() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let store = open(&path);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..32 {
        let store = store.clone();
        tasks.spawn(async move {
            for i in 0..8 {
                let n = task * 8 + i;
                store.enqueue(prompt_ops(n, 2)).unwrap();
                let entry = FeedbackEntry {
                    idempotency_key: Some(format!("key {n}")),
                    ..thumbs(n, n as f64, n)
                };
                let outcome = store.commit(vec![feedback(entry)]).await.unwrap().feedback;
                assert_eq!(outcome, vec![FeedbackOutcome::Recorded(sample_id(10 * n))]);
                // An acknowledged write is visible.
                let thumbs = store.rewards_of(sample_id(10 * n)).unwrap();
                assert_eq!(thumbs.last().unwrap().value, Some(n as f64));
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.feedback), (256, 768, 256));
    assert_eq!(stats.rewards, 768 + 256);
    assert_eq!(ungrouped(&store).len(), 256);
    store.close().await.unwrap();
    assert!(maintain::check(&path).unwrap().is_healthy());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_sheds_shadow_samples_then_recordings_and_then_refuses_commits() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: usize = prompt_ops(1, 0).iter().map(Op::bytes).sum();
    let limit = 4 * prompt + 200;
    let (store, gate, metrics) = gated(&dir.path().join("ledger.redb"), limit);
    gate.set(true);
    store.enqueue(prompt_ops(1, 0)).unwrap();
    until_taken(&metrics);

    // The writer is blocked. Two prompts take half of the queue.
    store.enqueue(prompt_ops(2, 0)).unwrap();
    let mut ops = prompt_ops(3, 2);
    ops.push(Op::Group(Box::new(group(3, 3, &[30, 31, 32], &["exact"]))));
    assert_eq!(store.enqueue(ops), Err(StoreError::Overloaded));
    let dropped = |table| metrics.store_dropped.with_label_values(&[table]).get();
    assert_eq!((dropped("samples"), dropped("rewards"), dropped("groups")), (2, 2, 1));
    let only_shadows = vec![Op::Sample(Box::new(shadow(99, 2)))];
    assert_eq!(store.enqueue(only_shadows), Err(StoreError::Overloaded));
    assert_eq!(dropped("samples"), 3);
    store.enqueue(prompt_ops(4, 0)).unwrap();
    // The whole queue.
    assert_eq!(store.enqueue(prompt_ops(5, 0)), Err(StoreError::Overloaded));
    assert_eq!((dropped("interactions"), dropped("samples")), (1, 4));
    // Commits have as much space again.
    let waiting = tokio::spawn({
        let store = store.clone();
        async move { store.commit((1..5).map(|n| feedback(thumbs(n, 1.0, n))).collect()).await }
    });
    let large = FeedbackEntry { comment: Some("x".repeat(2 * limit)), ..thumbs(1, 1.0, 1) };
    assert_eq!(store.commit(vec![feedback(large)]).await, Err(StoreError::Overloaded));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished(), "answered before it was durable");
    gate.set(false);
    let outcomes = waiting.await.unwrap().unwrap().feedback;
    let expected: Vec<_> = (1..5).map(|n| FeedbackOutcome::Recorded(sample_id(10 * n))).collect();
    assert_eq!(outcomes, expected);
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.groups), (4, 4, 0));
    store.close().await.unwrap();
    assert_eq!(metrics.store_queue_bytes.get(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_panics_outside_a_transaction_goes_on_with_the_queue() {
    let ledger = tempfile::tempdir().unwrap();
    let path = ledger.path().join("ledger.redb");
    let (armed, metrics) = (AtomicBool::new(true), metrics());
    let store = Store::start(
        &path,
        file::opener(&path),
        &StoreConfig::default(),
        metrics.clone(),
        |writer| {
            writer.breakpoint = Box::new(move |ops| {
                assert!(!(ops.is_empty() && armed.swap(false, Ordering::SeqCst)), "planned");
            });
        },
    )
    .unwrap();
    assert!(store.commit(prompt_ops(1, 0)).await.is_err());
    store.commit(prompt_ops(2, 0)).await.unwrap();
    assert_eq!((store.trouble(), metrics.store_writer_restarts.get()), (None, 1));
    assert_eq!(store.stats().unwrap().interactions, 1);
    store.close().await.unwrap();
    assert_eq!(metrics.store_queue_bytes.get(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_or_dropping_the_store_saves_queued_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let config = StoreConfig { group_commit_ms: 60_000, ..StoreConfig::default() };
    let store = Store::open(&path, &config, metrics()).unwrap();
    store.enqueue(prompt_ops(1, 1)).unwrap();
    store.close().await.unwrap();
    store.close().await.unwrap();
    drop(store);
    let store = Store::open(&path, &config, metrics()).unwrap();
    assert_eq!(store.stats().unwrap().samples, 2);
    store.enqueue(prompt_ops(2, 1)).unwrap();
    drop(store);
    assert_eq!(open(&path).stats().unwrap().samples, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_the_writer_fails_only_its_batch() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let armed = Arc::new(AtomicBool::new(true));
    let fuse = armed.clone();
    let config = StoreConfig { group_commit_ms: 0, ..StoreConfig::default() };
    let store = Store::start(&path, file::opener(&path), &config, metrics(), |writer| {
        writer.breakpoint = Box::new(move |ops| {
            let bad = ops.iter().any(|op| matches!(op, Op::Policy(_)));
            assert!(!(bad && fuse.load(Ordering::SeqCst)), "planned");
        });
    })
    .unwrap();
    store.enqueue(prompt_ops(1, 1)).unwrap();
    let bad = store.commit(vec![Op::Policy(Box::new(policy(0, PolicyState::Active)))]).await;
    assert!(matches!(bad, Err(StoreError::Failed(_))));
    let good = store.commit(vec![feedback(thumbs(1, 1.0, 1))]).await.unwrap().feedback;
    assert_eq!(good, vec![FeedbackOutcome::Recorded(sample_id(10))]);
    armed.store(false, Ordering::SeqCst);
    store.commit(vec![Op::Policy(Box::new(policy(0, PolicyState::Active)))]).await.unwrap();
    store.close().await.unwrap();
    let report = maintain::check(&path).unwrap();
    assert!(report.is_healthy(), "{report:?}");
    assert_eq!((report.rows.samples, report.rows.policy_versions), (2, 1));
}

#[test]
fn commit_blocking_works_without_a_runtime() {
    let store = TestLedger::new();
    store.commit_blocking(prompt_ops(1, 0)).unwrap();
    assert_eq!(store.stats().unwrap().interactions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_urgent_commit_ends_the_wait_of_earlier_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let config = StoreConfig::default();
    let store = Store::start(&path, file::opener(&path), &config, metrics(), |writer| {
        // Longer than the test may run.
        writer.gather = std::time::Duration::from_secs(3600);
    })
    .unwrap();
    let mut patient = std::pin::pin!(store.commit(Vec::new()));
    assert!(futures::poll!(&mut patient).is_pending());
    store.commit_now(Vec::new()).await.unwrap();
    patient.await.unwrap();
    store.close().await.unwrap();
}
