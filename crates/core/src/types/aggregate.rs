//! Aggregation of the ratings of one sample.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::records::Rating;

/// How the values of several raters of one sample become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregate {
    /// The newest value.
    #[default]
    Last,
    /// The arithmetic mean.
    Mean,
    /// The median; of an even number of values the mean of the middle two.
    Median,
    /// The most frequent value; missing where two are equally frequent.
    Majority,
}

/// Each rater's newest rating, in the order of their times: a later rating corrects the rater's
/// earlier ones. Of ratings with equal times, the later in the list counts.
pub fn latest_per_rater(ratings: &[Rating]) -> Vec<&Rating> {
    let mut newest: BTreeMap<Option<&str>, (usize, &Rating)> = BTreeMap::new();
    for (i, rating) in ratings.iter().enumerate() {
        let latest = newest.entry(rating.key_id.as_deref()).or_insert((i, rating));
        if rating.created >= latest.1.created {
            *latest = (i, rating);
        }
    }
    let mut latest: Vec<_> = newest.into_values().collect();
    latest.sort_by_key(|(i, rating)| (rating.created, *i));
    latest.into_iter().map(|(_, rating)| rating).collect()
}

/// The value of one sample and name by `rule`, over each rater's newest rating; `None` without a
/// finite rating.
pub fn aggregate(rule: Aggregate, ratings: &[Rating]) -> Option<f64> {
    let mut values: Vec<f64> =
        latest_per_rater(ratings).iter().map(|r| r.value).filter(|v| v.is_finite()).collect();
    let last = *values.last()?;
    let count = values.len();
    let value = match rule {
        Aggregate::Last => last,
        // Dividing first keeps the sum from overflowing.
        Aggregate::Mean => values.iter().map(|v| v / count as f64).sum(),
        Aggregate::Median => {
            values.sort_by(f64::total_cmp);
            let (low, high) = (values[(count - 1) / 2], values[count / 2]);
            low / 2.0 + high / 2.0
        }
        Aggregate::Majority => majority(values)?,
    };
    Some(value).filter(|v| v.is_finite())
}

fn majority(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let mut runs: Vec<(usize, f64)> =
        values.chunk_by(|a, b| a == b).map(|run| (run.len(), run[0])).collect();
    runs.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    match runs[..] {
        [(first, _), (second, _), ..] if first == second => None,
        [(_, value), ..] => Some(value),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ratings(given: &[(&str, f64, u64)]) -> Vec<Rating> {
        let key = |k: &str| (!k.is_empty()).then(|| k.to_owned());
        given.iter().map(|&(k, value, created)| Rating { key_id: key(k), value, created }).collect()
    }

    #[test]
    fn a_later_value_corrects_the_raters_earlier_one() {
        let all =
            ratings(&[("a", 5.0, 3), ("b", 1.0, 1), ("a", 2.0, 2), ("", 3.0, 1), ("", 4.0, 1)]);
        let kept: Vec<f64> = latest_per_rater(&all).iter().map(|r| r.value).collect();
        assert_eq!(kept, [1.0, 4.0, 5.0]);
    }

    #[test]
    fn each_rule_computes_its_statistic() {
        let all = ratings(&[("a", 1.0, 1), ("b", 1.0, 4), ("c", 4.0, 3), ("d", 10.0, 2)]);
        let by = |rule| aggregate(rule, &all);
        assert_eq!(by(Aggregate::Last), Some(1.0));
        assert_eq!(by(Aggregate::Mean), Some(4.0));
        assert_eq!(by(Aggregate::Median), Some(2.5));
        assert_eq!(by(Aggregate::Majority), Some(1.0));
        assert_eq!(aggregate(Aggregate::Median, &all[1..]), Some(4.0));
        // Without a majority the value is missing, not 0.
        assert_eq!(aggregate(Aggregate::Majority, &all[1..]), None);
        assert_eq!(
            aggregate(Aggregate::Majority, &ratings(&[("a", 0.0, 1), ("b", -0.0, 1)])),
            Some(-0.0)
        );
        for rule in [Aggregate::Last, Aggregate::Mean, Aggregate::Median, Aggregate::Majority] {
            assert_eq!(aggregate(rule, &[]), None);
            assert_eq!(aggregate(rule, &ratings(&[("a", f64::NAN, 1)])), None);
        }
    }

    proptest! {
        #[test]
        fn an_aggregate_is_within_the_range_of_its_ratings(
            given in prop::collection::vec((0_u8..5, -100_i32..100, 0_u64..9), 1..12),
        ) {
            let all: Vec<Rating> = given.iter().map(|(k, v, t)| Rating {
                key_id: Some(k.to_string()), value: f64::from(*v), created: *t,
            }).collect();
            let low = all.iter().map(|r| r.value).fold(f64::INFINITY, f64::min);
            let high = all.iter().map(|r| r.value).fold(f64::NEG_INFINITY, f64::max);
            for rule in [Aggregate::Last, Aggregate::Mean, Aggregate::Median, Aggregate::Majority] {
                if let Some(value) = aggregate(rule, &all) {
                    prop_assert!(value >= low - 1e-9 && value <= high + 1e-9);
                } else {
                    prop_assert_eq!(rule, Aggregate::Majority);
                }
            }
        }

        #[test]
        fn large_values_do_not_overflow(values in prop::collection::vec(prop::num::f64::NORMAL, 1..9)) {
            let all: Vec<Rating> = values.iter().enumerate().map(|(i, v)| Rating {
                key_id: Some(i.to_string()), value: *v, created: 0,
            }).collect();
            prop_assert!(aggregate(Aggregate::Mean, &all).is_some());
            prop_assert!(aggregate(Aggregate::Median, &all).is_some());
        }
    }
}
