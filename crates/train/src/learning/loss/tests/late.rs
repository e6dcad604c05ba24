use super::super::*;

/// The weight of `count` tokens whose log-probabilities changed by `change` each.
fn weight(count: usize, change: f64) -> f64 {
    let recorded: Vec<f64> = (0..count).map(|t| -1.0 - (t % 3) as f64).collect();
    let old: Vec<f64> = recorded.iter().map(|r| r + change).collect();
    late_weight(&old, &recorded)
}

#[test]
fn a_short_completion_has_the_truncated_weight_of_its_sequence() {
    assert!((weight(8, -0.1) - (-0.8_f64).exp()).abs() < 1e-12);
    assert!((weight(64, -0.1) - (-6.4_f64).exp()).abs() < 1e-12);
    assert_eq!(weight(8, 0.1), 1.0, "it never counts more");
    assert_eq!(weight(0, 0.0), 1.0);
}

#[test]
fn the_weight_of_a_long_completion_does_not_underflow() {
    let bounded = weight(4096, -0.05);
    assert!((bounded - (-0.05 * LONGEST).exp()).abs() < 1e-12);
    assert!(bounded > LEAST_WEIGHT && (-0.05_f64 * 4096.0).exp() < LEAST_WEIGHT);
    assert!(weight(4096, -0.2) < LEAST_WEIGHT);
}
