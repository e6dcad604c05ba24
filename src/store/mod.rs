//! The ledger: one redb file that holds everything the loop must not lose.
//!
//! One writer thread owns all mutation and commits in groups ([`Store::commit`] answers after its
//! commit is durable); readers use snapshots. A full queue sheds shadow samples first, counts
//! every drop, and never drops feedback or what was served.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::StoreConfig;
use crate::telemetry::Metrics;
use crate::types::{
    Group, GroupId, GroupState, Interaction, InteractionId, PolicyRecord, PolicyVersion, Reward,
    Sample, SampleId, StepRecord, UnixMillis,
};

/// What can go wrong with the ledger.
#[derive(Debug, thiserror::Error)]
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

/// One piece of feedback, as a client posts it.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedbackEntry {
    /// The completion it judges.
    pub interaction: InteractionId,
    /// Which served choice.
    pub choice: u32,
    /// The reward part.
    pub name: String,
    /// The value.
    pub value: f64,
    /// A remark.
    pub comment: Option<String>,
    /// Not counted twice under the same key.
    pub idempotency_key: Option<String>,
    /// Which API key gave it.
    pub key_id: Option<String>,
    /// When it arrived.
    pub created: UnixMillis,
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
    /// Records a client's value; replaces the value of the same sample and name.
    Feedback(Box<FeedbackEntry>),
    /// Records or replaces a group.
    Group(Box<Group>),
    /// Changes a group's state.
    GroupState(GroupId, GroupState),
    /// Records or replaces a policy version.
    Policy(Box<PolicyRecord>),
    /// Records an optimiser step and marks its groups `Trained`, in one transaction.
    Step(Box<StepRecord>),
}

/// What became of a [`Op::Feedback`].
#[derive(Clone, Debug, PartialEq)]
pub enum FeedbackOutcome {
    /// Recorded for this sample.
    Recorded(SampleId),
    /// The same idempotency key was recorded before, for this sample.
    Duplicate(SampleId),
    /// No such completion.
    UnknownCompletion,
    /// The completion has no such choice.
    UnknownChoice,
}

/// What a committed batch did: one outcome for each `Op::Feedback` in it, in order.
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

/// The ledger. Cheap to clone; the last clone's [`Store::close`] ends the writer.
#[derive(Clone)]
pub struct Store {
    _config: StoreConfig,
    _metrics: Arc<Metrics>,
}

// STUB: signatures only; the store's author replaces every body.
#[expect(unused_variables, clippy::unused_async, reason = "stub")]
impl Store {
    /// Opens or creates the file, runs migrations, starts the writer.
    pub fn open(
        path: &Path,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        Ok(Self { _config: config.clone(), _metrics: metrics })
    }
    /// Writes one transaction's worth and waits until it is durable.
    pub async fn commit(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        Err(StoreError::Closed)
    }
    /// [`Self::commit`] for threads outside the runtime.
    pub fn commit_blocking(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        Err(StoreError::Closed)
    }
    /// Queues a write without waiting, in order with everything else; sheds shadow samples (and
    /// their rewards and groups) when the queue is full and answers `Overloaded` for them.
    pub fn enqueue(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// One prompt.
    pub fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        Ok(None)
    }
    /// One completion.
    pub fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        Ok(None)
    }
    /// Every completion of a prompt, in key order.
    pub fn samples_of(&self, id: InteractionId) -> Result<Vec<Sample>, StoreError> {
        Ok(Vec::new())
    }
    /// Every reward part of a completion, by name.
    pub fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        Ok(Vec::new())
    }
    /// One group.
    pub fn group(&self, id: GroupId) -> Result<Option<Group>, StoreError> {
        Ok(None)
    }
    /// Every group of a prompt, in key order.
    pub fn groups_of(&self, id: InteractionId) -> Result<Vec<Group>, StoreError> {
        Ok(Vec::new())
    }
    /// Groups in state `Ready`, oldest first.
    pub fn ready_groups(&self, limit: usize) -> Result<Vec<Group>, StoreError> {
        Ok(Vec::new())
    }
    /// How many groups are `Ready`; changes wake whoever waits on it.
    pub fn watch_ready(&self) -> tokio::sync::watch::Receiver<usize> {
        tokio::sync::watch::channel(0).1
    }
    /// Feedback that no group trains on yet `(sample, part name)`, oldest feedback first, recorded
    /// at or before `until`. A committed group clears it for each member and part it names.
    pub fn ungrouped_feedback(
        &self,
        until: UnixMillis,
        limit: usize,
    ) -> Result<Vec<(SampleId, String)>, StoreError> {
        Ok(Vec::new())
    }
    /// Bumped after each commit that recorded feedback.
    pub fn watch_feedback(&self) -> tokio::sync::watch::Receiver<u64> {
        tokio::sync::watch::channel(0).1
    }
    /// One policy version.
    pub fn policy(&self, version: PolicyVersion) -> Result<Option<PolicyRecord>, StoreError> {
        Ok(None)
    }
    /// Every policy version, in order.
    pub fn policies(&self) -> Result<Vec<PolicyRecord>, StoreError> {
        Ok(Vec::new())
    }
    /// The last optimiser step.
    pub fn last_step(&self) -> Result<Option<StepRecord>, StoreError> {
        Ok(None)
    }
    /// Optimiser steps from `first` on, at most `limit`.
    pub fn steps(&self, first: u64, limit: usize) -> Result<Vec<StepRecord>, StoreError> {
        Ok(Vec::new())
    }
    /// Rows by table.
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        Ok(StoreStats::default())
    }
    /// Commits what is queued and stops the writer; later writes answer `Closed`.
    pub async fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
