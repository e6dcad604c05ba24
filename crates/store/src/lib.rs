//! The ledger: one redb file that holds everything the loop must not lose.
//!
//! One writer thread owns all mutation and commits in groups ([`Store::commit`] answers after its
//! commit is durable); readers use snapshots. A full queue sheds shadow samples first, counts
//! every drop, and never drops feedback or what was served.

mod apply;
mod check;
mod codec;
mod config;
mod feedback;
mod handle;
pub mod maintain;
mod migrate;
mod queue;
mod reader;
mod records;
mod schema;
mod writer;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use handle::{Handle, Opener};
use queue::WriteQueue;
use redb::ReadTransaction;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use writer::{Ended, Writer};

use hone_core::metrics::Metrics;
use hone_core::types::{
    Group, GroupId, GroupState, Interaction, InteractionId, PolicyRecord, PolicyVersion, Rating,
    Reward, Sample, SampleId, StepRecord, UnixMillis,
};

pub use config::StoreConfig;
pub use feedback::{FeedbackEntry, FeedbackOutcome, Quarantined, SET_ASIDE};

/// What can go wrong with the ledger.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// redb refused.
    #[error("ledger: {0}")]
    Database(String),
    /// A stored value could not be read.
    #[error("ledger: {table} holds a value that cannot be read: {reason}")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// What the decoder said.
        reason: String,
    },
    /// Written by a newer hone.
    #[error(
        "the ledger has schema version {found}; this hone knows versions up to {known}: \
         use a newer hone, or another data directory"
    )]
    NewerSchema {
        /// In the file.
        found: u32,
        /// In this binary.
        known: u32,
    },
    /// Another process has the file.
    #[error("the ledger {0} is in use by another process")]
    InUse(String),
    /// The queue is full; only what may be shed is refused.
    #[error("the ledger's queue is full")]
    Overloaded,
    /// The writer has stopped.
    #[error("the ledger is closed")]
    Closed,
}

/// One write. A batch of them is one transaction.
#[derive(Clone, Debug)]
pub enum Op {
    /// Records a prompt.
    Interaction(Box<Interaction>),
    /// Records a completion.
    Sample(Box<Sample>),
    /// Records a grader's value; replaces the value of the same sample and name.
    Reward(Box<Reward>),
    /// Records a client's value; replaces his own of the same sample and name, and joins it with
    /// those of the others.
    Feedback(Box<FeedbackEntry>),
    /// Records a client's value for the turns of a conversation that have one finished completion
    /// each; all of it or, where the first entry's idempotency key was seen before, nothing.
    Conversation(Vec<FeedbackEntry>),
    /// Sets an API key's feedback aside; where it is already, the first reason stays.
    Quarantine(Quarantined),
    /// Lets an API key's feedback count again, and puts up again what was dropped meanwhile only
    /// for being set aside ([`SET_ASIDE`]).
    Release(String),
    /// Records or replaces a group.
    Group(Box<Group>),
    /// Changes a group's state.
    GroupState(GroupId, GroupState),
    /// Records or replaces a policy version.
    Policy(Box<PolicyRecord>),
    /// Records an optimiser step and marks its groups `Trained`, in one transaction.
    Step(Box<StepRecord>),
}

/// What a committed batch did: one outcome for each `Op::Feedback` or `Op::Conversation` in it, in
/// order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Committed {
    /// In the order of the batch's feedback operations.
    pub feedback: Vec<FeedbackOutcome>,
}

/// How many rows each table holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Prompts.
    pub interactions: u64,
    /// Completions.
    pub samples: u64,
    /// Rewards that clients posted.
    pub feedback: u64,
    /// Rewards of any source.
    pub rewards: u64,
    /// Groups.
    pub groups: u64,
    /// Policy versions.
    pub policy_versions: u64,
    /// Optimiser steps.
    pub steps: u64,
}

impl StoreStats {
    /// `(table, rows)`, for people.
    pub fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("interactions", self.interactions),
            ("samples", self.samples),
            ("feedback", self.feedback),
            ("rewards", self.rewards),
            ("groups", self.groups),
            ("policy_versions", self.policy_versions),
            ("steps", self.steps),
        ]
    }
}

/// The ledger. Cheap to clone; [`Store::close`] ends the writer, and so does dropping the last
/// clone.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Arc<Handle>,
    queue: Arc<WriteQueue>,
    ready: watch::Receiver<usize>,
    feedback: watch::Receiver<u64>,
    ended: watch::Receiver<Ended>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Inner {
    /// Waits for the writer, so that the file is free when the last clone is gone.
    fn drop(&mut self) {
        self.queue.close();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the ledger's writer panicked");
        }
    }
}

impl Store {
    /// Opens or creates the file, runs migrations, starts the writer.
    ///
    /// # Errors
    /// `InUse`, `NewerSchema`, `Corrupt` for a redb file that is no ledger, `Database` otherwise.
    pub fn open(
        path: &Path,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        Self::start(handle::opener(path), config, metrics, |_| {})
    }

    fn start(
        opener: Opener,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
        adjust: impl FnOnce(&mut Writer),
    ) -> Result<Self, StoreError> {
        let handle = Arc::new(Handle::new(opener, migrate::to_current)?);
        let queue = Arc::new(WriteQueue::new(config.queue, metrics.clone()));
        let aside = handle.read(reader::quarantined)?.len();
        metrics.reward_quarantined_keys.set(i64::try_from(aside).unwrap_or(i64::MAX));
        let waiting = handle.read(reader::ready_len)?;
        metrics.train.ready_groups.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        let (ready_sender, ready) = watch::channel(waiting);
        let (feedback_sender, feedback) = watch::channel(0);
        let (ended_sender, ended) = watch::channel(None);
        let mut writer = Writer {
            handle: handle.clone(),
            queue: queue.clone(),
            metrics,
            gather: Duration::from_millis(config.group_commit_ms),
            limit: config.queue,
            ready: ready_sender,
            feedback: feedback_sender,
            ended: ended_sender,
            #[cfg(test)]
            breakpoint: Box::new(|_| {}),
        };
        adjust(&mut writer);
        let thread = std::thread::Builder::new()
            .name("hone-ledger".to_owned())
            .spawn(move || writer.run())
            .map_err(|e| StoreError::Database(format!("the writer cannot start: {e}")))?;
        let thread = Mutex::new(Some(thread));
        Ok(Self { inner: Arc::new(Inner { handle, queue, ready, feedback, ended, thread }) })
    }

    /// Writes one transaction's worth and waits until it is durable.
    ///
    /// # Errors
    /// `Closed`, or why the commit failed; where the disk failed over it, it may be in the file or
    /// not, but never in part.
    pub async fn commit(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        self.push(ops, false).await
    }

    /// [`Self::commit`] without `store.group_commit_ms`, for the few writes that the next step waits
    /// for.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub async fn commit_now(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        self.push(ops, true).await
    }

    /// [`Self::commit_now`] for threads outside the runtime.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn commit_blocking(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        futures::executor::block_on(self.commit_now(ops))
    }

    async fn push(&self, ops: Vec<Op>, urgent: bool) -> Result<Committed, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.inner.queue.push(ops, reply, urgent)?;
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Waits until everything that was queued before is durable, and visible to reads.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub async fn settled(&self) -> Result<(), StoreError> {
        self.commit(Vec::new()).await.map(|_| ())
    }

    /// Queues a write without waiting, in order with everything else; sheds shadow samples (and
    /// their rewards and groups) when the queue is full and answers `Overloaded` for them.
    ///
    /// # Errors
    /// `Overloaded` as above (the rest of the batch is queued all the same), or `Closed`.
    pub fn enqueue(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        self.inner.queue.push_or_shed(ops)
    }

    fn read<T>(
        &self,
        f: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.inner.handle.read(f)
    }

    /// One prompt.
    ///
    /// # Errors
    /// If the file or the row cannot be read; so for every reading method.
    pub fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        self.read(|tx| reader::by_id(tx, schema::INTERACTIONS, id.0))
    }

    /// One completion.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        self.read(|tx| reader::by_id(tx, schema::SAMPLES, id.0))
    }

    /// Every completion of a prompt, in key order.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn samples_of(&self, id: InteractionId) -> Result<Vec<Sample>, StoreError> {
        self.read(|tx| reader::samples_of(tx, id))
    }

    /// The prompts of a conversation that a key has had, oldest first.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn turns_of(
        &self,
        key_id: Option<&str>,
        session: &str,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| reader::turns_of(tx, key_id, session, limit))
    }

    /// Every reward part of a completion, by name.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        self.read(|tx| reader::rewards_of(tx, id))
    }

    /// Each rater's newest rating of a completion under one name.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError> {
        self.read(|tx| reader::ratings_of(tx, id, name))
    }

    /// Keys whose feedback is set aside, by id.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn quarantined(&self) -> Result<Vec<Quarantined>, StoreError> {
        self.read(reader::quarantined)
    }

    /// One group.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn group(&self, id: GroupId) -> Result<Option<Group>, StoreError> {
        self.read(|tx| reader::by_id(tx, schema::GROUPS, id.0))
    }

    /// Every group of a prompt, in key order.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn groups_of(&self, id: InteractionId) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| reader::groups_of(tx, id))
    }

    /// Groups in state `Ready`, oldest first.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn ready_groups(&self, limit: usize) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| reader::ready_groups(tx, limit))
    }

    /// How many groups are `Ready`; changes wake whoever waits on it.
    pub fn watch_ready(&self) -> watch::Receiver<usize> {
        self.inner.ready.clone()
    }

    /// Feedback that no group trains on yet `(sample, part name)`, oldest feedback first, recorded
    /// at or before `until`. A committed group clears it for each member and part it names; another
    /// value posted after that group was trained on brings it back.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn ungrouped_feedback(
        &self,
        until: UnixMillis,
        limit: usize,
    ) -> Result<Vec<(SampleId, String)>, StoreError> {
        self.read(|tx| reader::ungrouped(tx, until, limit))
    }

    /// Bumped after each commit that recorded feedback.
    pub fn watch_feedback(&self) -> watch::Receiver<u64> {
        self.inner.feedback.clone()
    }

    /// One policy version.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn policy(&self, version: PolicyVersion) -> Result<Option<PolicyRecord>, StoreError> {
        self.read(|tx| reader::by_number(tx, schema::POLICIES, version.0))
    }

    /// Every policy version, in order.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn policies(&self) -> Result<Vec<PolicyRecord>, StoreError> {
        self.read(|tx| reader::from_number(tx, schema::POLICIES, 0, usize::MAX))
    }

    /// The last optimiser step.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn last_step(&self) -> Result<Option<StepRecord>, StoreError> {
        self.read(reader::last_step)
    }

    /// Optimiser steps from `first` on, at most `limit`.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn steps(&self, first: u64, limit: usize) -> Result<Vec<StepRecord>, StoreError> {
        self.read(|tx| reader::from_number(tx, schema::STEPS, first, limit))
    }

    /// Rows by table.
    ///
    /// # Errors
    /// As [`Self::interaction`].
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        self.read(reader::stats)
    }

    /// Commits what is queued, stops the writer and closes the file; later calls answer `Closed`.
    ///
    /// # Errors
    /// If something that was queued could not be saved.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.inner.queue.close();
        let mut ended = self.inner.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(())),
            Err(_) => Err(StoreError::Database("the writer ended early".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests;
