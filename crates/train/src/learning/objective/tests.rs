//! Gradients, metrics and adaptive coefficients of worked examples.

use std::collections::BTreeMap;

use super::{AdaptiveCoefficients, Objective, StepTotals};
use crate::config::TrainConfig;
use crate::learning::loss::LossSequence;

fn sequence<'a>(
    logprobs: &'a [f64],
    entropies: &'a [f64],
    recorded: &'a [f64],
    advantage: f64,
) -> LossSequence<'a> {
    LossSequence { logprobs, entropies, recorded, old: None, reference: None, advantage }
}

#[test]
fn a_sample_of_length_zero_has_no_gradient_and_is_not_counted() {
    let mut config = TrainConfig { beta: 0.0, ..TrainConfig::default() };
    config.entropy.coef = 0.5;
    let adaptive = AdaptiveCoefficients::new(&config);
    let objective = Objective::new(&config, &adaptive, &[2, 0], &[0, 1], 8, &[], 0);
    let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
    let sequence = sequence(&[-1.0, -2.0], &[0.7, 0.9], &[-1.0, -2.0], 1.0);
    for index in 0..2 {
        objective.add_sequence(index, &sequence, &mut gradients, &mut totals);
    }
    // -A r / tokens, and -coef / tokens.
    assert_eq!(gradients, [[-0.5, -0.25], [-0.5, -0.25], [0.0, 0.0], [0.0, 0.0]]);
    assert!((totals.loss - (-1.0 - 0.5 * 0.8)).abs() < 1e-12);
    assert_eq!((totals.samples, totals.kl(), totals.selected_entropy()), (1.0, None, Some(0.8)));
    let mut metrics = BTreeMap::new();
    totals.insert_metrics(&config, &mut metrics);
    assert_eq!(metrics["tokens"], 2.0);
    assert!(!metrics.contains_key("kl") && !metrics.contains_key("sampler_ratio_mean"));
}

#[test]
fn clipping_is_counted_by_token_and_by_sequence() {
    let config = TrainConfig { beta: 0.0, ..TrainConfig::default() };
    let adaptive = AdaptiveCoefficients::new(&config);
    let objective = Objective::new(&config, &adaptive, &[2, 2], &[0, 1], 8, &[], 0);
    let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
    // Ratios e and 1, then 1 and 1 / e.
    for (index, (recorded, advantage)) in
        [([-2.0, -1.0], 1.0), ([-1.0, 0.0], -1.0)].iter().enumerate()
    {
        let sequence = sequence(&[-1.0, -1.0], &[1.0; 2], recorded, *advantage);
        objective.add_sequence(index, &sequence, &mut gradients, &mut totals);
    }
    let mut metrics = BTreeMap::new();
    totals.insert_metrics(&config, &mut metrics);
    let expected = [
        ("clip_low", 0.25),
        ("clip_low_min", 0.0),
        ("clip_high", 0.25),
        ("clip_high_max", 0.5),
        ("clip_region", 0.5),
    ];
    for (name, value) in expected {
        assert_eq!(metrics[name], value, "{name}");
    }
}

#[test]
fn fixed_coefficients_follow_the_configuration_after_a_restart() {
    let mut config = TrainConfig::default();
    config.kl.target = 0.1;
    let saved = AdaptiveCoefficients { beta: 0.7, entropy_coef: 0.4, entropy: 0.1 };
    assert_eq!(saved.configured(&config), AdaptiveCoefficients { entropy_coef: 0.0, ..saved });
    config.kl.target = 0.0;
    config.entropy.target = 0.2;
    assert_eq!(saved.configured(&config), AdaptiveCoefficients { beta: config.beta, ..saved });
    let text = serde_json::to_string(&saved).unwrap();
    assert_eq!(serde_json::from_str::<AdaptiveCoefficients>(&text).unwrap(), saved);
    let fresh = AdaptiveCoefficients::new(&config);
    let text = serde_json::to_string(&fresh).unwrap();
    assert_eq!(serde_json::from_str::<AdaptiveCoefficients>(&text).unwrap(), fresh);
}

#[test]
fn corrections_add_their_mean_negative_log_likelihood() {
    let config = TrainConfig { beta: 0.0, correction_weight: 0.5, ..TrainConfig::default() };
    let adaptive = AdaptiveCoefficients::new(&config);
    // One sampled completion of two tokens; corrections of one and three tokens.
    let objective = Objective::new(&config, &adaptive, &[2, 0, 0], &[0, 1, 2], 8, &[], 4);
    let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
    let sequence = sequence(&[-1.0, -2.0], &[0.7, 0.9], &[-1.0, -2.0], 1.0);
    objective.add_sequence(0, &sequence, &mut gradients, &mut totals);
    objective.add_correction(&[-3.0], &mut gradients, &mut totals);
    objective.add_correction(&[-0.5, -1.0, -1.5], &mut gradients, &mut totals);
    assert_eq!(gradients[..2], [[-0.5, 0.0]; 2], "corrections do not count in the mean");
    assert_eq!(gradients[2..], [[-0.125, 0.0]; 4]);
    // -A r in the mean over two tokens, and half of the mean of 3, 0.5, 1 and 1.5.
    assert!((totals.loss - (-1.0 + 0.5 * 1.5)).abs() < 1e-12);
    totals.computed_tokens = 12.0;
    let once = totals.clone();
    // A second pass, as of another update, has the same means.
    totals.add(&once);
    for totals in [once, totals] {
        let mut metrics = BTreeMap::new();
        totals.insert_metrics(&config, &mut metrics);
        assert!((metrics["loss"] + 0.25).abs() < 1e-12);
        assert_eq!((metrics["correction/nll"], metrics["correction/samples"]), (1.5, 2.0));
        assert_eq!((metrics["samples"], metrics["tokens"]), (1.0, 2.0));
        assert_eq!(metrics["loss_token_fraction"], 0.5);
    }
}

/// A long time below the target must not take as long to undo.
#[test]
fn an_adaptive_beta_returns_soon() {
    let mut config = TrainConfig { beta: 0.1, ..TrainConfig::default() };
    config.kl.target = 0.1;
    let mut adaptive = AdaptiveCoefficients::new(&config);
    let mut update = |kl: f64, steps: usize| {
        for _ in 0..steps {
            let totals =
                StepTotals { kl: Some(kl), tokens: 1.0, samples: 64.0, ..Default::default() };
            adaptive.update(&totals, &config);
        }
        adaptive.beta
    };
    assert!((update(0.02, 100_000) - 0.01).abs() < 1e-12);
    assert!(update(0.3, 2_000) > config.beta);
    assert!((update(0.3, 100_000) - 10.0).abs() < 1e-9);
}
