//! Bayesian linear regression of rewards on hidden states of the frozen base, with a forgetting factor.
//!
//! The features of a text are a fixed random projection of the base's final hidden state (Achlioptas 2003, "Database-friendly random
//! projections"), so that the state of a regression does not grow with the model. The base does not change, so neither
//! do the features. The regression keeps weighted sums of products, which decay with each observation, and is solved in
//! closed form: weights of standardized features have the prior `N(0, noise / RIDGE)`, so that features of any scale are
//! shrunk alike (Hoerl & Kennard 1970; Bishop 2006, section 3.3).

pub(crate) mod learned;

use serde::{Deserialize, Serialize};

use crate::learning::float_list_bits;

/// Largest number of features of a text.
pub(crate) const FEATURES: usize = 64;

/// Weight of the prior, in observations: that of a signal in which all features together explain a third of the variance.
const RIDGE: f64 = 128.0;

/// `[features]` of a hidden state `[hidden]`: the state itself, scaled to a mean square of 1, or sums of its values with
/// random signs if it is wider than [`FEATURES`].
pub(crate) fn project(hidden: &[f64]) -> Vec<f64> {
    let width = hidden.len();
    let norm = hidden.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12);
    if width <= FEATURES {
        return hidden.iter().map(|x| x / norm * (width as f64).sqrt()).collect();
    }
    let mut features = vec![0.0; FEATURES];
    for (place, x) in hidden.iter().enumerate() {
        for (block, features) in features.chunks_mut(64).enumerate() {
            let signs = mixed((place * FEATURES + block) as u64);
            for (bit, feature) in features.iter_mut().enumerate() {
                *feature += if signs >> bit & 1 == 0 { *x } else { -*x };
            }
        }
    }
    features.iter_mut().for_each(|feature| *feature /= norm);
    features
}

/// 64 random bits (the finalizer of SplitMix64, Steele et al. 2014).
fn mixed(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One target with the features that predict it.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    pub features: Vec<f64>,
    pub target: f64,
    pub weight: f64,
}

/// The sums of a regression; a part of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Regression {
    /// The lower triangle, row by row, of the weighted sum of `z z^T` with `z = (1, features, target)`.
    #[serde(with = "float_list_bits")]
    sums: Vec<f64>,
}

impl Regression {
    /// Adds observations, whose order does not matter. The past decays by `decay` for each unit of their weights.
    pub fn observe(&mut self, observations: &[Observation], decay: f64) {
        let Some(first) = observations.iter().find(|own| own.weight > 0.0) else { return };
        let size = triangle(first.features.len() + 2);
        if self.sums.len() != size {
            self.sums = vec![0.0; size];
        }
        let weight: f64 = observations.iter().map(|own| own.weight).sum();
        let factor = decay.powf(weight);
        self.sums.iter_mut().for_each(|sum| *sum *= factor);
        for own in observations.iter().filter(|own| own.features.len() == first.features.len()) {
            let z: Vec<f64> =
                [1.0].iter().chain(&own.features).chain([&own.target]).copied().collect();
            let mut sums = self.sums.iter_mut();
            for (row, a) in z.iter().enumerate() {
                for (b, sum) in z[..=row].iter().zip(&mut sums) {
                    *sum += own.weight * a * b;
                }
            }
        }
    }

    /// Sum of the weights of the observations.
    pub fn count(&self) -> f64 {
        self.sums.first().copied().unwrap_or_default()
    }

    /// The solution; `None` of fewer than 2 observations.
    pub fn posterior(&self) -> Option<Posterior> {
        let count = self.count();
        if count < 2.0 {
            return None;
        }
        // The last row is that of the target.
        let target = (0..).find(|row| triangle(row + 1) == self.sums.len())?;
        let width = target - 1;
        let mean = |row: usize| self.sums[triangle(row)] / count;
        let covariance = |row: usize, column: usize| {
            self.sums[triangle(row) + column] / count - mean(row) * mean(column)
        };
        let mut factor = Vec::with_capacity(triangle(width));
        for row in 0..width {
            for column in 0..=row {
                let ridge = if row == column { RIDGE / count } else { 0.0 };
                let value = covariance(row + 1, column + 1) * (1.0 + ridge);
                factor.push(if row == column { value + 1e-9 } else { value });
            }
        }
        factorize(&mut factor, width)?;
        let with_target: Vec<f64> = (0..width).map(|row| covariance(target, row + 1)).collect();
        let half = solve_lower(&factor, &with_target);
        // The part of the target's variance that the features explain is the square of `half`.
        let explained: f64 = half.iter().map(|x| x * x).sum();
        let noise = (covariance(target, target) - explained).max(0.0);
        Some(Posterior {
            center: (1..=width).map(mean).collect(),
            target: mean(target),
            weights: solve_upper(&factor, half),
            factor,
            noise,
            count,
        })
    }
}

/// A solved regression.
#[derive(Clone, Debug)]
pub(crate) struct Posterior {
    /// Means of the features.
    center: Vec<f64>,
    /// Mean of the target.
    target: f64,
    weights: Vec<f64>,
    /// Lower triangle L of the features' covariance with the prior, `L L^T`.
    factor: Vec<f64>,
    /// Variance of the target around its prediction.
    noise: f64,
    count: f64,
}

impl Posterior {
    /// Mean and standard deviation of the expected target of a text; `None` if it has another number of features.
    pub fn predict(&self, features: &[f64]) -> Option<(f64, f64)> {
        if features.len() != self.center.len() {
            return None;
        }
        let centered: Vec<f64> =
            features.iter().zip(&self.center).map(|(x, mean)| x - mean).collect();
        let change: f64 = centered.iter().zip(&self.weights).map(|(x, weight)| x * weight).sum();
        let leverage: f64 = solve_lower(&self.factor, &centered).iter().map(|x| x * x).sum();
        Some((self.target + change, (self.noise * (1.0 + leverage) / self.count).sqrt()))
    }
}

// The Cholesky factorization of a symmetric matrix, of which the lower triangle is stored row by row.

/// Number of values in the first `rows` rows.
fn triangle(rows: usize) -> usize {
    rows * (rows + 1) / 2
}

/// Replaces the triangle by that of L with `L L^T`; `None` if the matrix is not positive definite.
fn factorize(values: &mut [f64], width: usize) -> Option<()> {
    for row in 0..width {
        for column in 0..=row {
            let (a, b) = (triangle(row), triangle(column));
            let known: f64 = (0..column).map(|k| values[a + k] * values[b + k]).sum();
            let rest = values[a + column] - known;
            values[a + column] = if row > column {
                rest / values[b + column]
            } else if rest > 0.0 {
                rest.sqrt()
            } else {
                return None;
            };
        }
    }
    Some(())
}

/// x with `L x = b`.
fn solve_lower(factor: &[f64], b: &[f64]) -> Vec<f64> {
    let mut x: Vec<f64> = Vec::with_capacity(b.len());
    for (row, b) in b.iter().enumerate() {
        let own = &factor[triangle(row)..=triangle(row) + row];
        let known: f64 = own.iter().zip(&x).map(|(a, x)| a * x).sum();
        x.push((b - known) / own[row]);
    }
    x
}

/// x with `L^T x = b`.
fn solve_upper(factor: &[f64], mut b: Vec<f64>) -> Vec<f64> {
    for row in (0..b.len()).rev() {
        let own = triangle(row);
        b[row] /= factor[own + row];
        for column in 0..row {
            b[column] -= factor[own + column] * b[row];
        }
    }
    b
}

#[cfg(test)]
mod tests;
