//! Who is held out: decided by each prompt's content and a seed, not by its place in the file.
//!
//! A share holds out the prompts whose key is below it; a new row changes nobody else's side. A
//! number holds out the prompts with the smallest keys; a new row can only take the place of the
//! last of them. Rows that ask the same have the same key, so no question is on both sides.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::prompt::PromptId;

/// A uniform 64-bit key of a prompt: the first bytes of SHA-256 over a purpose, numbers and its id.
pub(super) fn key(purpose: &str, numbers: &[u64], id: PromptId) -> u64 {
    let mut hash = Sha256::new();
    hash.update(purpose);
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    hash.update(id.0.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    u64::from_le_bytes(first)
}

/// The ids that are held out: a share of them where `amount` is below 1, else that many, but never
/// all.
pub(super) fn held_out(ids: &BTreeSet<PromptId>, amount: f64, seed: u64) -> BTreeSet<PromptId> {
    let mut keyed: Vec<(u64, PromptId)> =
        ids.iter().map(|id| (key("hold out", &[seed], *id), *id)).collect();
    keyed.sort_unstable();
    let count = if amount < 1.0 {
        // 2^64, exactly.
        let below = amount * 18_446_744_073_709_551_616.0;
        keyed.iter().take_while(|(key, _)| (*key as f64) < below).count()
    } else {
        amount as usize
    };
    keyed.truncate(count.min(ids.len().saturating_sub(1)));
    keyed.into_iter().map(|(_, id)| id).collect()
}
