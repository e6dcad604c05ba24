//! The writer thread: takes batches from the queue, commits them in one transaction and answers.

mod apply;
mod queue;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redb::WriteTransaction;
use tokio::sync::watch;

use hone_core::metrics::Metrics;
use hone_core::types::{Lineage, RewardId};

use crate::error::StoreError;
use crate::file::{Ledger, Opener};
use crate::health::WriterHealth;
use crate::op::{Committed, Op, Outbox, SHIPPED};

pub(crate) use apply::{AppliedCounts, Applier};
pub(crate) use queue::{WriteJob, WriteQueue};

/// Pause before writes that a failing disk refused are tried again.
const RETRY: Duration = Duration::from_secs(1);

/// How the writer ended; `None` while it runs.
pub(crate) type WriterEnd = Option<Result<(), StoreError>>;

/// A hook that tests run inside a transaction, with the batch, and before one, with no operation.
#[cfg(test)]
pub(crate) type Breakpoint = Box<dyn Fn(&[crate::op::Op]) + Send>;

pub(crate) struct Writer {
    pub(crate) file: Arc<Ledger>,
    /// Opens the file again after an error.
    pub(crate) opener: Opener,
    pub(crate) queue: Arc<WriteQueue>,
    pub(crate) metrics: Arc<Metrics>,
    /// Time that a batch waits for others to share its commit.
    pub(crate) gather: Duration,
    pub(crate) ready: watch::Sender<usize>,
    /// Incremented after commits that recorded feedback.
    pub(crate) feedback: watch::Sender<u64>,
    pub(crate) lineage: watch::Sender<Arc<Lineage>>,
    pub(crate) ended: watch::Sender<WriterEnd>,
    pub(crate) health: Arc<WriterHealth>,
    pub(crate) log: Arc<TransactionLog>,
    #[cfg(test)]
    pub(crate) breakpoint: Breakpoint,
}

/// Why a transaction failed.
enum TransactionFailure {
    /// The file failed. The same batches may succeed after it is reopened; others fail until then.
    Storage(StoreError),
    /// A batch cannot be applied, or panicked. Trying it again fails again.
    Batch(StoreError),
}

struct Transaction {
    answers: Vec<Committed>,
    counts: AppliedCounts,
    ready: u64,
}

/// The operations of a batch and the ids of their feedback rows, which applying them again needs.
pub(crate) type Batch = (Vec<Op>, Vec<RewardId>);

/// The transactions since a snapshot, while the file is copied; `None` at other times.
pub(crate) type TransactionLog = Mutex<Option<Vec<Vec<Batch>>>>;

/// Applies the batches of one transaction.
fn apply_all<'b>(
    tx: &WriteTransaction,
    batches: impl Iterator<Item = (&'b [Op], &'b [RewardId])>,
) -> Result<Transaction, StoreError> {
    let mut tables = Applier::new(tx)?;
    let mut answers = Vec::new();
    for (ops, ids) in batches {
        let feedback = tables.apply_batch(ops, ids)?;
        answers.push(Committed {
            feedback,
            ratings: std::mem::take(&mut tables.taken),
            answers: std::mem::take(&mut tables.answers),
        });
    }
    tables.combine_ratings()?;
    if tables.mode == Outbox::Server {
        // The trainer counts what becomes of it.
        for counts in [&mut tables.counts.ratings, &mut tables.counts.corrections] {
            counts.ended = BTreeMap::from([(SHIPPED.to_owned(), counts.received)]);
        }
    }
    let ready = tables.ready_count()?;
    Ok(Transaction { answers, counts: tables.counts, ready })
}

/// Repeats a logged transaction on a copy of the file.
pub(crate) fn repeat(tx: &WriteTransaction, batches: &[Batch]) -> Result<(), StoreError> {
    apply_all(tx, batches.iter().map(|(ops, ids)| (&ops[..], &ids[..]))).map(drop)
}

/// Abandons the queue when the thread ends, even by a panic, so that no caller waits forever.
struct AbandonOnDrop(Arc<WriteQueue>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Writer {
    /// Commits batches until the queue is closed and empty. A panic outside a transaction loses the batches at
    /// hand, whose callers get an error; the writer goes on with the queue.
    pub(crate) fn run(self) {
        let _abandon = AbandonOnDrop(self.queue.clone());
        let result = loop {
            match catch_unwind(AssertUnwindSafe(|| self.commit_all())) {
                Ok(result) => break result,
                Err(_) => {
                    tracing::error!("the ledger's writer panicked and goes on");
                    self.metrics.store_writer_restarts.inc();
                }
            }
        };
        self.file.close();
        self.ended.send_replace(Some(result));
    }

    fn commit_all(&self) -> Result<(), StoreError> {
        // Jobs without a waiting caller that a failing disk refused. They precede newer ones.
        let mut retry = Vec::new();
        loop {
            let timeout = (!retry.is_empty()).then_some(RETRY);
            let Some(jobs) = self.queue.take(self.gather, timeout) else { break };
            #[cfg(test)]
            (self.breakpoint)(&[]);
            retry.extend(jobs);
            retry = self.commit(retry);
        }
        let lost_jobs = self.commit(retry);
        let lost: usize = lost_jobs.iter().map(|job| job.ops.len()).sum();
        for job in lost_jobs {
            self.refuse(job, StoreError::Failed("the disk keeps failing".to_owned()));
        }
        match lost {
            0 => Ok(()),
            n => Err(StoreError::Failed(format!("{n} writes could not be saved"))),
        }
    }

    /// Commits jobs in one transaction, or one by one if that fails. Returns the jobs to try again.
    fn commit(&self, jobs: Vec<WriteJob>) -> Vec<WriteJob> {
        if jobs.is_empty() {
            return jobs;
        }
        match self.try_commit(&jobs) {
            Ok(transaction) => {
                self.report(jobs, transaction);
                Vec::new()
            }
            Err(TransactionFailure::Storage(error) | TransactionFailure::Batch(error)) => {
                tracing::warn!(%error, jobs = jobs.len(), "a commit failed: trying one by one");
                self.commit_one_by_one(jobs)
            }
        }
    }

    fn commit_one_by_one(&self, jobs: Vec<WriteJob>) -> Vec<WriteJob> {
        let mut retry = Vec::new();
        let mut broken = None;
        for job in jobs {
            let result = match &broken {
                Some(error) => Err(TransactionFailure::Storage(StoreError::clone(error))),
                None => self.try_commit(std::slice::from_ref(&job)),
            };
            match result {
                Ok(transaction) => self.report(vec![job], transaction),
                Err(TransactionFailure::Batch(error)) => self.refuse(job, error),
                Err(TransactionFailure::Storage(error)) => {
                    broken = Some(error.clone());
                    match job.reply {
                        Some(_) => self.refuse(job, error),
                        None => retry.push(job),
                    }
                }
            }
        }
        retry
    }

    fn try_commit(&self, jobs: &[WriteJob]) -> Result<Transaction, TransactionFailure> {
        let started = Instant::now();
        self.health.begin();
        // Held until the transaction is committed and logged, so that a copy of the file misses none.
        let mut log = self.log.lock();
        let result = catch_unwind(AssertUnwindSafe(|| self.transaction(jobs)));
        let refused =
            |error: &StoreError| !matches!(error, StoreError::Corrupt { .. } | StoreError::Gap(..));
        self.health.end(matches!(&result, Ok(Err(error)) if refused(error)));
        match result {
            Ok(Ok(transaction)) => {
                if let Some(log) = &mut *log {
                    log.push(jobs.iter().map(WriteJob::batch).collect());
                }
                let operations: usize = jobs.iter().map(|job| job.ops.len()).sum();
                self.metrics.store_commit_duration.observe(started.elapsed().as_secs_f64());
                self.metrics.store_batch_operations.observe(operations as f64);
                Ok(transaction)
            }
            Ok(Err(error)) if !refused(&error) => Err(TransactionFailure::Batch(error)),
            Ok(Err(error)) => {
                self.reopen();
                Err(TransactionFailure::Storage(error))
            }
            Err(_) => {
                // The panic dropped the transaction half-way. Reopening restores the last commit.
                self.reopen();
                let error = StoreError::Failed("the writer panicked".to_owned());
                Err(TransactionFailure::Batch(error))
            }
        }
    }

    fn transaction(&self, jobs: &[WriteJob]) -> Result<Transaction, StoreError> {
        self.file.write(|tx| {
            let batches = jobs.iter().map(|job| {
                #[cfg(test)]
                (self.breakpoint)(&job.ops);
                (&job.ops[..], &job.feedback_ids[..])
            });
            apply_all(tx, batches)
        })
    }

    fn reopen(&self) {
        if let Err(error) = self.file.reopen(&self.opener) {
            tracing::error!(%error, "the ledger cannot be reopened");
        }
    }

    /// Updates metrics and watchers after a commit, then answers the callers.
    fn report(&self, jobs: Vec<WriteJob>, transaction: Transaction) {
        let Transaction { answers, counts, ready } = transaction;
        for (table, count) in &counts.written {
            self.metrics.store_records.with_label_values(&[table]).inc_by(*count);
        }
        for (table, count) in &counts.orphans {
            tracing::debug!(table, count, "dropped records of unknown samples or groups");
            self.metrics.store_dropped.with_label_values(&[table]).inc_by(*count);
        }
        let AppliedCounts { ratings, corrections, policies, erased, .. } = &counts;
        self.metrics.store_erasures.inc_by((*erased).into());
        self.metrics.feedback_received.inc_by(ratings.received);
        for (outcome, count) in &ratings.ended {
            self.metrics.feedback_ratings.with_label_values(&[outcome]).inc_by(*count);
        }
        self.metrics.feedback_waiting.add(ratings.more_waiting());
        self.metrics.corrections_received.inc_by(corrections.received);
        for (outcome, count) in &corrections.ended {
            self.metrics.train.corrections.with_label_values(&[outcome]).inc_by(*count);
        }
        self.metrics.corrections_waiting.add(corrections.more_waiting());
        self.metrics.train.ready_groups.set(i64::try_from(ready).unwrap_or(i64::MAX));
        let ready = usize::try_from(ready).unwrap_or(usize::MAX);
        self.ready.send_if_modified(|known| std::mem::replace(known, ready) != ready);
        if ratings.received + corrections.received > 0 {
            self.feedback.send_modify(|n| *n += 1);
        }
        if !policies.is_empty() {
            self.lineage.send_modify(|lineage| {
                let lineage = Arc::make_mut(lineage);
                policies.iter().for_each(|record| lineage.add(record));
            });
        }
        for (job, answer) in jobs.into_iter().zip(answers) {
            if let Some(reply) = job.reply {
                // The caller may have stopped waiting.
                let _ = reply.send(Ok(answer));
            }
        }
    }

    fn refuse(&self, job: WriteJob, error: StoreError) {
        match job.reply {
            Some(reply) => {
                let _ = reply.send(Err(error));
            }
            None => {
                tracing::error!(%error, operations = job.ops.len(), "writes are lost");
                self.queue.count_dropped(&job.ops);
            }
        }
    }
}
