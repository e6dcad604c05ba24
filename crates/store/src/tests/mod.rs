//! Tests of the whole ledger: ordinary use, concurrency, failing disks, old files, and random
//! operations compared with a model.

mod basic;
mod concurrency;
mod corrections;
mod erase;
mod faults;
mod golden;
mod maintain;
mod migrate;
mod model;
mod ratings;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::WriteTransaction;
use tempfile::TempDir;
use uuid::Uuid;

use hone_core::metrics::Metrics;
use hone_core::testing;
use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, Interaction, InteractionId, Message, PolicyRecord,
    PolicyState, PolicyVersion, PromptSource, Rating, Reward, RewardId, RewardSource, Role, Sample,
    SampleId, SampleOrigin, SamplingParams, StepRecord,
};

use crate::maintain::{Problems, references};
use crate::{FeedbackEntry, Op, Store, StoreConfig, StoreError};

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new().unwrap())
}

fn open(path: &Path) -> Store {
    Store::open(path, &StoreConfig { group_commit_ms: 0, queue: 1000 }, metrics()).unwrap()
}

/// A ledger in a directory of its own.
struct Ledger {
    store: Store,
    metrics: Arc<Metrics>,
    dir: TempDir,
}

impl Ledger {
    /// A ledger with prompts 1 to `prompts`, each with a served sample.
    fn new(prompts: u64) -> Self {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), metrics());
        let config = StoreConfig { group_commit_ms: 0, queue: 1000 };
        let store = Store::open(&dir.path().join("ledger.redb"), &config, metrics.clone()).unwrap();
        (1..=prompts).for_each(|n| store.enqueue(prompt_ops(n, 0)).unwrap());
        Self { store, metrics, dir }
    }

    /// Closes and checks it, and that the gauges of what waits are what a restart counts. Returns its
    /// folder and its file.
    fn check(self) -> (TempDir, PathBuf) {
        let path = self.dir.path().join("ledger.redb");
        drop(self.store);
        let counted = metrics();
        drop(Store::open(&path, &StoreConfig::default(), counted.clone()).unwrap());
        assert_eq!(counted.feedback_waiting.get(), self.metrics.feedback_waiting.get());
        assert_eq!(counted.corrections_waiting.get(), self.metrics.corrections_waiting.get());
        let report = crate::maintain::check(&path).unwrap();
        assert!(report.is_healthy(), "{report:?}");
        (self.dir, path)
    }
}

impl Deref for Ledger {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

/// Checks the outcomes of all ratings or corrections that were received.
fn assert_ended(
    ended: impl Fn(&str) -> u64,
    [received, waiting]: [u64; 2],
    outcomes: &[(&str, u64)],
) {
    let found: Vec<_> = outcomes.iter().map(|(outcome, _)| (*outcome, ended(outcome))).collect();
    assert_eq!(found, outcomes);
    assert_eq!(waiting, received - outcomes.iter().map(|(_, count)| count).sum::<u64>());
}

/// The problems that `hone db check` finds, of an open ledger.
fn problems(store: &Store) -> Problems {
    let mut found = None;
    let check = |tx: &WriteTransaction| {
        found = Some(references(tx)?);
        // An error aborts the transaction.
        Err::<(), _>(StoreError::Closed)
    };
    store.inner.file.write(check).unwrap_err();
    found.unwrap()
}

fn uuid(kind: u8, n: u64) -> Uuid {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&(1_700_000_000_000 + n).to_be_bytes()[2..]);
    bytes[6] = 0x70;
    bytes[8] = 0x80 | kind;
    bytes[9..16].copy_from_slice(&n.to_be_bytes()[1..]);
    Uuid::from_bytes(bytes)
}

fn interaction_id(n: u64) -> InteractionId {
    InteractionId(uuid(1, n))
}

fn sample_id(n: u64) -> SampleId {
    SampleId(uuid(2, n))
}

fn group_id(n: u64) -> GroupId {
    GroupId(uuid(3, n))
}

fn reward_id(n: u64) -> RewardId {
    RewardId(uuid(4, n))
}

fn interaction(n: u64) -> Interaction {
    Interaction {
        created: 1000 + n,
        key_id: Some("key-1".to_owned()),
        messages: vec![
            Message::new(Role::System, "add"),
            Message::new(Role::User, format!("{n} + 1 = ? é")),
        ],
        metadata: BTreeMap::from([("answer".to_owned(), (n + 1).to_string())]),
        params: SamplingParams {
            logit_bias: BTreeMap::from([(3, -1.5)]),
            seed: n,
            ..SamplingParams::default()
        },
        template_hash: "0123456789abcdef".to_owned(),
        ..testing::interaction(interaction_id(n), vec![1, 200, 70_000])
    }
}

fn sample(n: u64, of: u64, origin: SampleOrigin, choice: u32) -> Sample {
    Sample {
        id: sample_id(n),
        choice,
        origin,
        created: 2000 + n,
        ids: vec![5, 6, 2],
        logprobs: vec![-0.5, -1.25, 0.0],
        text: "<answer>2</answer>".to_owned(),
        version: PolicyVersion(n % 3),
        untrainable: (choice > 0).then(|| "top_p".to_owned()),
        ..testing::sample(interaction_id(of))
    }
}

fn served(n: u64, of: u64) -> Sample {
    sample(n, of, SampleOrigin::Served, 0)
}

fn shadow(n: u64, of: u64) -> Sample {
    sample(n, of, SampleOrigin::Shadow, 0)
}

fn graded(n: u64, of: u64, name: &str, value: Option<f64>) -> Reward {
    let id = reward_id(n);
    Reward { id, created: 3000 + n, ..testing::reward(sample_id(of), name, value) }
}

fn group(n: u64, of: u64, members: &[u64], parts: &[&str]) -> Group {
    Group {
        id: group_id(n),
        interaction: interaction_id(of),
        route: "default".to_owned(),
        members: members.iter().map(|m| sample_id(*m)).collect(),
        parts: parts.iter().map(|p| (*p).to_owned()).collect(),
        oldest_version: PolicyVersion(1),
        created: 4000 + n,
        state: GroupState::Ready,
    }
}

fn step(n: u64, groups: &[u64]) -> StepRecord {
    StepRecord {
        step: n,
        groups: groups.iter().map(|g| group_id(*g)).collect(),
        metrics: BTreeMap::from([("reward_mean".to_owned(), 0.25)]),
        created: 5000 + n,
    }
}

fn policy(n: u64, state: PolicyState) -> PolicyRecord {
    PolicyRecord {
        adapter: (n > 0).then(|| format!("adapters/v{n}")),
        sha256: (n > 0).then(|| "ab".repeat(32)),
        metrics: BTreeMap::from([("kl".to_owned(), 0.01)]),
        state,
        reason: (state == PolicyState::Rejected).then(|| "kl".to_owned()),
        created: 6000 + n,
        ..testing::policy(n, n.saturating_sub(1))
    }
}

fn thumbs(of: u64, value: f64, created: u64) -> FeedbackEntry {
    FeedbackEntry {
        interaction: interaction_id(of),
        choice: 0,
        name: "thumbs".to_owned(),
        value: Some(value),
        comment: Some("good".to_owned()),
        idempotency_key: None,
        key_id: None,
        created,
        join: last,
    }
}

/// The newest rating, one of the rules that a route can configure.
fn last(ratings: &[Rating]) -> Option<f64> {
    ratings.iter().max_by_key(|rating| rating.created).map(|rating| rating.value)
}

fn mean(ratings: &[Rating]) -> Option<f64> {
    let values: Vec<f64> = ratings.iter().map(|rating| rating.value).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The rating of most raters; `None` for a tie.
fn majority(ratings: &[Rating]) -> Option<f64> {
    let count = |value| ratings.iter().filter(|rating| rating.value == value).count();
    match count(1.0).cmp(&count(0.0)) {
        std::cmp::Ordering::Greater => Some(1.0),
        std::cmp::Ordering::Less => Some(0.0),
        std::cmp::Ordering::Equal => None,
    }
}

fn feedback(entry: FeedbackEntry) -> Op {
    Op::Feedback(Box::new(entry))
}

/// Operations that record prompt `n`, its served sample and `shadows` shadow samples, all graded.
/// The sample numbers start at `10 * n`.
fn prompt_ops(n: u64, shadows: u64) -> Vec<Op> {
    let first = 10 * n;
    let mut ops = vec![Op::Interaction(Box::new(interaction(n)))];
    ops.push(Op::Sample(Box::new(served(first, n))));
    ops.extend((1..=shadows).map(|i| Op::Sample(Box::new(shadow(first + i, n)))));
    ops.extend(
        (0..=shadows)
            .map(|i| Op::Reward(Box::new(graded(first + i, first + i, "exact", Some(1.0))))),
    );
    ops
}

fn ungrouped(store: &Store) -> Vec<(SampleId, String)> {
    store.ungrouped_feedback(u64::MAX, 1000).unwrap()
}
