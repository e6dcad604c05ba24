//! Statistics of evaluations: pass@k, means and paired differences with 95 % confidence intervals.
//!
//! Intervals are Wilson's if all values are 0 or 1, and bootstrap percentiles otherwise. The bootstrap
//! is seeded: the same values give the same interval.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Resamples of a bootstrap.
pub const RESAMPLES: usize = 2000;
/// The 97.5 % quantile of the normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// A 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// A mean and its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The mean of the known values.
    pub mean: f64,
    /// The 95 % confidence interval; `None` for a single value.
    pub interval: Option<Interval>,
    /// The number of known values.
    pub n: usize,
}

/// Statistics of one reward part, or of the total, over completions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreStats {
    /// Mean and interval; `None` without a known value.
    pub estimate: Option<Estimate>,
    /// Sample standard deviation (n - 1); `None` for fewer than two values.
    pub std: Option<f64>,
    /// The smallest value.
    pub min: Option<f64>,
    /// The largest value.
    pub max: Option<f64>,
    /// Completions that could not be scored.
    pub missing: usize,
}

/// The unbiased estimate of the probability that at least one of `k` completions is right, from `n`
/// completions of which `right` are right: `1 - C(n - right, k) / C(n, k)` (Chen et al. 2021, "Evaluating
/// Large Language Models Trained on Code", equation 1), as a product, which does not overflow.
///
/// `None` unless `1 <= k <= n` and `right <= n`.
pub fn pass_at_k(n: u64, right: u64, k: u64) -> Option<f64> {
    if k == 0 || k > n || right > n {
        return None;
    }
    if n - right < k {
        return Some(1.0);
    }
    // C(n - right, k) / C(n, k) is the product of (1 - k / i) over i from n - right + 1 to n.
    Some(1.0 - (n - right + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>())
}

/// The mean of [`pass_at_k`] over prompts, each given as `(n, right)`, with its interval over prompts.
/// Completions of one prompt are not independent, prompts are. `None` without prompts or if a prompt
/// has fewer than `k` completions.
pub fn mean_pass_at_k(prompts: &[(u64, u64)], k: u64, seed: u64) -> Option<Estimate> {
    let values: Option<Vec<f64>> =
        prompts.iter().map(|(n, right)| pass_at_k(*n, *right, k)).collect();
    estimate(&values?, seed)
}

/// The mean with its interval: [`wilson`] if every value is 0 or 1, else [`bootstrap`]. `None` without
/// values or if one is not finite.
pub fn estimate(values: &[f64], seed: u64) -> Option<Estimate> {
    summary(values, values.iter().all(|v| *v == 0.0 || *v == 1.0), seed)
}

/// The mean of `after - before` over the same prompts, and its bootstrap interval over pairs. Pairing
/// removes the variance between prompts of different difficulty. `None` without pairs or if a value is
/// not finite.
pub fn paired_difference(pairs: &[(f64, f64)], seed: u64) -> Option<Estimate> {
    let differences: Vec<f64> = pairs.iter().map(|(before, after)| after - before).collect();
    summary(&differences, false, seed)
}

/// The mean with its interval: [`wilson`] of values that are 0 or 1, else [`bootstrap`].
fn summary(values: &[f64], is_binary: bool, seed: u64) -> Option<Estimate> {
    let n = values.len();
    if n == 0 || values.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let interval = match n {
        1 => None,
        _ if is_binary => wilson(values.iter().filter(|v| **v == 1.0).count() as u64, n as u64),
        _ => bootstrap(values, RESAMPLES, seed),
    };
    Some(Estimate { mean: mean(values), interval, n })
}

/// Wilson's score interval of a share (Wilson 1927), without continuity correction:
/// `(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)` with z = 1.96. `None` without trials
/// or with more successes than trials.
pub fn wilson(successes: u64, trials: u64) -> Option<Interval> {
    if trials == 0 || successes > trials {
        return None;
    }
    let n = trials as f64;
    let p = successes as f64 / n;
    let z2 = Z * Z / n;
    let center = (p + z2 / 2.0) / (1.0 + z2);
    let half = (p * (1.0 - p) * z2 + z2 * z2 / 4.0).sqrt() / (1.0 + z2);
    // The exact ends, without rounding errors.
    let low = if successes == 0 { 0.0 } else { (center - half).max(0.0) };
    let high = if successes == trials { 1.0 } else { (center + half).min(1.0) };
    Some(Interval { low, high })
}

/// The 2.5 % and 97.5 % percentiles of the means of `resamples` resamples (Efron's percentile
/// bootstrap). `None` without values.
pub fn bootstrap(values: &[f64], resamples: usize, seed: u64) -> Option<Interval> {
    let n = values.len();
    if n == 0 || resamples == 0 {
        return None;
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = || (0..n).map(|_| values[random.random_range(0..n)]).sum::<f64>() / n as f64;
    let mut means: Vec<f64> = (0..resamples).map(|_| draw()).collect();
    means.sort_by(f64::total_cmp);
    Some(Interval { low: quantile(&means, 0.025)?, high: quantile(&means, 0.975)? })
}

/// The quantile of sorted values, linear between neighbors (numpy's default method, type 7 of Hyndman
/// and Fan); `None` without values or if `q` is outside 0 to 1.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    if !(0.0..=1.0).contains(&q) {
        return None;
    }
    let place = q * (sorted.len().checked_sub(1)?) as f64;
    let (below, share) = (place.floor() as usize, place.fract());
    let low = *sorted.get(below)?;
    let high = *sorted.get(below + 1).unwrap_or(&low);
    Some(low + (high - low) * share)
}

/// Summarizes values. Those that are missing or not finite count as missing.
pub fn score_stats(values: &[Option<f64>], seed: u64) -> ScoreStats {
    let known: Vec<f64> = values.iter().flatten().copied().filter(|v| v.is_finite()).collect();
    ScoreStats {
        estimate: estimate(&known, seed),
        std: deviation(&known),
        min: known.iter().copied().min_by(f64::total_cmp),
        max: known.iter().copied().max_by(f64::total_cmp),
        missing: values.len() - known.len(),
    }
}

/// The mean; NaN without values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The sample standard deviation (n - 1); `None` for fewer than two values.
pub fn deviation(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let center = mean(values);
    let sum: f64 = values.iter().map(|v| (v - center) * (v - center)).sum();
    Some((sum / (values.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests;
