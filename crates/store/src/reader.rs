//! Queries on a snapshot, or on the open tables of a transaction.

use std::borrow::Borrow;

use redb::{
    Key, Range, ReadTransaction, ReadableTable, ReadableTableMetadata, TableDefinition, Value,
};
use serde::{Deserialize, Serialize};

use hone_core::types::{Group, InteractionId, Rating, Reward, RewardSource, SampleId};

use crate::error::StoreError;
use crate::format;
use crate::format::codec::{LedgerRecord, decode};
use crate::format::{Bytes, Id, IdPair};
use crate::op::QuarantinedKey;

/// Number of rows in each table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Prompts.
    pub interactions: u64,
    /// Completions.
    pub samples: u64,
    /// Pieces of feedback, including replaced ones.
    pub feedback: u64,
    /// Current values of reward parts, from graders and clients.
    pub rewards: u64,
    /// Groups in any state.
    pub groups: u64,
    /// Policy versions in any state.
    pub policy_versions: u64,
    /// Optimizer steps.
    pub steps: u64,
}

impl StoreStats {
    /// `(table, rows)` for each table, for display.
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

/// The record under `key`.
pub(crate) fn get<'k, K: Key + 'static, R: LedgerRecord>(
    table: &impl ReadableTable<K, Bytes>,
    key: impl Borrow<K::SelfType<'k>>,
) -> Result<Option<R>, StoreError> {
    table.get(key)?.map(|bytes| decode(bytes.value())).transpose()
}

/// The entries of an index under `id`, in key order.
pub(crate) fn entries_of<'t, V: Value + 'static>(
    index: &'t impl ReadableTable<IdPair, V>,
    id: &Id,
) -> Result<Range<'t, IdPair, V>, StoreError> {
    Ok(index.range((id, &Id::default())..=(id, &[u8::MAX; 16]))?)
}

/// The second ids of these entries.
pub(crate) fn ids_of<V: Value + 'static>(
    index: &impl ReadableTable<IdPair, V>,
    id: &Id,
) -> Result<Vec<Id>, StoreError> {
    entries_of(index, id)?.map(|entry| Ok(*entry?.0.value().1)).collect()
}

/// The record under `key` in `table`.
pub(crate) fn find<'k, K: Key + 'static, R: LedgerRecord>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, Bytes>,
    key: impl Borrow<K::SelfType<'k>>,
) -> Result<Option<R>, StoreError> {
    get(&tx.open_table(table)?, key)
}

/// At most `limit` records under numbers from `first` on.
pub(crate) fn from_number<R: LedgerRecord>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, u64, Bytes>,
    first: u64,
    limit: usize,
) -> Result<Vec<R>, StoreError> {
    let rows = tx.open_table(table)?;
    rows.range(first..)?.take(limit).map(|row| decode(row?.1.value())).collect()
}

/// The records that an index has under an interaction, in key order.
pub(crate) fn indexed<V: Value + 'static, R: LedgerRecord>(
    tx: &ReadTransaction,
    index: TableDefinition<'static, IdPair, V>,
    table: TableDefinition<'static, &'static Id, Bytes>,
    id: InteractionId,
) -> Result<Vec<R>, StoreError> {
    let rows = tx.open_table(table)?;
    let ids = ids_of(&tx.open_table(index)?, id.0.as_bytes())?;
    ids.iter().filter_map(|id| get(&rows, id).transpose()).collect()
}

/// Every reward part of a completion, by name.
pub(crate) fn rewards_of(
    rewards: &impl ReadableTable<(&'static Id, &'static str), Bytes>,
    id: SampleId,
) -> Result<Vec<Reward>, StoreError> {
    let sample = id.0.as_bytes();
    let mut found = Vec::new();
    for row in rewards.range((sample, "")..)? {
        let (key, value) = row?;
        if key.value().0 != sample {
            break;
        }
        found.push(decode(value.value())?);
    }
    Ok(found)
}

/// Each rater's newest rating of a completion and part.
pub(crate) fn ratings(
    ratings: &impl ReadableTable<(&'static Id, &'static str, Option<&'static str>), &'static Id>,
    feedback: &impl ReadableTable<&'static Id, Bytes>,
    id: SampleId,
    name: &str,
) -> Result<Vec<Rating>, StoreError> {
    let sample = id.0.as_bytes();
    let mut found = Vec::new();
    for entry in ratings.range((sample, name, None::<&str>)..)? {
        let (key, reward) = entry?;
        if (key.value().0, key.value().1) != (sample, name) {
            break;
        }
        let Some(row) = get::<_, Reward>(feedback, reward.value())? else { continue };
        let rating = |value| Rating { key_id: row.key_id, value, created: row.created };
        found.extend(row.value.map(rating));
    }
    Ok(found)
}

/// Quarantined API keys, by id.
pub(crate) fn quarantined(tx: &ReadTransaction) -> Result<Vec<QuarantinedKey>, StoreError> {
    let rows = tx.open_table(format::QUARANTINE)?;
    let keys = rows.iter()?.map(|row| {
        let (key, value) = row?;
        let (reason, since) = value.value();
        let key_id = key.value().to_owned();
        Ok(QuarantinedKey { key_id, reason: reason.to_owned(), since })
    });
    keys.collect()
}

/// At most `limit` groups in state `Ready`, oldest first.
pub(crate) fn ready_groups(tx: &ReadTransaction, limit: usize) -> Result<Vec<Group>, StoreError> {
    let groups = tx.open_table(format::GROUPS)?;
    let ready = tx.open_table(format::READY)?;
    let mut found = Vec::new();
    for entry in ready.iter()?.take(limit) {
        found.extend(get(&groups, entry?.0.value().1)?);
    }
    Ok(found)
}

/// Every member of a group with every part.
pub(crate) fn pairs(group: &Group) -> impl Iterator<Item = (SampleId, &str)> {
    let parts = &group.parts;
    group
        .members
        .iter()
        .flat_map(move |member| parts.iter().map(move |part| (*member, part.as_str())))
}

/// Number of ratings that wait for a group or, in a ready group, for the trainer.
pub(crate) fn waiting_ratings(tx: &ReadTransaction) -> Result<u64, StoreError> {
    let rewards = tx.open_table(format::REWARDS)?;
    let mut count = tx.open_table(format::UNGROUPED)?.len()?;
    for group in ready_groups(tx, usize::MAX)? {
        for (member, part) in pairs(&group) {
            let reward: Option<Reward> = get(&rewards, (member.0.as_bytes(), part))?;
            let waits = |r: Reward| r.source == RewardSource::Feedback && r.value.is_some();
            count += u64::from(reward.is_some_and(waits));
        }
    }
    Ok(count)
}

/// Number of corrections that wait for the trainer.
pub(crate) fn waiting_corrections(tx: &ReadTransaction) -> Result<usize, StoreError> {
    Ok(ready_groups(tx, usize::MAX)?.iter().filter(|group| group.is_correction()).count())
}

/// Number of groups in state `Ready`.
pub(crate) fn ready_count(tx: &ReadTransaction) -> Result<usize, StoreError> {
    let ready = tx.open_table(format::READY)?.len()?;
    Ok(usize::try_from(ready).unwrap_or(usize::MAX))
}

/// Number of rows in each table.
pub(crate) fn stats(tx: &ReadTransaction) -> Result<StoreStats, StoreError> {
    Ok(StoreStats {
        interactions: tx.open_table(format::INTERACTIONS)?.len()?,
        samples: tx.open_table(format::SAMPLES)?.len()?,
        feedback: tx.open_table(format::FEEDBACK)?.len()?,
        rewards: tx.open_table(format::REWARDS)?.len()?,
        groups: tx.open_table(format::GROUPS)?.len()?,
        policy_versions: tx.open_table(format::POLICIES)?.len()?,
        steps: tx.open_table(format::STEPS)?.len()?,
    })
}

/// Calls `f` with every row of a table in key order, and with the error for rows that cannot be
/// decoded.
pub(crate) fn each<K: Key + 'static, R: LedgerRecord>(
    table: &impl ReadableTable<K, Bytes>,
    mut f: impl FnMut(K::SelfType<'_>, Result<R, StoreError>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for row in table.iter()? {
        let (key, value) = row?;
        f(key.value(), decode(value.value()))?;
    }
    Ok(())
}
