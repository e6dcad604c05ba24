//! Which turns of conversations may still be queued for the ledger.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Digests that are remembered. More than the ledger's queue holds.
const MAX_RECENT: usize = 16_384;

/// First 16 bytes of a SHA-256 of messages.
pub type TurnDigest = [u8; 16];

/// The digests that were queued for the ledger last. Only a conversation with one of them waits until the
/// queue is written.
#[derive(Default)]
pub struct RecentTurns(Mutex<(VecDeque<TurnDigest>, HashSet<TurnDigest>)>);

impl RecentTurns {
    pub fn add(&self, digest: TurnDigest) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (order, known) = &mut *state;
        if !known.insert(digest) {
            return;
        }
        order.push_back(digest);
        if order.len() > MAX_RECENT
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    pub fn contains(&self, digest: &TurnDigest) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.contains(digest)
    }
}
