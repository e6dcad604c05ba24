//! Confidence bounds of a mean, for differences of candidate and active version on the same prompts.

/// Probability that a bound is wrong, one-sided, unless several are checked.
pub(super) const BOUND_ERROR: f64 = 0.05;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MeanBounds {
    pub mean: f64,
    /// The mean is above this, except with the given probability.
    pub lower: f64,
    /// The mean is below this, except with the given probability.
    pub upper: f64,
}

impl MeanBounds {
    /// Student's bounds of the mean of independent values: `mean -+ t s / sqrt(n)`. `None` for fewer than two
    /// values, which have no deviation.
    #[expect(clippy::cast_precision_loss, reason = "an exam has a few hundred prompts")]
    pub fn of(values: &[f64], error: f64) -> Option<Self> {
        if values.len() < 2 {
            return None;
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
        let deviation = (squares / (count - 1.0) / count).sqrt();
        let width = student_quantile(count - 1.0, error) * deviation;
        Some(Self { mean, lower: mean - width, upper: mean + width })
    }
}

/// The quantile of Student's distribution at 1 - `error` with `n` degrees of freedom (Hill 1970, "Algorithm
/// 396"), with the quantile of the normal distribution by Abramowitz & Stegun 1964, 26.2.23. The error is below
/// 0.0012 up to 255 degrees of freedom.
fn student_quantile(n: f64, error: f64) -> f64 {
    // Both tails.
    let p = 2.0 * error;
    if n == 1.0 {
        return 1.0 / (p * std::f64::consts::FRAC_PI_2).tan();
    }
    if n == 2.0 {
        return (2.0 / (p * (2.0 - p)) - 2.0).sqrt();
    }
    let a = 1.0 / (n - 0.5);
    let b = 48.0 / (a * a);
    let mut c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36;
    let d = ((94.5 / (b + c) - 3.0) / b + 1.0) * (a * std::f64::consts::FRAC_PI_2).sqrt() * n;
    let mut y = (d * p).powf(2.0 / n);
    if y > 0.05 + a {
        let t = (-2.0 * (0.5 * p).ln()).sqrt();
        let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
        let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
        let x = above / below - t;
        y = x * x;
        if n < 5.0 {
            c += 0.3 * (n - 4.5) * (x + 0.6);
        }
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b;
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x;
        y = (a * y * y).exp_m1();
    } else {
        let tail = ((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0;
        y = ((1.0 / tail + 0.5 / (n + 4.0)) * y - 1.0) * (n + 1.0) / (n + 2.0) + 1.0 / y;
    }
    (n * y).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Quantiles of published tables (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
    #[test]
    fn quantiles_agree_with_tables() {
        for (freedom, expected) in [
            (1.0, 6.314),
            (2.0, 2.920),
            (3.0, 2.353),
            (7.0, 1.895),
            (15.0, 1.753),
            (31.0, 1.696),
            (100.0, 1.660),
        ] {
            let found = student_quantile(freedom, BOUND_ERROR);
            assert!((found - expected).abs() < 3e-3, "{freedom}: {found}");
        }
    }

    #[test]
    fn bounds_are_those_of_student() {
        let bounds = MeanBounds::of(&[1.0, 2.0, 3.0, 4.0], BOUND_ERROR).unwrap();
        let width = 2.353 * (5.0_f64 / 3.0 / 4.0).sqrt();
        assert_eq!(bounds.mean, 2.5);
        assert!((bounds.upper - 2.5 - width).abs() < 2e-3, "{bounds:?}");
        assert!((bounds.upper + bounds.lower - 5.0).abs() < 1e-12, "{bounds:?}");
        let equal = MeanBounds::of(&[0.3; 5], BOUND_ERROR).unwrap();
        assert!((equal.lower - 0.3).abs() < 1e-12 && (equal.upper - 0.3).abs() < 1e-12);
        assert_eq!(MeanBounds::of(&[1.0], BOUND_ERROR), None);
        assert!(MeanBounds::of(&[1.0, f64::NAN], BOUND_ERROR).unwrap().upper.is_nan());
    }
}
