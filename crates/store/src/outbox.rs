//! What a fleet's processes record for each other: the outbox of a ledger, and the intake of others' logs.

use std::collections::{BTreeMap, BTreeSet};

use redb::{ReadableTable, ReadableTableMetadata};
use uuid::Uuid;

use hone_core::types::{UnixMillis, now_ms};

use crate::error::StoreError;
use crate::file::Ledger;
use crate::format;
use crate::format::codec::decode;
use crate::op::{Committed, LoggedBatch, Op, TakeIn};
use crate::store::Store;

/// One committed batch, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxBatch {
    /// Its place. The batches of a log are numbered from 1, without gaps.
    pub sequence: u64,
    /// The operations, in a format that later versions read.
    pub bytes: Vec<u8>,
}

impl OutboxBatch {
    /// Whether this batch is `other`, perhaps without operations that were erased since.
    pub fn is_rest_of(&self, other: &Self) -> bool {
        let decoded = |batch: &Self| decode::<LoggedBatch>(&batch.bytes).ok();
        let (Some(own), Some(other)) = (decoded(self), decoded(other)) else { return false };
        let ids: BTreeSet<_> = other.ops.iter().map(|(_, id)| id.0).collect();
        own.at == other.at && own.ops.iter().all(|(_, id)| ids.contains(&id.0))
    }
}

/// The log of a ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxState {
    /// Its id: nil for the trainer's, which all trainers of a fleet continue.
    pub log: Uuid,
    /// The last sequence that was shipped; 0 before the first.
    pub shipped: u64,
    /// The last sequence that was recorded; 0 before the first.
    pub last: u64,
    /// When the oldest batch that is not shipped was recorded.
    pub oldest: Option<UnixMillis>,
}

impl Ledger {
    /// The batches after a sequence that are not shipped, in order: one, and as many more as have at most `max_bytes`
    /// together.
    pub fn outbox(&self, after: u64, max_bytes: usize) -> Result<Vec<OutboxBatch>, StoreError> {
        self.read(|tx| {
            let (mut found, mut bytes) = (Vec::new(), 0);
            for row in tx.open_table(format::OUTBOX)?.range(after.saturating_add(1)..)? {
                let (sequence, batch) = row?;
                let batch =
                    OutboxBatch { sequence: sequence.value(), bytes: batch.value().to_vec() };
                bytes += batch.bytes.len();
                if bytes > max_bytes && !found.is_empty() {
                    break;
                }
                found.push(batch);
            }
            Ok(found)
        })
    }

    /// The ledger's log; `None` without an outbox.
    pub fn outbox_state(&self) -> Result<Option<OutboxState>, StoreError> {
        self.read(|tx| {
            let own = tx.open_table(format::OWN_LOG)?;
            let Some((log, shipped)) = own.first()? else { return Ok(None) };
            let outbox = tx.open_table(format::OUTBOX)?;
            Ok(Some(OutboxState {
                log: Uuid::from_bytes(*log.value()),
                shipped: shipped.value(),
                last: outbox.last()?.map_or(shipped.value(), |(sequence, _)| sequence.value()),
                oldest: outbox.first()?.and_then(|(_, batch)| LoggedBatch::time(batch.value())),
            }))
        })
    }

    /// The logs of servers that were taken in, each with its last sequence.
    pub fn intake_positions(&self) -> Result<BTreeMap<Uuid, u64>, StoreError> {
        self.read(|tx| {
            let positions = tx.open_table(format::POSITIONS)?;
            let rows = positions.iter()?.map(|row| {
                let (log, position) = row?;
                Ok((Uuid::from_bytes(*log.value()), position.value()))
            });
            rows.collect()
        })
    }

    /// Number of posts that are held for their completion.
    pub fn held_feedback(&self) -> Result<u64, StoreError> {
        self.read(|tx| Ok(tx.open_table(format::HELD)?.len()?))
    }
}

impl Store {
    /// Applies batches of a server's log in order, in one transaction with its position, to a trainer's ledger. Those at
    /// or before the position are skipped. Feedback whose completion was not taken in yet is held for it.
    ///
    /// # Errors
    /// [`StoreError::Gap`] if a batch is missing, `Corrupt` if one cannot be decoded, or as
    /// [`Self::commit`]. Then nothing is applied.
    pub async fn take_in(
        &self,
        log: Uuid,
        batches: Vec<OutboxBatch>,
    ) -> Result<Committed, StoreError> {
        let decoded = |batch: OutboxBatch| Ok((batch.sequence, decode(&batch.bytes)?));
        let batches: Result<_, StoreError> = batches.into_iter().map(decoded).collect();
        let other = TakeIn { log, at: now_ms(), batches: batches? };
        self.commit_now(vec![Op::TakeIn(Box::new(other))]).await
    }

    /// Applies batches of the trainer's log in order, so that the ledger of another trainer becomes equal to that of the
    /// one which recorded them, without groups of what was erased before it was shipped. Its next batch continues the
    /// log. Batches at or before its last one are skipped.
    ///
    /// # Errors
    /// As [`Self::take_in`], and a `Gap` if the ledger has batches of its own that are not shipped.
    pub async fn replay(&self, batches: Vec<OutboxBatch>) -> Result<(), StoreError> {
        self.take_in(Uuid::nil(), batches).await.map(drop)
    }
}
