//! Records batches in the outbox, in their own transactions, and erases from it.

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{RewardId, new_uuid};

use super::tables::Applier;
use crate::error::StoreError;
use crate::format::codec::{decode, encode};
use crate::op::{FeedbackOutcome, LoggedBatch, Op, Outbox};

impl Applier<'_> {
    /// Begins a log, or removes it from a ledger that left its fleet.
    pub(crate) fn open_log(&mut self, outbox: Outbox) -> Result<(), StoreError> {
        if outbox == self.mode {
            return Ok(());
        }
        if ![outbox, self.mode].contains(&Outbox::Off) {
            let text = format!("the ledger is of a fleet's {:?}, not of a {outbox:?}", self.mode);
            return Err(StoreError::Unusable(text));
        }
        self.outbox.retain(|_, _| false)?;
        self.own_log.retain(|_, _| false)?;
        if outbox != Outbox::Off {
            let log = if outbox == Outbox::Server { new_uuid() } else { Uuid::nil() };
            self.own_log.insert(log.as_bytes(), 0)?;
        }
        Ok(())
    }

    /// Applies a batch, and records in the outbox what changed anything.
    pub(crate) fn apply_batch(
        &mut self,
        ops: &[Op],
        ids: &[RewardId],
    ) -> Result<Vec<FeedbackOutcome>, StoreError> {
        let (mut outcomes, mut logged) = (Vec::new(), Vec::new());
        for (op, id) in ops.iter().zip(ids) {
            self.ignored = false;
            let outcome = self.apply(op, *id)?;
            let changed = outcome.as_ref().is_none_or(FeedbackOutcome::is_recorded);
            if changed && !self.ignored && self.mode.ships(op) {
                logged.push((op.clone(), *id));
            }
            outcomes.extend(outcome);
        }
        if self.mode == Outbox::Trainer {
            // The values do not depend on which batches share a transaction, so that a replay gets the same ones.
            self.combine_ratings()?;
        }
        if let Some((_, first)) = logged.first() {
            // The time of the UUIDv7, so that a repeated transaction records the same bytes.
            let at = u64::try_from(first.0.as_u128() >> 80).unwrap_or_default();
            let sequence = self.last_batch()? + 1;
            self.outbox.insert(sequence, encode(&LoggedBatch { at, ops: logged })?.as_slice())?;
        }
        self.scrub()?;
        Ok(outcomes)
    }

    /// The sequence of the last recorded batch.
    pub(super) fn last_batch(&self) -> Result<u64, StoreError> {
        let shipped = self.own_log.first()?.map_or(0, |(_, shipped)| shipped.value());
        Ok(self.outbox.last()?.map_or(shipped, |(sequence, _)| sequence.value()))
    }

    /// Removes the batches up to a sequence.
    pub(super) fn set_shipped(&mut self, sequence: u64) -> Result<(), StoreError> {
        let own = self.own_log.first()?.map(|(log, shipped)| (*log.value(), shipped.value()));
        if let Some((log, shipped)) = own {
            self.own_log.insert(&log, sequence.max(shipped))?;
        }
        Ok(self.outbox.retain_in(..=sequence, |_, _| false)?)
    }

    /// Erases what a batch erased from held posts and from unshipped batches, which keep their sequences.
    pub(super) fn scrub(&mut self) -> Result<(), StoreError> {
        let gone = std::mem::take(&mut self.gone);
        if gone.is_empty() {
            return Ok(());
        }
        self.counts.erased = true;
        let left = |bytes: &[u8]| {
            let mut batch: LoggedBatch = decode(bytes)?;
            batch.erase(&gone);
            encode(&batch)
        };
        self.held.retain(|_, post| left(post).is_ok_and(|left| left == post))?;
        let mut changed = Vec::new();
        for row in self.outbox.iter()? {
            let (sequence, bytes) = row?;
            let left = left(bytes.value())?;
            if left != bytes.value() {
                changed.push((sequence.value(), left));
            }
        }
        for (sequence, left) in changed {
            self.outbox.insert(sequence, left.as_slice())?;
        }
        Ok(())
    }
}
