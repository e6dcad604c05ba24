//! Caps on the share of a batch that one key may contribute.

use std::collections::BTreeMap;

use super::params::ShareRule;

/// The weights of a batch of feedback.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    /// Weight of each item, from 0 (dropped) to 1, in the batch's order.
    pub weights: Vec<f64>,
    /// The keys that were cut; `None` is the feedback without a key.
    pub capped: Vec<Option<String>>,
}

type Counts<'a> = BTreeMap<Option<&'a str>, usize>;
type Masses<'a> = BTreeMap<Option<&'a str>, f64>;

/// Relative rounding error allowed in a quotient of whole numbers.
const ROUNDING: f64 = 1e-9;

/// Weights for a batch of feedback such that no key's weights sum to more than `max_share` of the
/// total. `keys` has the key of each item, newest last; items without a key count as one key.
///
/// The cap is at least 1 / (number of keys), as of three keys one must have a third. `Weight`
/// assigns every capped key the same mass `x = s U / (1 - m s)`, for `m` capped keys and the mass
/// `U` of the others; `Drop` keeps a whole number of each key's newest items, at least one.
/// Deterministic.
pub fn cap_shares(keys: &[Option<&str>], max_share: f64, rule: ShareRule) -> Shares {
    let mut counts = Counts::new();
    for key in keys {
        *counts.entry(*key).or_default() += 1;
    }
    let share = max_share.max(1.0 / counts.len().max(1) as f64);
    let masses = match rule {
        ShareRule::Weight => capped_masses(&counts, share),
        ShareRule::Drop => kept_counts(&counts, share),
    };
    let mut left = masses.clone();
    let mut weights = vec![1.0; keys.len()];
    for (weight, key) in weights.iter_mut().zip(keys).rev() {
        let (mass, count) = (masses[key], counts[key] as f64);
        *weight = match rule {
            ShareRule::Weight => mass / count,
            ShareRule::Drop => {
                let left = left.get_mut(key).map_or(0.0, |l| std::mem::replace(l, *l - 1.0));
                f64::from(u8::from(left > 0.0))
            }
        };
    }
    let cut = counts.iter().filter(|(key, count)| masses[*key] < **count as f64);
    Shares { weights, capped: cut.map(|(key, _)| key.map(str::to_owned)).collect() }
}

/// The mass of each key, with as few as possible of the heaviest keys capped: `m` of them, so that
/// the next is below the cap.
fn capped_masses<'a>(counts: &Counts<'a>, share: f64) -> Masses<'a> {
    let mut heaviest: Vec<usize> = counts.values().copied().collect();
    heaviest.sort_unstable_by(|a, b| b.cmp(a));
    let mut others: usize = heaviest.iter().sum();
    let mut cap = f64::INFINITY;
    for (m, &next) in heaviest.iter().enumerate() {
        // Ends at the latest when m + 1 shares are the whole: then the cap is `others` or more.
        cap = share * others as f64 / (1.0 - m as f64 * share);
        if next as f64 <= cap * (1.0 + ROUNDING) {
            break;
        }
        others -= next;
    }
    counts.iter().map(|(key, count)| (*key, (*count as f64).min(cap))).collect()
}

/// The greatest whole numbers, at least 1, that are each at most the share of their sum.
fn kept_counts<'a>(counts: &Counts<'a>, share: f64) -> Masses<'a> {
    let mut kept = counts.clone();
    loop {
        let total: usize = kept.values().sum();
        let limit = ((total as f64 * share * (1.0 + ROUNDING)).floor() as usize).max(1);
        if kept.values().all(|k| *k <= limit) {
            return kept.into_iter().map(|(key, k)| (key, k as f64)).collect();
        }
        kept.values_mut().for_each(|k| *k = (*k).min(limit));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(text: &str) -> Vec<Option<&str>> {
        text.split_terminator("").skip(1).map(|k| (k != "-").then_some(k)).collect()
    }

    #[test]
    fn without_a_cap_nothing_changes() {
        for rule in [ShareRule::Weight, ShareRule::Drop] {
            let shares = cap_shares(&batch("aaab"), 1.0, rule);
            assert_eq!(shares, Shares { weights: vec![1.0; 4], capped: vec![] });
            // A single key has the whole batch.
            assert_eq!(cap_shares(&batch("aa"), 0.1, rule).weights, [1.0, 1.0]);
            assert!(cap_shares(&[], 0.1, rule).weights.is_empty());
            assert_eq!(cap_shares(&batch("aabbcc"), 1.0 / 3.0, rule).capped, []);
        }
    }

    #[test]
    fn a_heavy_key_is_cut_to_its_share() {
        // x = 0.5 (x + 2)
        let shares = cap_shares(&batch("aaaabc"), 0.5, ShareRule::Weight);
        assert_eq!(shares.weights, [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]);
        assert_eq!(shares.capped, [Some("a".to_owned())]);
        let shares = cap_shares(&batch("aaaabc"), 0.5, ShareRule::Drop);
        assert_eq!(shares.weights, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        // Items without a key are one key.
        let shares = cap_shares(&batch("---ab"), 0.4, ShareRule::Drop);
        assert_eq!((shares.weights, shares.capped), (vec![0.0, 0.0, 1.0, 1.0, 1.0], vec![None]));
    }

    #[test]
    fn an_impossible_cap_makes_all_keys_equal() {
        let shares = cap_shares(&batch("aaaabb"), 0.1, ShareRule::Weight);
        assert_eq!(shares.weights, [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]);
        let shares = cap_shares(&batch("aaaabbc"), 0.1, ShareRule::Drop);
        assert_eq!(shares.weights, [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]);
    }

    proptest! {
        #[test]
        fn no_key_exceeds_the_cap(
            batch in prop::collection::vec(0_u8..6, 1..60), max_share in 0.01_f64..1.0, drop: bool,
        ) {
            let names: Vec<String> = batch.iter().map(u8::to_string).collect();
            let keys: Vec<Option<&str>> = names.iter().map(|n| Some(n.as_str())).collect();
            let rule = if drop { ShareRule::Drop } else { ShareRule::Weight };
            let shares = cap_shares(&keys, max_share, rule);
            let mut masses: BTreeMap<Option<&str>, f64> = BTreeMap::new();
            for (key, weight) in keys.iter().zip(&shares.weights) {
                prop_assert!((0.0..=1.0).contains(weight));
                *masses.entry(*key).or_default() += weight;
            }
            let total: f64 = masses.values().sum();
            let share = max_share.max(1.0 / masses.len() as f64);
            prop_assert!(masses.values().all(|m| {
                *m > 0.0 && (*m <= total * share + 1e-6 || drop && *m <= 1.0)
            }), "{masses:?} of {total}");
            prop_assert_eq!(&cap_shares(&keys, max_share, rule), &shares);
        }
    }
}
