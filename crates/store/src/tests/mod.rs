//! Tests of the whole ledger: ordinary use, concurrency, failing disks, old files, and random
//! operations compared with a model.

mod basic;
mod concurrency;
mod copy;
mod corrections;
mod erase;
mod faults;
mod golden;
mod maintain;
mod migrate;
mod model;
mod outbox;
mod ratings;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use redb::WriteTransaction;
use tempfile::TempDir;
use uuid::Uuid;

use hone_core::metrics::Metrics;
use hone_core::testing;
use hone_core::types::{
    Aggregate, FinishReason, Group, GroupId, GroupState, Interaction, InteractionId, Message,
    PolicyRecord, PolicyState, PolicyVersion, PromptSource, Rating, Reward, RewardId, RewardSource,
    Role, Sample, SampleId, SampleOrigin, SamplingParams, StepRecord,
};

use crate::maintain::{Problems, references};
use crate::{FeedbackEntry, Op, Store, StoreConfig, StoreError};

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new().unwrap())
}

fn open(path: &Path) -> Store {
    Store::open(path, &StoreConfig { group_commit_ms: 0, ..StoreConfig::default() }, metrics())
        .unwrap()
}

/// Outcome, number.
type Outcomes<'a> = &'a [(&'a str, u64)];

/// An open ledger in a directory of its own.
struct TestLedger {
    dir: TempDir,
    store: Store,
    metrics: Arc<Metrics>,
}

impl Deref for TestLedger {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl TestLedger {
    fn new() -> Self {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), metrics());
        let config = StoreConfig { group_commit_ms: 0, ..StoreConfig::default() };
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &config, metrics.clone()).unwrap();
        Self { dir, store, metrics }
    }

    /// With prompts 1 to 5, each with a served sample.
    fn with_prompts() -> Self {
        let ledger = Self::new();
        (1..=5).for_each(|n| ledger.enqueue(prompt_ops(n, 0)).unwrap());
        ledger
    }

    /// Closes the ledger, and checks it and that the gauges are what a restart counts.
    fn check(self) -> TempDir {
        let Self { dir, store, metrics } = self;
        drop(store);
        let path = dir.path().join("ledger.redb");
        let counted = self::metrics();
        drop(Store::open(&path, &StoreConfig::default(), counted.clone()).unwrap());
        assert_eq!(counted.feedback_waiting.get(), metrics.feedback_waiting.get());
        assert_eq!(counted.corrections_waiting.get(), metrics.corrections_waiting.get());
        let report = crate::maintain::check(&path).unwrap();
        assert!(report.is_healthy(), "{report:?}");
        dir
    }

    /// Checks the counts of ratings, and [`Self::check`].
    fn check_ratings(self, received: u64, outcomes: Outcomes<'_>) {
        for (outcome, count) in outcomes {
            let ended = self.metrics.feedback_ratings.with_label_values(&[outcome]).get();
            assert_eq!(ended, *count, "{outcome}");
        }
        assert_eq!(self.metrics.feedback_received.get(), received);
        let ended: u64 = outcomes.iter().map(|(_, count)| count).sum();
        assert_eq!(self.metrics.feedback_waiting.get(), i64::try_from(received - ended).unwrap());
        self.check();
    }

    /// Checks the counts of corrections, and [`Self::check`].
    fn check_corrections(self, received: u64, outcomes: Outcomes<'_>) {
        for (outcome, count) in outcomes {
            let ended = self.metrics.train.corrections.with_label_values(&[outcome]).get();
            assert_eq!(ended, *count, "{outcome}");
        }
        assert_eq!(self.metrics.corrections_received.get(), received);
        let ended: u64 = outcomes.iter().map(|(_, count)| count).sum();
        assert_eq!(
            self.metrics.corrections_waiting.get(),
            i64::try_from(received - ended).unwrap()
        );
        self.check();
    }
}

/// The problems that `hone db check` finds, of an open ledger.
fn problems(store: &Store) -> Problems {
    let mut found = None;
    let check = |tx: &WriteTransaction| {
        found = Some(references(tx)?);
        // An error aborts the transaction.
        Err::<(), _>(StoreError::Closed)
    };
    store.write(check).unwrap_err();
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
    let user = format!("{n} + 1 = ? é");
    let messages = vec![Message::new(Role::System, "add"), Message::new(Role::User, user)];
    Interaction {
        id: interaction_id(n),
        created: 1000 + n,
        key_id: Some("key-1".to_owned()),
        metadata: BTreeMap::from([("answer".to_owned(), (n + 1).to_string())]),
        params: SamplingParams {
            logit_bias: BTreeMap::from([(3, -1.5)]),
            seed: n,
            ..SamplingParams::default()
        },
        prompt_ids: vec![1, 200, 70_000],
        template_hash: "0123456789abcdef".to_owned(),
        ..Interaction::new(PromptSource::Live, "default", messages)
    }
}

fn sample(n: u64, of: u64, origin: SampleOrigin, choice: u32) -> Sample {
    Sample {
        id: sample_id(n),
        choice,
        created: 2000 + n,
        ids: vec![5, 6, 2],
        logprobs: vec![-0.5, -1.25, 0.0],
        text: "<answer>2</answer>".to_owned(),
        untrainable: (choice > 0).then(|| "top_p".to_owned()),
        ..Sample::new(interaction_id(of), origin, PolicyVersion(n % 3))
    }
}

fn served(n: u64, of: u64) -> Sample {
    sample(n, of, SampleOrigin::Served, 0)
}

fn shadow(n: u64, of: u64) -> Sample {
    sample(n, of, SampleOrigin::Shadow, 0)
}

fn graded(n: u64, of: u64, name: &str, value: Option<f64>) -> Reward {
    let reward = Reward::graded(sample_id(of), name, value);
    Reward { id: reward_id(n), created: 3000 + n, ..reward }
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
        aggregate: Aggregate::Last,
        elsewhere: None,
    }
}

fn feedback(entry: FeedbackEntry) -> Op {
    Op::Feedback(vec![entry])
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
