//! The writer's queue: first in, first out, with a bound that sheds only shadow samples.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
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
    /// The caller's span, which lasts until the commit.
    _span: Span,
}

impl WriteJob {
    fn new(ops: Vec<Op>, reply: Option<Reply>) -> Self {
        let feedback_ids = ops.iter().map(|_| RewardId::new()).collect();
        Self { ops, feedback_ids, reply, _span: Span::current() }
    }

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
    limit: usize,
    metrics: Arc<Metrics>,
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl WriteQueue {
    /// A queue that sheds shadow samples beyond `limit` operations.
    pub(crate) fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        Self { limit, metrics, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues a batch whose caller waits. It is never shed, because waiting callers limit
    /// themselves. The writer takes an `urgent` batch, and all batches before it, at once.
    pub(crate) fn push(&self, ops: Vec<Op>, reply: Reply, urgent: bool) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        state.urgent |= urgent;
        self.add(WriteJob::new(ops, Some(reply)), state)
    }

    /// Queues a batch without a waiting caller. If the queue is full, sheds the batch's shadow
    /// samples.
    pub(crate) fn push_or_shed(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        let state = self.state.lock();
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

    fn add(&self, job: WriteJob, mut state: MutexGuard<'_, QueueState>) -> Result<(), StoreError> {
        if state.closed {
            return Err(StoreError::Closed);
        }
        // The writer waits for the first job, and for the end of the group commit's wait.
        let changes = state.oldest.is_none() || state.urgent;
        state.operations += job.ops.len();
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
