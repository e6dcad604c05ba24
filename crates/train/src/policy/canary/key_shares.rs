//! Ratings, and what each API key contributes to the evidence, so that one key alone does not decide.

use std::collections::{BTreeMap, VecDeque};

use hone_core::types::{PolicyVersion, Reward, UnixMillis, key_of_rater};
use hone_reward::Routes;
use hone_store::{Ledger, StoreError};

/// A client's rating of one version's completion.
#[derive(Clone, Debug)]
pub struct VersionRating {
    /// The version that generated the completion.
    pub version: PolicyVersion,
    /// Identifies the session, or else the user, or else the completion, which one version answers. Its first rating
    /// counts: further ones, also of other parts, are rarely independent opinions.
    pub unit: [u8; 16],
    /// When the rating arrived.
    pub rated: UnixMillis,
    /// When the completion ended. A canary compares completions from its beginning on.
    pub sampled: UnixMillis,
    /// The route. Ratings are compared within a route and part.
    pub route: String,
    /// The reward part.
    pub part: String,
    /// The rating from 0, the worst value of the part's range, to 1, the best.
    pub value: f64,
    /// The id of the API key that rated, whatever end user it named; `None` without a key.
    pub key: Option<String>,
    /// Largest share of the evidence that one key may contribute (`max_key_share` of the part).
    pub max_key_share: f64,
    /// Number of API keys that may rate.
    pub keys: usize,
}

impl VersionRating {
    /// A rating of the ledger, of which `keys` API keys may rate. `None` if it is no evidence: a part without bounds
    /// cannot be compared, one with the weight 0 is not what the policy is trained for, and a quarantined rater decides
    /// nothing.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn of(
        ledger: &Ledger,
        routes: &Routes,
        keys: usize,
        rating: &Reward,
    ) -> Result<Option<Self>, StoreError> {
        let Some(sample) = ledger.sample(rating.sample)? else { return Ok(None) };
        let Some(interaction) = ledger.interaction(sample.interaction)? else { return Ok(None) };
        let Some(route) = routes.get(&interaction.route) else { return Ok(None) };
        let (Some(params), Some(weight)) =
            (route.feedback(&rating.name), route.weight(&rating.name))
        else {
            return Ok(None);
        };
        let rater = rating.key_id.as_deref();
        let quarantined = ledger.is_quarantined(rater)?;
        let value = rating.value.and_then(|value| params.scaled(value));
        Ok(value.filter(|_| weight != 0.0 && !quarantined).map(|value| Self {
            version: sample.version,
            unit: interaction.unit(),
            rated: rating.created,
            sampled: sample.created,
            route: route.name.clone(),
            part: rating.name.clone(),
            value: if weight > 0.0 { value } else { 1.0 - value },
            key: rater.and_then(key_of_rater).map(str::to_owned),
            max_key_share: params.max_key_share,
            keys,
        }))
    }
}

/// Ratings of one key that may wait for those of other keys. Later ones are discarded.
const MOST_WAITING: usize = 1000;

/// Relative rounding error allowed in a share, without which equal counts could all exceed it.
const ROUNDING: f64 = 1e-9;

/// The ratings of all API keys. `T` is the evidence from the ratings of one key.
///
/// A rating counts if the ratings of its key that count are at most the share `max_key_share` of all that
/// count; otherwise it waits. Order and keys decide this, never values, so a sequential test of those that
/// count remains valid. Requests without a key are one key, as their users are not authenticated.
#[derive(Debug)]
pub struct KeyShares<T> {
    keys: BTreeMap<Option<String>, KeyRatings<T>>,
    counted: u64,
}

#[derive(Debug)]
struct KeyRatings<T> {
    given: u64,
    counted: u64,
    waiting: VecDeque<VersionRating>,
    /// The evidence from all ratings of this key.
    own: T,
}

impl<T> Default for KeyShares<T> {
    fn default() -> Self {
        Self { keys: BTreeMap::new(), counted: 0 }
    }
}

impl<T> KeyShares<T> {
    /// Adds a rating to the evidence of its key, which `new` creates and `observe` extends. Returns the
    /// ratings that count from now on, in the order in which they must be observed.
    ///
    /// Of n keys one must have a share of at least 1 / n, so a smaller `max_key_share` is raised to that. n is
    /// at least 2 if several keys may rate, so that with a share below 1 a single key cannot decide.
    pub fn add(
        &mut self,
        rating: &VersionRating,
        new: impl FnOnce() -> T,
        observe: impl FnOnce(&mut T),
    ) -> Vec<VersionRating> {
        let key = self.keys.entry(rating.key.clone()).or_insert_with(|| KeyRatings {
            given: 0,
            counted: 0,
            waiting: VecDeque::new(),
            own: new(),
        });
        key.given += 1;
        observe(&mut key.own);
        if key.waiting.len() < MOST_WAITING {
            key.waiting.push_back(rating.clone());
        }
        let raters = self.keys.len().max(rating.keys.min(2)).max(1);
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let may_count = |counted: u64, all: u64, share: f64| {
            let share = share.max(1.0 / raters as f64) * (1.0 + ROUNDING);
            counted as f64 <= share * all as f64
        };
        let mut released = Vec::new();
        loop {
            let waiting = self.keys.values_mut().filter_map(|key| {
                let next = key.waiting.front()?;
                may_count(key.counted, self.counted, next.max_key_share).then_some(key)
            });
            let Some(key) = waiting.min_by_key(|key| key.counted) else { return released };
            released.extend(key.waiting.pop_front());
            key.counted += 1;
            self.counted += 1;
        }
    }

    /// The sum of `evidence`, a natural logarithm, over all keys but the one with the most ratings, or 0. The
    /// product of independent tests of one hypothesis is a test of it.
    pub fn of_the_others(&self, evidence: impl Fn(&T) -> f64) -> f64 {
        let heaviest = self.keys.values().map(|key| key.given).max();
        let mut skipped = false;
        let others = self.keys.values().filter(|key| {
            let skips = !skipped && Some(key.given) == heaviest;
            skipped |= skips;
            !skips
        });
        others.map(|key| evidence(&key.own)).sum()
    }

    /// Number of keys that rated.
    pub fn raters(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::version_rating;

    fn rating(key: u8, max_key_share: f64, keys: usize) -> VersionRating {
        VersionRating { key: Some(key.to_string()), max_key_share, keys, ..version_rating(1, 1.0) }
    }

    fn counted(order: &[u8], share: f64, keys: usize) -> Vec<u8> {
        let mut shares = KeyShares::<u64>::default();
        let ratings = order.iter().map(|key| rating(*key, share, keys));
        let counted = ratings.flat_map(|r| shares.add(&r, || 0, |own| *own += 1));
        counted.map(|rating| rating.key.unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn a_key_counts_up_to_its_share_and_the_rest_waits() {
        assert_eq!(counted(&[1; 5], 1.0, 2), [1; 5], "no cap");
        assert_eq!(counted(&[1; 5], 0.2, 1), [1; 5], "no other key may rate");
        assert_eq!(counted(&[1; 50], 0.2, 2), [1], "the others have not rated yet");
        // Two keys of two: a half each, and what waited counts later.
        assert_eq!(counted(&[1, 1, 1, 1, 2, 2], 0.2, 2), [1, 2, 1, 2, 1]);
        let crowd: Vec<u8> = [[9; 10], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]].concat();
        let found = counted(&crowd, 0.2, 20);
        assert!(found.iter().filter(|key| **key == 9).count() <= 4, "{found:?}");
    }

    #[test]
    fn the_heaviest_key_is_not_among_the_others() {
        let mut shares = KeyShares::<f64>::default();
        assert_eq!(shares.of_the_others(|own| *own), 0.0);
        for key in [1, 1, 1, 2, 3, 3] {
            shares.add(&rating(key, 1.0, 3), || f64::from(key), |_| {});
        }
        assert_eq!((shares.of_the_others(|own| *own), shares.raters()), (5.0, 3));
    }

    proptest! {
        #[test]
        fn no_key_exceeds_its_share(
            order in prop::collection::vec(0_u8..5, 1..200), share in 0.05_f64..1.0,
        ) {
            let found = counted(&order, share, 5);
            let keys: std::collections::BTreeSet<u8> = order.iter().copied().collect();
            let share = share.max(1.0 / keys.len().max(2) as f64);
            for n in 1..=found.len() {
                let most = keys.iter().map(|key| found[..n].iter().filter(|k| *k == key).count()).max();
                // The first keys had larger shares; a key that came first may be one rating ahead.
                let start = 1.0 / (1.0 - share.min(0.99)) + keys.len() as f64;
                prop_assert!(most.unwrap() as f64 <= 1.0 + start + share * n as f64, "{found:?}");
            }
            // Nothing waits for ever if all keys rate alike.
            let turns: Vec<u8> = (0..100).map(|n| n % 5).collect();
            prop_assert_eq!(counted(&turns, share, 5).len(), 100);
        }
    }
}
