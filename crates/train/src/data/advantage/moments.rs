//! Count, mean, variance and range of weighted values, updated without the values.

use serde::{Deserialize, Serialize};

use crate::learning::float_bits;

/// Windows over which the range forgets, for each window of the mean and the variance. So a rare
/// value, such as a thumbs-down among a hundred thumbs-up, keeps its place in the range, and a single
/// outlier does not stay in it forever.
const RANGE_WINDOWS: f64 = 8.0;

/// Values from which on a value far outside of their range is limited.
const LEAST_KNOWN: f64 = 8.0;

/// Statistics of a set of weighted values; a part of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// Sum of the weights.
    #[serde(with = "float_bits")]
    pub count: f64,
    #[serde(with = "float_bits")]
    pub mean: f64,
    /// Weighted sum of squared distances from the mean.
    #[serde(with = "float_bits")]
    pub squares: f64,
    /// The smallest value, which [`Self::decayed`] moves toward the mean; infinite without values, and
    /// in checkpoints of versions that did not record it.
    #[serde(with = "float_bits", default = "no_minimum")]
    pub min: f64,
    /// The largest value, as [`Self::min`].
    #[serde(with = "float_bits", default = "no_maximum")]
    pub max: f64,
}

fn no_minimum() -> f64 {
    f64::INFINITY
}

fn no_maximum() -> f64 {
    f64::NEG_INFINITY
}

impl Default for Moments {
    fn default() -> Self {
        Self { count: 0.0, mean: 0.0, squares: 0.0, min: no_minimum(), max: no_maximum() }
    }
}

impl Moments {
    /// A single value of weight `weight`.
    pub fn weighted(value: f64, weight: f64) -> Self {
        Self { count: weight, mean: value, squares: 0.0, min: value, max: value }
    }

    /// All values, each of weight 1, in two passes.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count() as f64;
        if count == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / count;
        let squares = values.clone().map(|x| (x - mean) * (x - mean)).sum();
        let min = values.clone().fold(no_minimum(), f64::min);
        let max = values.fold(no_maximum(), f64::max);
        Self { count, mean, squares, min, max }
    }

    /// The union of both sets (Chan, Golub & LeVeque 1979).
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        if self.count <= 0.0 {
            return other;
        }
        if other.count <= 0.0 {
            return self;
        }
        let count = self.count + other.count;
        let distance = other.mean - self.mean;
        Self {
            count,
            mean: self.mean + distance * (other.count / count),
            squares: self.squares
                + other.squares
                + distance * distance * (self.count * (other.count / count)),
            min: self.min.min(other.min),
            max: self.max.max(other.max),
        }
    }

    /// The same values with weights multiplied by `factor`. The distances of minimum and maximum from
    /// the mean are multiplied by the eighth root of `factor`.
    #[must_use]
    pub fn decayed(self, factor: f64) -> Self {
        let range_factor = factor.powf(1.0 / RANGE_WINDOWS);
        Self {
            count: self.count * factor,
            mean: self.mean,
            squares: self.squares * factor,
            min: self.mean - (self.mean - self.min) * range_factor,
            max: self.mean + (self.max - self.mean) * range_factor,
        }
    }

    /// The same values as if those outside of a range had been its ends.
    #[must_use]
    pub fn within(self, [low, high]: [f64; 2]) -> Self {
        if self.count <= 0.0 {
            return self;
        }
        let most_squares = self.count * (0.5 * (high - low)).powi(2);
        Self {
            count: self.count,
            mean: self.mean.clamp(low, high),
            squares: self.squares.min(most_squares),
            min: self.min.max(low),
            max: self.max.min(high),
        }
    }

    /// The values that are plausible beside these: as far outside of their range as half of it. `None` of a few
    /// values, and of equal ones, which have no scale.
    pub fn plausible(self) -> Option<[f64; 2]> {
        let span = self.max - self.min;
        let known = self.count >= LEAST_KNOWN && span.is_finite() && span > 0.0;
        known.then_some([self.min - 0.5 * span, self.max + 0.5 * span])
    }

    /// Standard deviation with Bessel's correction, `sqrt(squares / (count - 1))`; `None` below a
    /// count of 2.
    pub fn deviation(self) -> Option<f64> {
        (self.count >= 2.0).then(|| (self.squares / (self.count - 1.0)).max(0.0).sqrt())
    }

    /// Half of the distance from the smallest to the largest value, `value` and the mean included: the
    /// largest standard deviation that values in this range can have (Popoviciu 1935).
    pub fn half_range_with(self, value: f64) -> f64 {
        let least = self.min.min(self.mean).min(value);
        let most = self.max.max(self.mean).max(value);
        0.5 * (most - least)
    }
}
