//! Selects the pairs to compare and the order in which candidates are shown, and converts comparisons
//! and ranks to values.

use std::collections::{BTreeMap, BTreeSet};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use hone_core::digest::Digest;

/// The seed of one group's random choices: reproducible, and different for every group.
pub(super) fn seed(configured: u64, texts: &[&str]) -> u64 {
    let digest = Digest::new().bytes(configured.to_le_bytes());
    u64::from_le_bytes(texts.iter().fold(digest, Digest::field).prefix())
}

/// At most `most` pairs of `n` candidates. If not all pairs fit: a ring in random order, in which
/// every candidate is compared with two others, then random other pairs.
pub(super) fn pairs(n: usize, most: usize, seed: u64) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> =
        (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j))).collect();
    if all.len() <= most {
        return all;
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..n).collect();
    order.shuffle(&mut random);
    all.shuffle(&mut random);
    let neighbours = order.iter().zip(order.iter().cycle().skip(1));
    let ring = neighbours.map(|(&i, &j)| (i.min(j), i.max(j)));
    let mut taken = BTreeSet::new();
    ring.chain(all).filter(|pair| taken.insert(*pair)).take(most).collect()
}

/// The share of comparisons that each of `n` candidates won, from 0 to 1, a tie counting half.
/// `None` for a candidate without a comparison.
///
/// `points[(a, b)]` is the result of `a`, shown first, against `b`: 1 for a win. An `asked` pair
/// counts only if both orders have a result, because a single one includes the judge's position bias.
pub(super) fn win_rates(
    n: usize,
    equal: &[(usize, usize)],
    asked: &[(usize, usize)],
    points: &BTreeMap<(usize, usize), f64>,
) -> Vec<Option<f64>> {
    let mut won = vec![(0.0, 0_u32); n];
    let mut add = |(i, j): (usize, usize), first: f64| {
        for (k, value) in [(i, first), (j, 1.0 - first)] {
            won[k].0 += value;
            won[k].1 += 1;
        }
    };
    equal.iter().for_each(|pair| add(*pair, 0.5));
    for &(i, j) in asked {
        if let (Some(forth), Some(back)) = (points.get(&(i, j)), points.get(&(j, i))) {
            add((i, j), (forth + 1.0 - back) / 2.0);
        }
    }
    won.iter().map(|(points, count)| (*count > 0).then(|| points / f64::from(*count))).collect()
}

/// The index of each distinct text, in the random order in which a judge sees them.
pub(super) fn distinct(texts: &[&str], configured: u64) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    let mut order: Vec<usize> = (0..texts.len()).filter(|i| seen.insert(texts[*i])).collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed(configured, texts)));
    order
}

/// `1 - r / (k - 1)` for rank `r` from 0 among `k` distinct texts; equal texts have equal values.
/// `ranking` is a permutation of the positions in `order`, best first.
pub(super) fn by_rank(texts: &[&str], order: &[usize], ranking: &[usize]) -> Vec<Option<f64>> {
    let last = ranking.len().saturating_sub(1).max(1) as f64;
    let values: BTreeMap<&str, f64> = ranking
        .iter()
        .enumerate()
        .filter_map(|(rank, shown)| Some((texts[*order.get(*shown)?], 1.0 - rank as f64 / last)))
        .collect();
    texts.iter().map(|text| values.get(text).copied()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn all_pairs_if_they_fit_else_a_ring() {
        assert_eq!(pairs(3, 3, 0), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!(pairs(1, 3, 0), []);
        let ring = pairs(8, 8, 5);
        let met = |k| ring.iter().filter(|(i, j)| *i == k || *j == k).count();
        assert!((0..8).all(|k| met(k) == 2), "{ring:?}");
        assert_eq!(pairs(8, 8, 5), ring);
        assert_ne!(pairs(8, 8, 6), ring);
        assert_eq!(pairs(8, 12, 5)[..8], ring);
    }

    #[test]
    fn position_bias_cancels() {
        let pair = [(0, 1)];
        let rates = |forth, back| {
            win_rates(2, &[], &pair, &BTreeMap::from([((0, 1), forth), ((1, 0), back)]))
        };
        assert_eq!(rates(1.0, 1.0), [Some(0.5); 2]);
        assert_eq!(rates(1.0, 0.0), [Some(1.0), Some(0.0)]);
        assert_eq!(rates(0.5, 0.0), [Some(0.75), Some(0.25)]);
        // A single order is not used.
        assert_eq!(win_rates(2, &[], &pair, &BTreeMap::from([((0, 1), 1.0)])), [None; 2]);
        assert_eq!(win_rates(3, &[(0, 2)], &pair, &BTreeMap::new()), [Some(0.5), None, Some(0.5)]);
    }

    #[test]
    fn rank_values_fall_from_one_to_zero() {
        let texts = ["a", "b", "a", "c"];
        // Shown as c, a, b; ranked b, c, a.
        let values = by_rank(&texts, &[3, 0, 1], &[2, 0, 1]);
        assert_eq!(values, [Some(0.0), Some(1.0), Some(0.0), Some(0.5)]);
        let mut shown = distinct(&texts, 1);
        shown.sort_unstable();
        assert_eq!(shown, [0, 1, 3]);
    }

    proptest! {
        #[test]
        fn pairs_are_distinct_and_bounded(n in 0_usize..20, most in 1_usize..60, seed: u64) {
            let pairs = pairs(n, most, seed);
            let unique: BTreeSet<_> = pairs.iter().collect();
            prop_assert_eq!(unique.len(), pairs.len());
            prop_assert_eq!(pairs.len(), most.min(n * n.saturating_sub(1) / 2));
            prop_assert!(pairs.iter().all(|(i, j)| i < j && *j < n));
        }

        #[test]
        fn win_rates_sum_to_half_when_all_are_compared(outcomes in prop::collection::vec(0_u8..3, 12)) {
            let all = pairs(4, 6, 0);
            let orders = all.iter().flat_map(|&(i, j)| [(i, j), (j, i)]);
            let points = orders.zip(outcomes.iter().map(|o| f64::from(*o) / 2.0)).collect();
            let rates = win_rates(4, &[], &all, &points);
            let sum: f64 = rates.iter().map(|r| r.unwrap()).sum();
            prop_assert!((sum - 2.0).abs() < 1e-12);
        }
    }
}
