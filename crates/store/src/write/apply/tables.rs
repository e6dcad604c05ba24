//! The tables, opened for writing, and the writes that keep their indexes consistent.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use redb::{ReadableTableMetadata, WriteTransaction};

use hone_core::types::{Group, GroupState, Interaction, InteractionId, Rating, Reward, SampleId};

use crate::error::StoreError;
use crate::format::codec::encode;
use crate::format::{Id, LedgerTables};
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
    pub(super) join: fn(&[Rating]) -> Option<f64>,
    /// Number of posts with a value.
    pub(super) values: usize,
}

/// Applies the operations of one write transaction to the tables.
pub(crate) struct Applier<'t> {
    tables: LedgerTables<'t>,
    /// Ratings that are recorded and not combined yet, by completion and part.
    pub(super) pending: BTreeMap<(SampleId, String), PendingRating>,
    pub(crate) counts: AppliedCounts,
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
        let (tables, counts) = (LedgerTables::new(tx)?, AppliedCounts::default());
        Ok(Self { tables, pending: BTreeMap::new(), counts })
    }

    pub(crate) fn ready_count(&self) -> Result<u64, StoreError> {
        Ok(self.ready.len()?)
    }

    pub(super) fn count_written(&mut self, table: &'static str) {
        *self.counts.written.entry(table).or_default() += 1;
    }

    pub(super) fn count_orphan(&mut self, table: &'static str) {
        *self.counts.orphans.entry(table).or_default() += 1;
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

    /// Writes a group, and updates the index of ready groups.
    pub(super) fn put_group(&mut self, row: &Group) -> Result<(), StoreError> {
        let id = row.id.0.as_bytes();
        if let Some(previous) = self.group(id)? {
            self.ready.remove((previous.created, id))?;
        }
        self.groups.insert(id, encode(row)?.as_slice())?;
        if row.state == GroupState::Ready {
            self.ready.insert((row.created, id), ())?;
        }
        self.count_written("groups");
        Ok(())
    }
}
