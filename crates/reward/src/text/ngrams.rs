//! Counts of the n-grams that two texts share.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::tokens::{ABSENT, Numbered};

/// Counts of the n-grams of one order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Overlap {
    /// Shared n-grams, each at most as often as in either text.
    pub(super) matched: usize,
    /// The candidate's n-grams.
    pub(super) candidate: usize,
    /// The reference's n-grams.
    pub(super) reference: usize,
}

/// The overlaps of the orders 1 to `ORDERS`.
///
/// An n-gram is numbered by the pair of its first n - 1 words' number and its last word, so each
/// order costs one look-up per word for any n.
pub(super) fn overlaps<const ORDERS: usize>(words: &Numbered) -> [Overlap; ORDERS] {
    let (mut candidate, mut reference) = (words.candidate.clone(), words.reference.clone());
    let mut distinct = words.distinct;
    let mut found = [Overlap::default(); ORDERS];
    for (longer, overlap) in found.iter_mut().enumerate() {
        if longer > 0 {
            let mut numbers = Numbers::with_capacity_and_hasher(reference.len(), <_>::default());
            let next = |n: &Numbers| u32::try_from(n.len()).unwrap_or(ABSENT);
            extend(&mut reference, words.reference.get(longer..), |pair| {
                let next = next(&numbers);
                *numbers.entry(pair).or_insert(next)
            });
            extend(&mut candidate, words.candidate.get(longer..), |pair| {
                numbers.get(&pair).copied().unwrap_or(ABSENT)
            });
            distinct = numbers.len();
        }
        *overlap = Overlap {
            matched: matches(&candidate, &reference, distinct),
            candidate: candidate.len(),
            reference: reference.len(),
        };
    }
    found
}

/// Extends (n-1)-grams to n-grams by the words that follow them.
fn extend(grams: &mut Vec<u32>, last: Option<&[u32]>, mut number: impl FnMut(u64) -> u32) {
    let last = last.unwrap_or_default();
    grams.truncate(last.len());
    for (gram, word) in grams.iter_mut().zip(last) {
        let known = *gram != ABSENT && *word != ABSENT;
        *gram = if known { number(u64::from(*gram) << 32 | u64::from(*word)) } else { ABSENT };
    }
}

fn matches(candidate: &[u32], reference: &[u32], distinct: usize) -> usize {
    let mut left = vec![0_u32; distinct];
    for gram in reference {
        if let Some(count) = left.get_mut(*gram as usize) {
            *count += 1;
        }
    }
    let mut take = |gram: &&u32| match left.get_mut(**gram as usize) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    candidate.iter().filter(|gram| take(gram)).count()
}

type Numbers = HashMap<u64, u32, BuildHasherDefault<Mix>>;

/// Mixes a pair of small numbers (MurmurHash3's finalizer). It is several times as fast as the
/// default hasher, whose secret is not needed: texts are bounded and only choose the numbers' order.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let mut x = number;
        x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        self.0 = x ^ (x >> 33);
    }
}
