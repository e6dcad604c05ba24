use proptest::prelude::*;
use serde::Deserialize;

use super::*;

/// Computed by `tests/reference/runs/run_stats.py`.
#[derive(Deserialize)]
struct Reference {
    pass_at_k: Vec<(u64, u64, u64, f64)>,
    wilson: Vec<(u64, u64, f64, f64)>,
    quantiles: Vec<Quantile>,
    bootstrap: Vec<Bootstrap>,
}

#[derive(Deserialize)]
struct Quantile {
    values: Vec<f64>,
    q: f64,
    expected: f64,
}

#[derive(Deserialize)]
struct Bootstrap {
    values: Vec<f64>,
    mean: f64,
    std: f64,
    low: f64,
    high: f64,
}

fn reference() -> Reference {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/runs/run_stats.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * b.abs().max(1.0)
}

#[test]
fn pass_at_k_is_the_exact_ratio_of_binomials() {
    let cases = reference().pass_at_k;
    assert!(cases.len() >= 20);
    for (n, right, k, expected) in cases {
        let found = pass_at_k(n, right, k).unwrap();
        assert!(close(found, expected, 1e-12), "n {n}, right {right}, k {k}: {found}");
    }
    for (n, right, k) in [(0, 0, 1), (5, 1, 0), (5, 1, 6), (5, 6, 1)] {
        assert_eq!(pass_at_k(n, right, k), None);
    }
}

#[test]
fn wilson_is_the_interval_of_the_score_test() {
    let cases = reference().wilson;
    assert!(cases.len() >= 10);
    for (successes, trials, low, high) in cases {
        let found = wilson(successes, trials).unwrap();
        let good = close(found.low, low, 1e-9) && close(found.high, high, 1e-9);
        assert!(good, "{successes} of {trials}: {found:?}, not {low} to {high}");
    }
    assert_eq!(wilson(0, 0), None);
    assert_eq!(wilson(2, 1), None);
    let found = estimate(&[1.0, 0.0, 1.0, 1.0], 0).unwrap();
    assert_eq!(found.interval, wilson(3, 4));
    assert_eq!(found.mean, 0.75);
}

#[test]
fn quantiles_agree_with_numpy() {
    for case in reference().quantiles {
        let found = quantile(&case.values, case.q).unwrap();
        assert!(close(found, case.expected, 1e-12), "{found} {}", case.expected);
    }
    assert_eq!(quantile(&[], 0.5), None);
    assert_eq!(quantile(&[1.0], 1.5), None);
}

/// 2000 resamples agree with numpy's 200,000 within a tenth of the interval's width.
#[test]
fn bootstrap_agrees_with_numpy() {
    let cases = reference().bootstrap;
    assert!(cases.len() >= 3);
    for case in cases {
        let optional: Vec<Option<f64>> = case.values.iter().copied().map(Some).collect();
        let stats = score_stats(&optional, 7);
        let estimate = stats.estimate.unwrap();
        assert!(close(estimate.mean, case.mean, 1e-12));
        assert!(close(stats.std.unwrap(), case.std, 1e-12));
        let interval = estimate.interval.unwrap();
        let slack = (case.high - case.low) * 0.1;
        let good =
            (interval.low - case.low).abs() < slack && (interval.high - case.high).abs() < slack;
        assert!(good, "{interval:?}, not {} to {}", case.low, case.high);
    }
}

#[test]
fn statistics_that_cannot_be_computed_are_missing() {
    assert_eq!(estimate(&[], 0), None);
    assert_eq!(estimate(&[1.0, f64::NAN], 0), None);
    assert_eq!(paired_difference(&[], 0), None);
    assert_eq!(mean_pass_at_k(&[(4, 1), (2, 1)], 3, 0), None);
    let one = Estimate { mean: 2.0, interval: None, n: 1 };
    assert_eq!(estimate(&[2.0], 0), Some(one));
    assert_eq!(paired_difference(&[(1.0, 3.0)], 0), Some(one));
    let stats = score_stats(&[None, Some(f64::NAN)], 0);
    let nothing = ScoreStats { estimate: None, std: None, min: None, max: None, missing: 2 };
    assert_eq!(stats, nothing);
}

#[test]
fn pairing_detects_a_gain_that_unpaired_means_hide() {
    // Every prompt gains 0.1, while prompts differ by up to 10.
    let pairs: Vec<(f64, f64)> = (0..40)
        .map(|i| (f64::from(i % 10), f64::from(i % 10) + 0.1 + 0.01 * f64::from(i % 3)))
        .collect();
    let paired = paired_difference(&pairs, 1).unwrap().interval.unwrap();
    assert!(paired.low > 0.09 && paired.high < 0.13, "{paired:?}");
    let after: Vec<f64> = pairs.iter().map(|p| p.1).collect();
    let alone = estimate(&after, 1).unwrap().interval.unwrap();
    assert!(alone.high - alone.low > 1.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn wilson_contains_the_share_and_narrows_with_trials(successes in 0u64..500, failures in 0u64..500) {
        prop_assume!(successes + failures > 0);
        let n = successes + failures;
        let share = successes as f64 / n as f64;
        let found = wilson(successes, n).unwrap();
        prop_assert!(0.0 <= found.low && found.low <= share && share <= found.high && found.high <= 1.0);
        let more = wilson(successes * 4, n * 4).unwrap();
        prop_assert!(more.high - more.low < found.high - found.low);
        let mirrored = wilson(failures, n).unwrap();
        prop_assert!((mirrored.low - (1.0 - found.high)).abs() < 1e-12);
    }

    #[test]
    fn bootstraps_are_reproducible_and_within_the_values(
        values in prop::collection::vec(-5.0..5.0f64, 1..30), seed: u64,
    ) {
        let found = bootstrap(&values, 200, seed).unwrap();
        prop_assert_eq!(bootstrap(&values, 200, seed), Some(found));
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        prop_assert!(min - 1e-9 <= found.low && found.low <= found.high && found.high <= max + 1e-9);
        let stats = score_stats(&values.iter().map(|v| Some(*v)).chain([None]).collect::<Vec<_>>(), seed);
        prop_assert_eq!((stats.missing, stats.min, stats.max), (1, Some(min), Some(max)));
    }
}
