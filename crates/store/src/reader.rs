//! What can be read from a snapshot.

use redb::{
    Key, ReadOnlyTable, ReadTransaction, ReadableTable, ReadableTableMetadata, TableDefinition,
    Value,
};
use uuid::Uuid;

use hone_core::types::{
    Group, InteractionId, Rating, Reward, Sample, SampleId, StepRecord, UnixMillis,
};

use super::codec::{Row, decode};
use super::schema::Id;
use super::{Quarantined, StoreError, StoreStats, schema};

type Bytes = &'static [u8];

/// Rows under UUID keys: prompts, completions, groups.
pub(super) fn by_id<R: Row>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, &'static Id, Bytes>,
    id: Uuid,
) -> Result<Option<R>, StoreError> {
    one(&tx.open_table(table)?, id.as_bytes())
}

/// Rows under numbers: policy versions.
pub(super) fn by_number<R: Row>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, u64, Bytes>,
    number: u64,
) -> Result<Option<R>, StoreError> {
    one(&tx.open_table(table)?, number)
}

/// Rows under numbers from `first` on.
pub(super) fn from_number<R: Row>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, u64, Bytes>,
    first: u64,
    limit: usize,
) -> Result<Vec<R>, StoreError> {
    let rows = tx.open_table(table)?;
    rows.range(first..)?.take(limit).map(|row| decode(row?.1.value())).collect()
}

/// The last optimiser step.
pub(super) fn last_step(tx: &ReadTransaction) -> Result<Option<StepRecord>, StoreError> {
    let steps = tx.open_table(schema::STEPS)?;
    match steps.range::<u64>(..)?.next_back() {
        Some(row) => decode(row?.1.value()).map(Some),
        None => Ok(None),
    }
}

/// Every completion of a prompt, in key order.
pub(super) fn samples_of(
    tx: &ReadTransaction,
    id: InteractionId,
) -> Result<Vec<Sample>, StoreError> {
    let samples = tx.open_table(schema::SAMPLES)?;
    let ids = second_ids(&tx.open_table(schema::SAMPLES_OF)?, id)?;
    existing(ids.iter().map(|id| one(&samples, id)))
}

/// Every group of a prompt, in key order.
pub(super) fn groups_of(tx: &ReadTransaction, id: InteractionId) -> Result<Vec<Group>, StoreError> {
    let groups = tx.open_table(schema::GROUPS)?;
    let ids = second_ids(&tx.open_table(schema::GROUPS_OF)?, id)?;
    existing(ids.iter().map(|id| one(&groups, id)))
}

/// Every reward part of a completion, by name.
pub(super) fn rewards_of(tx: &ReadTransaction, id: SampleId) -> Result<Vec<Reward>, StoreError> {
    let rewards = tx.open_table(schema::REWARDS)?;
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

/// The prompts of a conversation, oldest first.
pub(super) fn turns_of(
    tx: &ReadTransaction,
    key_id: Option<&str>,
    session: &str,
    limit: usize,
) -> Result<Vec<InteractionId>, StoreError> {
    let sessions = tx.open_table(schema::SESSIONS)?;
    let (first, last) = (Id::default(), [u8::MAX; 16]);
    let entries = sessions.range((key_id, session, &first)..=(key_id, session, &last))?;
    let turns = entries.take(limit).map(|entry| {
        let key = entry?.0;
        Ok(InteractionId(Uuid::from_bytes(*key.value().2)))
    });
    turns.collect()
}

/// Each rater's newest rating of a completion under one name.
pub(super) fn ratings_of(
    tx: &ReadTransaction,
    id: SampleId,
    name: &str,
) -> Result<Vec<Rating>, StoreError> {
    ratings(&tx.open_table(schema::RATINGS)?, &tx.open_table(schema::FEEDBACK)?, id, name)
}

/// [`ratings_of`] from tables that are open already, for reading or for writing.
pub(super) fn ratings(
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
        let Some(bytes) = feedback.get(reward.value())? else { continue };
        let row: Reward = decode(bytes.value())?;
        let rating = |value| Rating { key_id: row.key_id, value, created: row.created };
        found.extend(row.value.map(rating));
    }
    Ok(found)
}

/// Keys whose feedback is set aside, by id.
pub(super) fn quarantined(tx: &ReadTransaction) -> Result<Vec<Quarantined>, StoreError> {
    let rows = tx.open_table(schema::QUARANTINE)?;
    let keys = rows.iter()?.map(|row| {
        let (key, value) = row?;
        let (reason, since) = value.value();
        let key_id = key.value().to_owned();
        Ok(Quarantined { key_id, reason: reason.to_owned(), since })
    });
    keys.collect()
}

/// Groups in state `Ready`, oldest first.
pub(super) fn ready_groups(tx: &ReadTransaction, limit: usize) -> Result<Vec<Group>, StoreError> {
    let groups = tx.open_table(schema::GROUPS)?;
    let ready = tx.open_table(schema::READY)?;
    let mut found = Vec::new();
    for entry in ready.range::<(u64, &Id)>(..)?.take(limit) {
        found.extend(one(&groups, entry?.0.value().1)?);
    }
    Ok(found)
}

/// Feedback that no group trains on, oldest first, up to and including `until`.
pub(super) fn ungrouped(
    tx: &ReadTransaction,
    until: UnixMillis,
    limit: usize,
) -> Result<Vec<(SampleId, String)>, StoreError> {
    let table = tx.open_table(schema::UNGROUPED)?;
    let mut found = Vec::new();
    for entry in table.range::<(u64, &Id, &str)>(..)?.take(limit) {
        let key = entry?.0;
        let (created, sample, name) = key.value();
        if created > until {
            break;
        }
        found.push((SampleId(Uuid::from_bytes(*sample)), name.to_owned()));
    }
    Ok(found)
}

/// How many groups are `Ready`.
pub(super) fn ready_len(tx: &ReadTransaction) -> Result<usize, StoreError> {
    let ready = tx.open_table(schema::READY)?.len()?;
    Ok(usize::try_from(ready).unwrap_or(usize::MAX))
}

/// Rows by table.
pub(super) fn stats(tx: &ReadTransaction) -> Result<StoreStats, StoreError> {
    Ok(StoreStats {
        interactions: tx.open_table(schema::INTERACTIONS)?.len()?,
        samples: tx.open_table(schema::SAMPLES)?.len()?,
        feedback: tx.open_table(schema::FEEDBACK)?.len()?,
        rewards: tx.open_table(schema::REWARDS)?.len()?,
        groups: tx.open_table(schema::GROUPS)?.len()?,
        policy_versions: tx.open_table(schema::POLICIES)?.len()?,
        steps: tx.open_table(schema::STEPS)?.len()?,
    })
}

/// Hands every row of a table to `f`, in key order, whether it can be read or not.
pub(super) fn each<K: Key + 'static, R: Row>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, Bytes>,
    mut f: impl FnMut(K::SelfType<'_>, Result<R, StoreError>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for row in tx.open_table(table)?.iter()? {
        let (key, value) = row?;
        f(key.value(), decode(value.value()))?;
    }
    Ok(())
}

fn one<'k, K: Key + 'static, R: Row>(
    table: &ReadOnlyTable<K, Bytes>,
    key: impl std::borrow::Borrow<K::SelfType<'k>>,
) -> Result<Option<R>, StoreError> {
    match table.get(key)? {
        Some(bytes) => decode(bytes.value()).map(Some),
        None => Ok(None),
    }
}

/// What an index holds under an interaction.
fn second_ids<V: Value + 'static>(
    index: &ReadOnlyTable<(&'static Id, &'static Id), V>,
    id: InteractionId,
) -> Result<Vec<Id>, StoreError> {
    let first = id.0.as_bytes();
    let mut ids = Vec::new();
    for entry in index.range((first, &Id::default())..=(first, &[u8::MAX; 16]))? {
        ids.push(*entry?.0.value().1);
    }
    Ok(ids)
}

fn existing<R>(
    rows: impl Iterator<Item = Result<Option<R>, StoreError>>,
) -> Result<Vec<R>, StoreError> {
    rows.filter_map(Result::transpose).collect()
}
