//! Weights of completions that were sampled many versions ago and rated since.

/// Longest completion whose weight is the product over all its tokens. Longer ones have the weight of
/// this many of their average tokens.
const LONGEST: f64 = 64.0;

/// Samples with a smaller weight are left out.
pub(crate) const LEAST_WEIGHT: f64 = 1e-3;

/// The truncated importance weight of a completion of T tokens, from the `recorded` log-probabilities
/// of the policy that sampled it to the `old` ones of the policy before the step:
///
/// ```text
/// rho = min(exp(min(T, 64) * mean over tokens of old - recorded), clip_max)
/// ```
///
/// Up to 64 tokens this is truncated importance sampling of the whole sequence (Ionides 2008;
/// Espeholt et al. 2018 truncate at 1). The product over more tokens is almost always near 0, because
/// its logarithm falls in proportion to T; beyond that length the geometric mean (GSPO, Zheng et al.
/// 2025) limits the exponent. Both limits bias the size of the update, but not its sign.
pub(crate) fn late_weight(old: &[f64], recorded: &[f64], clip_max: f64) -> f64 {
    let count = old.len().max(1) as f64;
    let mean = old.iter().zip(recorded).map(|(o, r)| o - r).sum::<f64>() / count;
    (mean * count.min(LONGEST)).exp().min(clip_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weight of `count` tokens whose log-probabilities changed by `change` each.
    fn weight(count: usize, change: f64, clip_max: f64) -> f64 {
        let recorded: Vec<f64> = (0..count).map(|t| -1.0 - (t % 3) as f64).collect();
        let old: Vec<f64> = recorded.iter().map(|r| r + change).collect();
        late_weight(&old, &recorded, clip_max)
    }

    #[test]
    fn a_short_completion_has_the_truncated_weight_of_its_sequence() {
        assert!((weight(8, -0.1, 1.0) - (-0.8_f64).exp()).abs() < 1e-12);
        assert!((weight(64, -0.1, 1.0) - (-6.4_f64).exp()).abs() < 1e-12);
        assert_eq!(weight(8, 0.1, 1.0), 1.0, "it never counts more");
        assert!((weight(8, 0.1, 3.0) - 0.8_f64.exp()).abs() < 1e-12);
        assert_eq!(weight(8, 0.1, 2.0), 2.0);
        assert_eq!(weight(0, 0.0, 1.0), 1.0);
    }

    #[test]
    fn the_weight_of_a_long_completion_does_not_underflow() {
        let bounded = weight(4096, -0.05, 1.0);
        assert!((bounded - (-0.05 * LONGEST).exp()).abs() < 1e-12);
        assert!(bounded > LEAST_WEIGHT && (-0.05_f64 * 4096.0).exp() < LEAST_WEIGHT);
        assert!(weight(4096, -0.2, 1.0) < LEAST_WEIGHT);
    }
}
