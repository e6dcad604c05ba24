//! The tables, opened for writing, and the writes that keep their indexes consistent.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

use redb::{ReadableTable, ReadableTableMetadata, WriteTransaction};
use uuid::Uuid;

use hone_core::types::{
    Aggregate, Group, GroupState, Interaction, InteractionId, PolicyRecord, PolicyVersion, Reward,
    Sample, SampleId, UnixMillis,
};

use crate::error::StoreError;
use crate::format::codec::encode;
use crate::format::{Id, LedgerTables};
use crate::op::{AnswerCounts, FeedbackEntry, Outbox, SHIPPED};
use crate::reader;

/// Effects of a transaction, for metrics.
#[derive(Default)]
pub(crate) struct AppliedCounts {
    /// Rows written, by table.
    pub(crate) written: BTreeMap<&'static str, u64>,
    /// Operations without effect because their sample or group is unknown, by table.
    pub(crate) orphans: BTreeMap<&'static str, u64>,
    pub(crate) ratings: OutcomeCounts,
    pub(crate) corrections: OutcomeCounts,
    /// Whether anything was erased.
    pub(crate) erased: bool,
    /// The policy versions that were recorded.
    pub(crate) policies: Vec<PolicyRecord>,
}

/// What became of ratings, or of corrections.
#[derive(Default)]
pub(crate) struct OutcomeCounts {
    /// Those that were recorded, or that wait for the trainer again.
    pub(crate) received: u64,
    /// Those whose outcome became final: `trained`, or why they are not used.
    pub(crate) ended: BTreeMap<String, u64>,
}

impl OutcomeCounts {
    pub(super) fn end(&mut self, outcome: &str) {
        *self.ended.entry(outcome.to_owned()).or_default() += 1;
    }

    /// By how many more wait for the trainer.
    pub(crate) fn more_waiting(&self) -> i64 {
        let count = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        count(self.received) - count(self.ended.values().sum())
    }
}

/// Posts for one part of a completion whose value is not combined yet.
pub(super) struct PendingRating {
    pub(super) interaction: InteractionId,
    pub(super) last: Reward,
    /// The last post's rule.
    pub(super) aggregate: Aggregate,
    /// Number of posts with a value.
    pub(super) values: usize,
}

/// Applies the operations of one write transaction to the tables.
pub(crate) struct Applier<'t> {
    tables: LedgerTables<'t>,
    /// Ratings that are recorded and not combined yet, by completion and part.
    pub(super) pending: BTreeMap<(SampleId, String), PendingRating>,
    pub(crate) counts: AppliedCounts,
    /// The ledger's outbox.
    pub(crate) mode: Outbox,
    /// When the batches that are being applied were taken in; `None` for those of this process.
    pub(super) intake: Option<UnixMillis>,
    /// Ratings of other processes that were recorded.
    pub(crate) taken: Vec<(FeedbackEntry, SampleId, PolicyVersion)>,
    /// The requests of a canary that were taken in.
    pub(crate) answers: Vec<(PolicyVersion, AnswerCounts)>,
    /// Whether the operation has no effect.
    pub(super) ignored: bool,
    /// Prompts and rows of feedback to erase from the outbox and from what is held.
    pub(super) gone: BTreeSet<Uuid>,
}

impl<'t> Deref for Applier<'t> {
    type Target = LedgerTables<'t>;

    fn deref(&self) -> &LedgerTables<'t> {
        &self.tables
    }
}

impl DerefMut for Applier<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.tables
    }
}

impl<'t> Applier<'t> {
    pub(crate) fn new(tx: &'t WriteTransaction) -> Result<Self, StoreError> {
        let tables = LedgerTables::new(tx)?;
        let log = tables.own_log.first()?.map(|(log, _)| Uuid::from_bytes(*log.value()));
        Ok(Self {
            tables,
            pending: BTreeMap::new(),
            counts: AppliedCounts::default(),
            mode: match log {
                None => Outbox::Off,
                Some(log) if log.is_nil() => Outbox::Trainer,
                Some(_) => Outbox::Server,
            },
            intake: None,
            taken: Vec::new(),
            answers: Vec::new(),
            ignored: false,
            gone: BTreeSet::new(),
        })
    }

    pub(crate) fn ready_count(&self) -> Result<u64, StoreError> {
        Ok(self.ready.len()?)
    }

    pub(super) fn count_written(&mut self, table: &'static str) {
        *self.counts.written.entry(table).or_default() += 1;
    }

    pub(super) fn count_orphan(&mut self, table: &'static str) {
        *self.counts.orphans.entry(table).or_default() += 1;
        self.ignored = true;
    }

    pub(super) fn current_reward(
        &self,
        sample: SampleId,
        name: &str,
    ) -> Result<Option<Reward>, StoreError> {
        reader::get(&self.rewards, (sample.0.as_bytes(), name))
    }

    /// Writes the current value of a reward part; returns the previous one. The value does not wait
    /// for a group until the caller adds it to `ungrouped`.
    pub(super) fn put_reward(&mut self, row: &Reward) -> Result<Option<Reward>, StoreError> {
        let sample = row.sample.0.as_bytes();
        let previous = self.current_reward(row.sample, &row.name)?;
        if let Some(previous) = &previous {
            self.ungrouped.remove((previous.created, sample, row.name.as_str()))?;
        }
        self.rewards.insert((sample, row.name.as_str()), encode(row)?.as_slice())?;
        self.count_written("rewards");
        Ok(previous)
    }

    pub(super) fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        reader::get(&self.interactions, id.0.as_bytes())
    }

    pub(super) fn group(&self, id: &Id) -> Result<Option<Group>, StoreError> {
        reader::get(&self.groups, id)
    }

    /// The groups of a prompt, in key order.
    pub(super) fn groups_on(&self, prompt: InteractionId) -> Result<Vec<Group>, StoreError> {
        let ids = reader::ids_of(&self.groups_of, prompt.0.as_bytes())?;
        ids.iter().filter_map(|id| self.group(id).transpose()).collect()
    }

    /// The prompts that a group is found by.
    pub(super) fn prompts_of(&self, group: &Group) -> Result<BTreeSet<InteractionId>, StoreError> {
        let mut prompts = BTreeSet::from([group.interaction]);
        for member in &group.members {
            let sample: Option<Sample> = reader::get(&self.samples, member.0.as_bytes())?;
            prompts.extend(sample.map(|sample| sample.interaction));
        }
        Ok(prompts)
    }

    /// Writes a group, and updates the index of ready groups. Prompts that lost their members do not find it any more.
    /// A server hands ready groups over.
    pub(super) fn put_group(&mut self, row: &Group) -> Result<(), StoreError> {
        if self.mode == Outbox::Server && row.state == GroupState::Ready {
            let state = GroupState::Dropped(SHIPPED.to_owned());
            return self.put_group(&Group { state, ..row.clone() });
        }
        let id = row.id.0.as_bytes();
        if let Some(previous) = self.group(id)? {
            if let GroupState::Trained(step) = previous.state
                && row.state != previous.state
            {
                self.leave_step(step, row.id)?;
            }
            self.ready.remove((previous.created, id))?;
            if (&previous.members, previous.interaction) != (&row.members, row.interaction) {
                let left = self.prompts_of(row)?;
                for prompt in self.prompts_of(&previous)?.difference(&left) {
                    self.groups_of.remove((prompt.0.as_bytes(), id))?;
                }
            }
        }
        self.groups.insert(id, encode(row)?.as_slice())?;
        if row.state == GroupState::Ready {
            self.ready.insert((row.created, id), ())?;
        }
        self.count_written("groups");
        Ok(())
    }
}
