//! What waits for the writer: one FIFO with a bound that only sheddable work feels.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use hone_core::metrics::Metrics;
use hone_core::types::{GroupId, RewardId, SampleId, SampleOrigin};

use super::{Committed, Op, StoreError};

/// Where a committed batch is answered.
pub(super) type Reply = oneshot::Sender<Result<Committed, StoreError>>;

/// One caller's batch: applied as a whole, in one transaction.
pub(super) struct WriteJob {
    /// What to do.
    pub(super) ops: Vec<Op>,
    /// The id of each operation's feedback row; made once, so that a repeated commit finds it.
    pub(super) feedback_ids: Vec<RewardId>,
    /// Who waits; nobody for enqueued work.
    pub(super) reply: Option<Reply>,
}

impl WriteJob {
    fn new(ops: Vec<Op>, reply: Option<Reply>) -> Self {
        let feedback_ids = ops.iter().map(|_| RewardId::new()).collect();
        Self { ops, feedback_ids, reply }
    }
}

#[derive(Default)]
struct State {
    jobs: VecDeque<WriteJob>,
    operations: usize,
    oldest: Option<Instant>,
    /// Whether somebody waits who must not wait for company.
    urgent: bool,
    closed: bool,
}

/// The queue. Push from anywhere, take from the writer.
pub(super) struct WriteQueue {
    limit: usize,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    changed: Condvar,
}

impl WriteQueue {
    /// A queue that sheds beyond `limit` operations.
    pub(super) fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        Self { limit, metrics, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues a batch that somebody waits for; never sheds, since waiting is its limit.
    /// An `urgent` one is taken at once, with all that waits already.
    pub(super) fn push(&self, ops: Vec<Op>, reply: Reply, urgent: bool) -> Result<(), StoreError> {
        let mut state = self.state();
        state.urgent |= urgent;
        self.add(WriteJob::new(ops, Some(reply)), state)
    }

    /// Queues a batch that nobody waits for; sheds what may be shed where the queue is full.
    pub(super) fn push_or_shed(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        let state = self.state();
        if state.operations + ops.len() <= self.limit {
            return self.add(WriteJob::new(ops, None), state);
        }
        let (kept, shed) = split_shadows(ops);
        if !kept.is_empty() {
            self.add(WriteJob::new(kept, None), state)?;
        } else if state.closed {
            return Err(StoreError::Closed);
        }
        if shed.is_empty() {
            return Ok(());
        }
        self.count_dropped(&shed);
        Err(StoreError::Overloaded)
    }

    fn add(&self, job: WriteJob, mut state: MutexGuard<'_, State>) -> Result<(), StoreError> {
        if state.closed {
            return Err(StoreError::Closed);
        }
        state.operations += job.ops.len();
        state.jobs.push_back(job);
        state.oldest.get_or_insert_with(Instant::now);
        self.metrics.store_queue.set(i64::try_from(state.operations).unwrap_or(i64::MAX));
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Everything that waits, in order, after gathering for `gather` from the first arrival on.
    /// Empty when nothing came within `patience`; `None` once closed and empty.
    pub(super) fn take(
        &self,
        gather: Duration,
        patience: Option<Duration>,
    ) -> Option<Vec<WriteJob>> {
        let mut state = self.state();
        let deadline = patience.map(|p| Instant::now() + p);
        loop {
            let now = Instant::now();
            let until = match state.oldest {
                None if state.closed => return None,
                None => deadline,
                // Where it is closed, nothing more can come.
                Some(_) if state.closed || state.urgent => Some(now),
                Some(oldest) => Some(oldest + gather),
            };
            state = match until {
                Some(until) if until <= now => break,
                Some(until) => self.wait(state, until - now),
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.operations = 0;
        state.oldest = None;
        state.urgent = false;
        self.metrics.store_queue.set(0);
        Some(std::mem::take(&mut state.jobs).into())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Refuses whatever comes from now on; what waits is still taken.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Closes and drops what waits, which answers those who wait for it.
    pub(super) fn abandon(&self) {
        let mut state = self.state();
        state.closed = true;
        state.jobs.clear();
    }

    /// Counts operations that will never be recorded.
    pub(super) fn count_dropped(&self, ops: &[Op]) {
        let mut by_table = BTreeMap::<&str, u64>::new();
        for op in ops {
            *by_table.entry(table_of(op)).or_default() += 1;
        }
        for (table, count) in by_table {
            self.metrics.store_dropped.with_label_values(&[table]).inc_by(count);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn table_of(op: &Op) -> &'static str {
    match op {
        Op::Interaction(_) => "interactions",
        Op::Sample(_) => "samples",
        Op::Reward(_) => "rewards",
        Op::Feedback(_) | Op::Conversation(_) => "feedback",
        Op::Quarantine(_) | Op::Release(_) => "quarantine",
        Op::Group(_) | Op::GroupState(..) => "groups",
        Op::Policy(_) => "policy_versions",
        Op::Step(_) => "steps",
    }
}

/// Splits off shadow samples with their rewards and groups: `(to keep, to shed)`, in order.
fn split_shadows(ops: Vec<Op>) -> (Vec<Op>, Vec<Op>) {
    let mut samples = BTreeSet::<SampleId>::new();
    for op in &ops {
        if let Op::Sample(sample) = op
            && sample.origin == SampleOrigin::Shadow
        {
            samples.insert(sample.id);
        }
    }
    let mut groups = BTreeSet::<GroupId>::new();
    for op in &ops {
        if let Op::Group(group) = op
            && group.members.iter().any(|m| samples.contains(m))
        {
            groups.insert(group.id);
        }
    }
    ops.into_iter().partition(|op| match op {
        Op::Sample(sample) => !samples.contains(&sample.id),
        Op::Reward(reward) => !samples.contains(&reward.sample),
        Op::Group(group) => !groups.contains(&group.id),
        Op::GroupState(group, _) => !groups.contains(group),
        _ => true,
    })
}
