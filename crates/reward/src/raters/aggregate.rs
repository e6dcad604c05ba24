//! One value from several raters.

use std::collections::BTreeMap;

use hone_core::types::Rating;

use crate::config::Aggregate;

/// Each rater's newest rating, the oldest rater's first: a later one corrects an earlier. Of equal
/// times the later in the list counts.
pub fn corrected(ratings: &[Rating]) -> Vec<&Rating> {
    let mut newest: BTreeMap<Option<&str>, (usize, &Rating)> = BTreeMap::new();
    for (i, rating) in ratings.iter().enumerate() {
        let kept = newest.entry(rating.key_id.as_deref()).or_insert((i, rating));
        if rating.created >= kept.1.created {
            *kept = (i, rating);
        }
    }
    let mut kept: Vec<_> = newest.into_values().collect();
    kept.sort_by_key(|(i, rating)| (rating.created, *i));
    kept.into_iter().map(|(_, rating)| rating).collect()
}

/// What several raters of one sample and name come to, corrections counted once.
///
/// `last` is the newest value; `mean` the arithmetic mean; `median` the middle value or the mean of
/// the middle two; `majority` the most frequent value. Missing without a finite rating, and for
/// `majority` where two values are equally frequent.
pub fn aggregate(rule: Aggregate, ratings: &[Rating]) -> Option<f64> {
    let mut values: Vec<f64> =
        corrected(ratings).iter().map(|r| r.value).filter(|v| v.is_finite()).collect();
    let last = *values.last()?;
    let count = values.len();
    let value = match rule {
        Aggregate::Last => last,
        // Divided first, so that the sum cannot overflow.
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

/// [`aggregate`] by one rule, for the ledger, which knows no rules.
pub fn joining(rule: Aggregate) -> fn(&[Rating]) -> Option<f64> {
    match rule {
        Aggregate::Last => |ratings| aggregate(Aggregate::Last, ratings),
        Aggregate::Mean => |ratings| aggregate(Aggregate::Mean, ratings),
        Aggregate::Median => |ratings| aggregate(Aggregate::Median, ratings),
        Aggregate::Majority => |ratings| aggregate(Aggregate::Majority, ratings),
    }
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
    fn a_later_value_corrects_the_raters_own() {
        let all =
            ratings(&[("a", 5.0, 3), ("b", 1.0, 1), ("a", 2.0, 2), ("", 3.0, 1), ("", 4.0, 1)]);
        let kept: Vec<f64> = corrected(&all).iter().map(|r| r.value).collect();
        assert_eq!(kept, [1.0, 4.0, 5.0]);
    }

    #[test]
    fn rules() {
        let all = ratings(&[("a", 1.0, 1), ("b", 1.0, 4), ("c", 4.0, 3), ("d", 10.0, 2)]);
        let by = |rule| aggregate(rule, &all);
        assert_eq!(by(Aggregate::Last), Some(1.0));
        assert_eq!(by(Aggregate::Mean), Some(4.0));
        assert_eq!(by(Aggregate::Median), Some(2.5));
        assert_eq!(by(Aggregate::Majority), Some(1.0));
        assert_eq!(aggregate(Aggregate::Median, &all[1..]), Some(4.0));
        // No majority is missing, not nought.
        assert_eq!(aggregate(Aggregate::Majority, &all[1..]), None);
        assert_eq!(
            aggregate(Aggregate::Majority, &ratings(&[("a", 0.0, 1), ("b", -0.0, 1)])),
            Some(-0.0)
        );
        for rule in [Aggregate::Last, Aggregate::Mean, Aggregate::Median, Aggregate::Majority] {
            assert_eq!(joining(rule)(&all), by(rule));
            assert_eq!(aggregate(rule, &[]), None);
            assert_eq!(aggregate(rule, &ratings(&[("a", f64::NAN, 1)])), None);
        }
    }

    proptest! {
        #[test]
        fn an_aggregate_lies_between_its_ratings(
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
        fn magnitude_does_not_overflow(values in prop::collection::vec(prop::num::f64::NORMAL, 1..9)) {
            let all: Vec<Rating> = values.iter().enumerate().map(|(i, v)| Rating {
                key_id: Some(i.to_string()), value: *v, created: 0,
            }).collect();
            prop_assert!(aggregate(Aggregate::Mean, &all).is_some());
            prop_assert!(aggregate(Aggregate::Median, &all).is_some());
        }
    }
}
