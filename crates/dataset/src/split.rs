//! Selects the held-out prompts by a hash of their content and a seed, not by their place in the
//! file.
//!
//! A fraction selects the prompts whose key is below it, so a new row does not change the side of
//! any other prompt. A number selects the prompts with the smallest keys, so a new row can replace
//! only the one with the largest key. Rows with the same conversation have the same key, so no
//! conversation is on both sides.

use std::collections::BTreeSet;

use hone_core::digest::Digest;

use crate::prompt::PromptId;

/// A uniformly distributed 64-bit key: the first bytes of the SHA-256 of a purpose, numbers and a
/// prompt's id.
pub(crate) fn key(purpose: &str, numbers: &[u64], id: PromptId) -> u64 {
    let purpose = Digest::new().bytes(purpose);
    let digest = numbers.iter().fold(purpose, |digest, number| digest.bytes(number.to_le_bytes()));
    u64::from_le_bytes(digest.bytes(id.0.to_le_bytes()).prefix())
}

/// The ids to hold out: a fraction of them if `amount` is below 1, else that number, but never all.
pub(crate) fn held_out(ids: &BTreeSet<PromptId>, amount: f64, seed: u64) -> BTreeSet<PromptId> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Saved sampler states and published splits depend on these values.
    #[test]
    fn keys_and_splits_never_change() {
        assert_eq!(key("hold out", &[4], PromptId(5)), 0xb658_bf6d_3da6_12ee);
        let ids: BTreeSet<PromptId> = (0..8).map(PromptId).collect();
        let held = |amount| held_out(&ids, amount, 4).iter().map(|id| id.0).collect::<Vec<_>>();
        assert_eq!((held(0.4), held(2.0)), (vec![0, 4, 7], vec![0, 7]));
    }
}
