//! The one thread that writes: gathers batches, commits them in one transaction, answers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use hone_core::metrics::Metrics;

use super::apply::{AppliedCounts, Writing};
use super::handle::Handle;
use super::queue::{WriteJob, WriteQueue};
use super::{Committed, FeedbackOutcome, StoreError};

/// How long work that a failing disk refused waits for the next try.
const RETRY: Duration = Duration::from_secs(1);

/// How the writer ended.
pub(super) type Ended = Option<Result<(), StoreError>>;

/// What a test does inside a transaction.
#[cfg(test)]
pub(super) type Breakpoint = Box<dyn Fn(&[super::Op]) + Send>;

/// The writer's world.
pub(super) struct Writer {
    /// The file.
    pub(super) handle: Arc<Handle>,
    /// What to write.
    pub(super) queue: Arc<WriteQueue>,
    /// What to count.
    pub(super) metrics: Arc<Metrics>,
    /// How long to gather before a commit.
    pub(super) gather: Duration,
    /// How much work without a waiter to keep while the disk fails, in operations.
    pub(super) limit: usize,
    /// The number of ready groups.
    pub(super) ready: watch::Sender<usize>,
    /// Bumped when feedback was recorded.
    pub(super) feedback: watch::Sender<u64>,
    /// Told at the end.
    pub(super) ended: watch::Sender<Ended>,
    /// Called with each batch inside its transaction, so that tests can fail there.
    #[cfg(test)]
    pub(super) breakpoint: Breakpoint,
}

/// Why an attempt failed.
enum Failure {
    /// The file: the same may succeed after reopening, and nothing else will before it.
    Storage(StoreError),
    /// Something in the batch, or a panic over it: trying again is no use.
    Batch(StoreError),
}

/// What a transaction did, and what to answer to each job.
struct Done {
    answers: Vec<Committed>,
    tally: AppliedCounts,
    ready: u64,
}

/// Closes the queue even when the thread unwinds, so that nobody waits for it.
struct Abandon(Arc<WriteQueue>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Writer {
    /// Writes until the queue is closed and empty.
    pub(super) fn run(self) {
        let _abandon = Abandon(self.queue.clone());
        // Work without a waiter that the disk refused; it goes first next time.
        let mut kept = Vec::new();
        loop {
            let patience = (!kept.is_empty()).then_some(RETRY);
            let Some(jobs) = self.queue.take(self.gather, patience) else { break };
            kept.extend(jobs);
            kept = self.commit(kept);
        }
        let kept = self.commit(kept);
        let lost: usize = kept.iter().map(|job| job.ops.len()).sum();
        self.give_up(kept);
        self.handle.close();
        let result = match lost {
            0 => Ok(()),
            n => Err(StoreError::Database(format!("{n} writes could not be saved"))),
        };
        self.ended.send_replace(Some(result));
    }

    /// Commits jobs together; where that fails, one by one. Returns what to try again later.
    fn commit(&self, jobs: Vec<WriteJob>) -> Vec<WriteJob> {
        if jobs.is_empty() {
            return jobs;
        }
        match self.attempt(&jobs) {
            Ok(done) => {
                self.settle(jobs, done);
                Vec::new()
            }
            Err(Failure::Storage(error) | Failure::Batch(error)) => {
                tracing::warn!(%error, jobs = jobs.len(), "a commit failed: trying one by one");
                self.commit_singly(jobs)
            }
        }
    }

    fn commit_singly(&self, jobs: Vec<WriteJob>) -> Vec<WriteJob> {
        let mut kept = Vec::new();
        let mut broken = None;
        for job in jobs {
            let attempt = match &broken {
                Some(error) => Err(Failure::Storage(StoreError::clone(error))),
                None => self.attempt(std::slice::from_ref(&job)),
            };
            match attempt {
                Ok(done) => self.settle(vec![job], done),
                Err(Failure::Batch(error)) => self.refuse(job, error),
                Err(Failure::Storage(error)) => {
                    broken = Some(error.clone());
                    match job.reply {
                        Some(_) => self.refuse(job, error),
                        None => kept.push(job),
                    }
                }
            }
        }
        self.within_limit(kept)
    }

    /// One transaction over all jobs.
    fn attempt(&self, jobs: &[WriteJob]) -> Result<Done, Failure> {
        let started = Instant::now();
        let attempt = catch_unwind(AssertUnwindSafe(|| self.transaction(jobs)));
        match attempt {
            Ok(Ok(done)) => {
                let operations: usize = jobs.iter().map(|job| job.ops.len()).sum();
                self.metrics.store_commit_duration.observe(started.elapsed().as_secs_f64());
                self.metrics.store_batch_operations.observe(operations as f64);
                Ok(done)
            }
            Ok(Err(error @ StoreError::Corrupt { .. })) => Err(Failure::Batch(error)),
            Ok(Err(error)) => {
                self.reopen();
                Err(Failure::Storage(error))
            }
            Err(_) => {
                // The transaction was dropped half-way; only a reopened file is certainly whole.
                self.reopen();
                Err(Failure::Batch(StoreError::Database("the writer panicked".to_owned())))
            }
        }
    }

    fn transaction(&self, jobs: &[WriteJob]) -> Result<Done, StoreError> {
        self.handle.write(|tx| {
            let mut writing = Writing::new(tx)?;
            let mut answers = Vec::with_capacity(jobs.len());
            for job in jobs {
                #[cfg(test)]
                (self.breakpoint)(&job.ops);
                let mut feedback = Vec::new();
                for (op, id) in job.ops.iter().zip(&job.feedback_ids) {
                    feedback.extend(writing.apply(op, *id)?);
                }
                answers.push(Committed { feedback });
            }
            let ready = writing.ready_len()?;
            Ok(Done { answers, tally: writing.tally, ready })
        })
    }

    fn reopen(&self) {
        if let Err(error) = self.handle.reopen() {
            tracing::error!(%error, "the ledger cannot be reopened");
        }
    }

    /// Tells everybody, after the commit.
    fn settle(&self, jobs: Vec<WriteJob>, done: Done) {
        for (table, count) in &done.tally.written {
            self.metrics.store_records.with_label_values(&[table]).inc_by(*count);
        }
        for (table, count) in &done.tally.orphans {
            tracing::debug!(table, count, "dropped what belongs to no recorded sample or group");
            self.metrics.store_dropped.with_label_values(&[table]).inc_by(*count);
        }
        self.metrics.train.ready_groups.set(i64::try_from(done.ready).unwrap_or(i64::MAX));
        let ready = usize::try_from(done.ready).unwrap_or(usize::MAX);
        self.ready.send_if_modified(|known| std::mem::replace(known, ready) != ready);
        let recorded = done.answers.iter().any(|a| a.feedback.iter().any(FeedbackOutcome::is_news));
        if recorded {
            self.feedback.send_modify(|n| *n += 1);
        }
        for (job, answer) in jobs.into_iter().zip(done.answers) {
            if let Some(reply) = job.reply {
                // A caller that gave up waiting is none of the ledger's business.
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

    /// Bounds what a failing disk makes wait, the oldest given up first.
    fn within_limit(&self, mut kept: Vec<WriteJob>) -> Vec<WriteJob> {
        let mut room = self.limit;
        let fitting = kept
            .iter()
            .rev()
            .take_while(|job| {
                let fits = job.ops.len() <= room;
                room = room.saturating_sub(job.ops.len());
                fits
            })
            .count();
        let rest = kept.split_off(kept.len() - fitting);
        self.give_up(kept);
        rest
    }

    fn give_up(&self, jobs: Vec<WriteJob>) {
        for job in jobs {
            self.refuse(job, StoreError::Database("the disk keeps failing".to_owned()));
        }
    }
}
