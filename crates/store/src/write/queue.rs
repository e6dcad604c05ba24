//! The writer's queue: first in, first out, with a bound on the memory of what is not written yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use prometheus::IntGauge;
use tokio::sync::oneshot;
use tracing::Span;

use hone_core::metrics::Metrics;
use hone_core::types::{GroupId, RewardId, SampleId, SampleOrigin};

use crate::error::StoreError;
use crate::op::{Committed, Op};

pub(crate) type Reply = oneshot::Sender<Result<Committed, StoreError>>;

/// One caller's batch, which is applied as a whole in one transaction.
pub(crate) struct WriteJob {
    pub(crate) ops: Vec<Op>,
    /// The id of each operation's feedback row. It is chosen once, so that a repeated commit finds
    /// the row of the first attempt.
    pub(crate) feedback_ids: Vec<RewardId>,
    /// The waiting caller; `None` for [`WriteQueue::push_or_shed`].
    pub(crate) reply: Option<Reply>,
    _held: HeldBytes,
    /// The caller's span, which lasts until the commit.
    _span: Span,
}

/// The memory of a job, which the gauge counts until the job is written or refused.
struct HeldBytes(IntGauge, i64);

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.0.sub(self.1);
    }
}

impl WriteJob {
    /// What applying the job again needs.
    pub(crate) fn batch(&self) -> (Vec<Op>, Vec<RewardId>) {
        (self.ops.clone(), self.feedback_ids.clone())
    }
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<WriteJob>,
    operations: usize,
    /// Arrival of the oldest job, from which the group commit's wait counts.
    oldest: Option<Instant>,
    /// Whether a job must be committed without that wait.
    urgent: bool,
    closed: bool,
}

/// The queue. Any thread pushes; the writer takes.
pub(crate) struct WriteQueue {
    /// Most bytes of batches without a waiting caller.
    limit: i64,
    metrics: Arc<Metrics>,
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl WriteQueue {
    /// A queue with [`StoreConfig::queue_bytes`](crate::StoreConfig::queue_bytes).
    pub(crate) fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Self { limit, metrics, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues a batch whose caller waits. It has twice the space of the others, so that it is refused only
    /// while the disk does not keep up at all. The writer takes an `urgent` batch, and all batches before it,
    /// at once.
    pub(crate) fn push(&self, ops: Vec<Op>, reply: Reply, urgent: bool) -> Result<(), StoreError> {
        // Measuring reads the whole batch, so it is done once and without the lock.
        let bytes = bytes(&ops);
        let mut state = self.state.lock();
        if !self.holds(bytes, self.limit.saturating_mul(2)) {
            return Err(StoreError::Overloaded);
        }
        state.urgent |= urgent;
        self.add(ops, bytes, Some(reply), state)
    }

    /// Queues a batch without a waiting caller. Sheds its shadow samples if the queue is half full, and all of
    /// it if the queue is full.
    pub(crate) fn push_or_shed(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        let all = bytes(&ops);
        let state = self.state.lock();
        if self.holds(all, self.limit / 2) {
            return self.add(ops, all, None, state);
        }
        if state.closed {
            return Err(StoreError::Closed);
        }
        let (kept, mut shed) = split_shadows(ops);
        let bytes = bytes(&kept);
        if !self.holds(bytes, self.limit) {
            shed.extend(kept);
        } else if !kept.is_empty() {
            self.add(kept, bytes, None, state)?;
        }
        if shed.is_empty() {
            return Ok(());
        }
        self.count_dropped(&shed);
        Err(StoreError::Overloaded)
    }

    /// Whether `limit` has space for so many bytes beside everything that is not written yet.
    fn holds(&self, bytes: i64, limit: i64) -> bool {
        self.metrics.store_queue_bytes.get().saturating_add(bytes) <= limit
    }

    fn add(
        &self,
        ops: Vec<Op>,
        bytes: i64,
        reply: Option<Reply>,
        mut state: MutexGuard<'_, QueueState>,
    ) -> Result<(), StoreError> {
        if state.closed {
            return Err(StoreError::Closed);
        }
        let held = HeldBytes(self.metrics.store_queue_bytes.clone(), bytes);
        held.0.add(held.1);
        let feedback_ids = ops.iter().map(|_| RewardId::new()).collect();
        // The writer waits for the first job, and for the end of the group commit's wait.
        let changes = state.oldest.is_none() || state.urgent;
        state.operations += ops.len();
        let job = WriteJob { ops, feedback_ids, reply, _held: held, _span: Span::current() };
        state.jobs.push_back(job);
        state.oldest.get_or_insert_with(Instant::now);
        self.metrics.store_queue.set(i64::try_from(state.operations).unwrap_or(i64::MAX));
        drop(state);
        if changes {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Removes every job, in order, once the oldest has waited for `gather`. Returns an empty list
    /// if no job arrived within `timeout`, and `None` if the queue is closed and empty.
    pub(crate) fn take(
        &self,
        gather: Duration,
        timeout: Option<Duration>,
    ) -> Option<Vec<WriteJob>> {
        let mut state = self.state.lock();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let now = Instant::now();
            let until = match state.oldest {
                None if state.closed => return None,
                None => deadline,
                // No job can arrive after the queue is closed.
                Some(_) if state.closed || state.urgent => Some(now),
                Some(oldest) => Some(oldest + gather),
            };
            match until {
                Some(until) if until <= now => break,
                Some(until) => _ = self.changed.wait_until(&mut state, until),
                None => self.changed.wait(&mut state),
            }
        }
        state.operations = 0;
        state.oldest = None;
        state.urgent = false;
        self.metrics.store_queue.set(0);
        Some(std::mem::take(&mut state.jobs).into())
    }

    /// Refuses new jobs. Queued jobs are still taken.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Closes the queue and drops its jobs, which answers their callers with `Closed`.
    pub(crate) fn abandon(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.jobs.clear();
    }

    /// Counts operations that will never be written.
    pub(crate) fn count_dropped(&self, ops: &[Op]) {
        let mut by_table = BTreeMap::<&str, u64>::new();
        for op in ops {
            *by_table.entry(op.table()).or_default() += 1;
        }
        for (table, count) in by_table {
            self.metrics.store_dropped.with_label_values(&[table]).inc_by(count);
        }
    }
}

fn bytes(ops: &[Op]) -> i64 {
    i64::try_from(ops.iter().map(Op::bytes).sum::<usize>()).unwrap_or(i64::MAX)
}

/// Splits a batch into operations to keep, and shadow samples to shed together with their rewards
/// and groups. Both keep their order.
fn split_shadows(ops: Vec<Op>) -> (Vec<Op>, Vec<Op>) {
    let samples: BTreeSet<SampleId> = ops
        .iter()
        .filter_map(|op| match op {
            Op::Sample(sample) if sample.origin == SampleOrigin::Shadow => Some(sample.id),
            _ => None,
        })
        .collect();
    let groups: BTreeSet<GroupId> = ops
        .iter()
        .filter_map(|op| match op {
            Op::Group(group) if group.members.iter().any(|m| samples.contains(m)) => Some(group.id),
            _ => None,
        })
        .collect();
    ops.into_iter().partition(|op| match op {
        Op::Sample(sample) => !samples.contains(&sample.id),
        Op::Reward(reward) => !samples.contains(&reward.sample),
        Op::Group(group) => !groups.contains(&group.id),
        Op::GroupState(group, _) => !groups.contains(group),
        _ => true,
    })
}
