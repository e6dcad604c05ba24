//! The tables, opened for writing, and the writes that keep their indexes consistent.

use std::collections::BTreeMap;

use redb::{ReadableTableMetadata, Table, WriteTransaction};

use hone_core::types::{Group, GroupState, Interaction, InteractionId, Rating, Reward, SampleId};

use crate::error::StoreError;
use crate::format::codec::encode;
use crate::format::{Bytes, Id, IdPair};
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
    /// Counts one whose outcome is final.
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
    /// The completion's prompt.
    pub(super) interaction: InteractionId,
    /// The last post.
    pub(super) last: Reward,
    /// The last post's rule.
    pub(super) join: fn(&[Rating]) -> Option<f64>,
    /// Number of posts with a value.
    pub(super) values: usize,
}

/// Every table, opened in one write transaction.
pub(crate) struct LedgerTables<'t> {
    pub(crate) interactions: Table<'t, &'static Id, Bytes>,
    pub(crate) samples: Table<'t, &'static Id, Bytes>,
    pub(crate) rewards: Table<'t, (&'static Id, &'static str), Bytes>,
    pub(crate) feedback: Table<'t, &'static Id, Bytes>,
    pub(crate) groups: Table<'t, &'static Id, Bytes>,
    pub(crate) policies: Table<'t, u64, Bytes>,
    pub(crate) steps: Table<'t, u64, Bytes>,
    pub(crate) samples_of: Table<'t, IdPair, (bool, u32)>,
    pub(crate) groups_of: Table<'t, IdPair, ()>,
    pub(crate) ready: Table<'t, (u64, &'static Id), ()>,
    pub(crate) ungrouped: Table<'t, (u64, &'static Id, &'static str), ()>,
    pub(crate) idempotency:
        Table<'t, (Option<&'static str>, &'static str), (&'static Id, &'static Id)>,
    pub(crate) ratings: Table<'t, (&'static Id, &'static str, Option<&'static str>), &'static Id>,
    pub(crate) sessions: Table<'t, (Option<&'static str>, &'static str, &'static Id), ()>,
    pub(crate) same_prompt: Table<'t, IdPair, ()>,
    pub(crate) held_out: Table<'t, (&'static str, &'static Id), ()>,
    pub(crate) quarantine: Table<'t, &'static str, (&'static str, u64)>,
    pub(crate) by_key: Table<'t, (Option<&'static str>, &'static Id), ()>,
    pub(crate) feedback_of: Table<'t, IdPair, ()>,
    pub(crate) turns: Table<'t, IdPair, Option<u32>>,
    pub(crate) turns_of: Table<'t, IdPair, ()>,
    pub(crate) erased: Table<'t, &'static Id, u64>,
    /// Ratings that are recorded and not combined yet, by completion and part.
    pub(super) pending: BTreeMap<(SampleId, String), PendingRating>,
    /// Effects so far.
    pub(crate) counts: AppliedCounts,
}

impl<'t> LedgerTables<'t> {
    /// Opens every table.
    pub(crate) fn new(tx: &'t WriteTransaction) -> Result<Self, StoreError> {
        Ok(Self {
            interactions: tx.open_table(crate::format::INTERACTIONS)?,
            samples: tx.open_table(crate::format::SAMPLES)?,
            rewards: tx.open_table(crate::format::REWARDS)?,
            feedback: tx.open_table(crate::format::FEEDBACK)?,
            groups: tx.open_table(crate::format::GROUPS)?,
            policies: tx.open_table(crate::format::POLICIES)?,
            steps: tx.open_table(crate::format::STEPS)?,
            samples_of: tx.open_table(crate::format::SAMPLES_OF)?,
            groups_of: tx.open_table(crate::format::GROUPS_OF)?,
            ready: tx.open_table(crate::format::READY)?,
            ungrouped: tx.open_table(crate::format::UNGROUPED)?,
            idempotency: tx.open_table(crate::format::IDEMPOTENCY)?,
            ratings: tx.open_table(crate::format::RATINGS)?,
            sessions: tx.open_table(crate::format::SESSIONS)?,
            same_prompt: tx.open_table(crate::format::SAME_PROMPT)?,
            held_out: tx.open_table(crate::format::HELD_OUT)?,
            quarantine: tx.open_table(crate::format::QUARANTINE)?,
            by_key: tx.open_table(crate::format::BY_KEY)?,
            feedback_of: tx.open_table(crate::format::FEEDBACK_OF)?,
            turns: tx.open_table(crate::format::TURNS)?,
            turns_of: tx.open_table(crate::format::TURNS_OF)?,
            erased: tx.open_table(crate::format::ERASED)?,
            pending: BTreeMap::new(),
            counts: AppliedCounts::default(),
        })
    }

    /// Number of groups in state `Ready`.
    pub(crate) fn ready_count(&self) -> Result<u64, StoreError> {
        Ok(self.ready.len()?)
    }

    /// Counts a written row.
    pub(super) fn count_written(&mut self, table: &'static str) {
        *self.counts.written.entry(table).or_default() += 1;
    }

    /// Counts an operation without effect.
    pub(super) fn count_orphan(&mut self, table: &'static str) {
        *self.counts.orphans.entry(table).or_default() += 1;
    }

    /// The current value of a reward part.
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

    /// The prompt under `id`.
    pub(super) fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        reader::get(&self.interactions, id.0.as_bytes())
    }

    /// The group under `id`.
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
