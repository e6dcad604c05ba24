//! Count, mean and variance of weighted values, updated without the values.

use serde::{Deserialize, Serialize};

use crate::learning::float_bits;

/// Statistics of a set of weighted values; a part of the checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// Sum of the weights.
    #[serde(with = "float_bits")]
    pub count: f64,
    #[serde(with = "float_bits")]
    pub mean: f64,
    /// Weighted sum of squared distances from the mean.
    #[serde(with = "float_bits")]
    pub squares: f64,
}

impl Moments {
    /// A single value of weight `weight`.
    pub fn weighted(value: f64, weight: f64) -> Self {
        Self { count: weight, mean: value, squares: 0.0 }
    }

    /// All values, each of weight 1, in two passes.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count() as f64;
        if count == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / count;
        let squares = values.map(|x| (x - mean) * (x - mean)).sum();
        Self { count, mean, squares }
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
        }
    }

    /// The same values with weights multiplied by `factor`.
    #[must_use]
    pub fn decayed(self, factor: f64) -> Self {
        Self { count: self.count * factor, mean: self.mean, squares: self.squares * factor }
    }

    /// Standard deviation with Bessel's correction, `sqrt(squares / (count - 1))`; `None` below a
    /// count of 2.
    pub fn deviation(self) -> Option<f64> {
        (self.count >= 2.0).then(|| (self.squares / (self.count - 1.0)).max(0.0).sqrt())
    }
}
