//! Statistics of a part's values, gathered one by one.

use serde::Serialize;

/// Count, mean, deviation and extremes of a part's values, in constant memory (Welford 1962;
/// merging after Chan et al. 1979).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartStats {
    count: u64,
    missing: u64,
    mean: f64,
    squares: f64,
    min: f64,
    max: f64,
    at_max: u64,
}

/// What [`PartStats`] says; numbers that need values are absent without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PartSummary {
    /// Values.
    pub count: u64,
    /// Samples that could not be scored.
    pub missing: u64,
    /// Mean of the values.
    pub mean: Option<f64>,
    /// Sample deviation (divisor n - 1); 0 of one value.
    pub std: Option<f64>,
    /// The least value.
    pub min: Option<f64>,
    /// The greatest value.
    pub max: Option<f64>,
    /// Share of the values that equal the greatest, 0 to 1.
    pub share_at_max: Option<f64>,
}

impl PartStats {
    /// Counts a value; one that is missing or no finite number counts as missing.
    pub fn push(&mut self, value: Option<f64>) {
        let Some(value) = value.filter(|value| value.is_finite()) else {
            self.missing += 1;
            return;
        };
        if self.count == 0 || value < self.min {
            self.min = value;
        }
        if self.count == 0 || value > self.max {
            (self.max, self.at_max) = (value, 0);
        }
        self.at_max += u64::from(value == self.max);
        self.count += 1;
        let delta = value - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (value - self.mean);
    }

    /// Adds what another has counted.
    pub fn merge(&mut self, other: &Self) {
        let missing = self.missing + other.missing;
        if self.count == 0 {
            *self = *other;
        } else if other.count > 0 {
            let (n, m) = (self.count as f64, other.count as f64);
            let delta = other.mean - self.mean;
            self.mean += delta * m / (n + m);
            self.squares += other.squares + delta * delta * n * m / (n + m);
            self.count += other.count;
            self.min = self.min.min(other.min);
            self.at_max = match self.max.total_cmp(&other.max) {
                std::cmp::Ordering::Less => other.at_max,
                std::cmp::Ordering::Equal => self.at_max + other.at_max,
                std::cmp::Ordering::Greater => self.at_max,
            };
            self.max = self.max.max(other.max);
        }
        self.missing = missing;
    }

    /// What was counted so far.
    pub fn summary(&self) -> PartSummary {
        let some = |value: f64| (self.count > 0).then_some(value);
        let n = self.count as f64;
        let variance = if self.count > 1 { (self.squares / (n - 1.0)).max(0.0) } else { 0.0 };
        PartSummary {
            count: self.count,
            missing: self.missing,
            mean: some(self.mean),
            std: some(variance.sqrt()),
            min: some(self.min),
            max: some(self.max),
            share_at_max: some(self.at_max as f64 / n),
        }
    }
}

impl Extend<Option<f64>> for PartStats {
    fn extend<I: IntoIterator<Item = Option<f64>>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push(value));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[Option<f64>]) -> PartStats {
        let mut stats = PartStats::default();
        stats.extend(values.iter().copied());
        stats
    }

    #[test]
    fn known_values() {
        let stats = of(&[Some(2.0), None, Some(4.0), Some(4.0), Some(f64::NAN), Some(6.0)]);
        let summary = stats.summary();
        assert_eq!((summary.count, summary.missing), (4, 2));
        assert_eq!((summary.mean, summary.min, summary.max), (Some(4.0), Some(2.0), Some(6.0)));
        assert!((summary.std.unwrap() - (8.0_f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(summary.share_at_max, Some(0.25));
        assert_eq!(of(&[Some(1.0), Some(1.0), Some(0.0)]).summary().share_at_max, Some(2.0 / 3.0));
    }

    #[test]
    fn without_values_nothing_is_invented() {
        let none = of(&[None, None]).summary();
        assert_eq!(none, PartSummary { missing: 2, ..PartSummary::default() });
        assert_eq!(of(&[Some(3.0)]).summary().std, Some(0.0));
    }

    proptest! {
        #[test]
        fn merging_is_counting_together(
            values in prop::collection::vec(prop::option::of(-10..10_i32), 0..60),
            cut in 0..60_usize,
        ) {
            let values: Vec<Option<f64>> = values.iter().map(|v| v.map(f64::from)).collect();
            let (left, right) = values.split_at(cut.min(values.len()));
            let mut merged = of(left);
            merged.merge(&of(right));
            let (merged, whole) = (merged.summary(), of(&values).summary());
            let close = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => (a - b).abs() < 1e-9,
                (a, b) => a == b,
            };
            prop_assert!(close(merged.mean, whole.mean) && close(merged.std, whole.std));
            prop_assert_eq!(
                PartSummary { mean: None, std: None, ..merged },
                PartSummary { mean: None, std: None, ..whole }
            );
        }
    }
}
