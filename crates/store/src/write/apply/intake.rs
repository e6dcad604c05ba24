//! Applies batches of logs.
//!
//! Each log has its order, but what one refers to may come later with another: feedback is held until its completion
//! comes, and an erased prompt leaves its id even if it was never here.

use redb::{ReadableTable, ReadableTableMetadata};

use hone_core::types::{InteractionId, RewardId, UnixMillis};

use super::tables::Applier;
use crate::error::StoreError;
use crate::format::codec::{decode, encode};
use crate::op::{LoggedBatch, Op, Outbox, TakeIn};
use crate::reader;

impl Applier<'_> {
    /// Applies the batches after the last one that was taken in. Those of the trainer's log are applied as its own.
    pub(super) fn take_in(&mut self, other: &TakeIn) -> Result<(), StoreError> {
        let (log, is_own) = (other.log.as_bytes(), other.log.is_nil());
        let positions = if is_own { &self.own_log } else { &self.positions };
        let known = positions.get(log)?.map_or(0, |position| position.value());
        let mut position = known;
        // A ledger with batches of its own that are not shipped may differ from the log.
        let differs = is_own && !self.outbox.is_empty()?;
        let outer = std::mem::replace(&mut self.intake, (!is_own).then_some(other.at));
        for (sequence, batch) in other.batches.iter().filter(|(sequence, _)| *sequence > known) {
            if differs || *sequence != position + 1 {
                return Err(StoreError::Gap(other.log, position + 1, *sequence));
            }
            for (op, id) in &batch.ops {
                self.apply(op, *id)?;
            }
            self.combine_ratings()?;
            if is_own {
                self.scrub()?;
            }
            position = *sequence;
        }
        self.intake = outer;
        self.ignored = is_own || position == known;
        if is_own {
            self.set_shipped(position)?;
        } else if position > known {
            self.positions.insert(log, position)?;
        }
        Ok(())
    }

    /// Whether feedback waits for its completion: on a server that of another one, which the trainer has; in an intake
    /// also another choice of one that is here. An intake holds it.
    pub(super) fn forward(&mut self, op: &Op, id: RewardId) -> Result<bool, StoreError> {
        // The turns of a conversation are of the server that it was posted to.
        let is_single = !matches!(op, Op::Conversation(_));
        let mut awaited = None;
        if is_single && (self.mode == Outbox::Server || self.intake.is_some()) {
            for (prompt, choice) in op.posts().0 {
                let key = prompt.0.as_bytes();
                if self.erased.get(key)?.is_some() {
                    return Ok(false);
                }
                let is_known = match self.intake {
                    Some(_) => self.served_choice(prompt, choice)?.is_some(),
                    None => self.interactions.get(key)?.is_some(),
                };
                awaited = awaited.or((!is_known).then_some(prompt));
            }
        }
        if let (Some(prompt), Some(at)) = (awaited, self.intake) {
            let post = encode(&LoggedBatch { at, ops: vec![(op.clone(), id)] })?;
            self.held.insert((prompt.0.as_bytes(), id.0.as_bytes()), post.as_slice())?;
        }
        Ok(awaited.is_some())
    }

    /// Applies the feedback that was held for a completion.
    pub(super) fn release_held(&mut self, prompt: InteractionId) -> Result<(), StoreError> {
        let prompt = prompt.0.as_bytes();
        for id in reader::ids_of(&self.held, prompt)? {
            let post = self.held.remove((prompt, &id))?.map(|bytes| decode(bytes.value()));
            let post: Option<LoggedBatch> = post.transpose()?;
            for (op, id) in post.into_iter().flat_map(|post| post.ops) {
                self.apply(&op, id)?;
            }
        }
        Ok(())
    }

    /// Drops held feedback of before a time.
    pub(super) fn expire_held(&mut self, before: UnixMillis) -> Result<(), StoreError> {
        let held = self.held.len()?;
        self.held.retain(|_, post| LoggedBatch::time(post).is_none_or(|at| at >= before))?;
        let expired = held - self.held.len()?;
        *self.counts.orphans.entry("held").or_default() += expired;
        self.ignored = expired == 0;
        Ok(())
    }
}
