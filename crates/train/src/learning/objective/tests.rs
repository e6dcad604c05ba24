//! Plans and what follows from them.

use std::collections::BTreeMap;

use super::{AdaptiveCoefficients, LossGradients, Objective, TokenRows, Totals, completions};
use crate::config::TrainConfig;
use crate::data::packing::TrainSample;

fn sample(advantage: f64, logprobs: &[f32]) -> TrainSample {
    TrainSample {
        prompt_ids: vec![1],
        ids: vec![2; logprobs.len()],
        logprobs: logprobs.to_vec(),
        temperature: 1.0,
        advantage,
        version: 0,
        truncated: false,
    }
}

#[test]
fn a_sample_of_length_zero_counts_nowhere() {
    let mut config = TrainConfig { beta: 0.0, ..TrainConfig::default() };
    config.entropy.coef = 0.5;
    let objective = Objective::new(&config, &AdaptiveCoefficients::new(&config));
    let plan = objective.plan(&[2, 0], 8, &[]);
    let (mut slopes, mut totals) = (LossGradients::default(), Totals::of_a_pass());
    let rows =
        TokenRows { logprobs: &[-1.0, -2.0], entropies: &[0.7, 0.9], old: None, reference: None };
    for index in 0..2 {
        plan.sample(index, &sample(1.0, &[-1.0, -2.0]), &rows, &mut slopes, &mut totals);
    }
    // -A r / tokens, and -coef / tokens.
    assert_eq!(slopes.logprob, vec![-0.5, -0.5, 0.0, 0.0]);
    assert_eq!(slopes.entropy, vec![-0.25, -0.25, 0.0, 0.0]);
    assert!((totals.loss - (-1.0 - 0.5 * 0.8)).abs() < 1e-12);
    assert_eq!((totals.samples, totals.kl(), totals.open_entropy()), (1.0, None, Some(0.8)));
    let mut metrics = BTreeMap::new();
    totals.describe(&config, &mut metrics);
    assert_eq!(metrics["tokens"], 2.0);
    assert!(!metrics.contains_key("kl") && !metrics.contains_key("sampler_ratio_mean"));
}

#[test]
fn clipping_is_counted_by_token_and_by_sequence() {
    let config = TrainConfig { beta: 0.0, ..TrainConfig::default() };
    let objective = Objective::new(&config, &AdaptiveCoefficients::new(&config));
    let plan = objective.plan(&[2, 2], 8, &[]);
    let (mut slopes, mut totals) = (LossGradients::default(), Totals::of_a_pass());
    let rows =
        TokenRows { logprobs: &[-1.0, -1.0], entropies: &[1.0; 2], old: None, reference: None };
    // Ratios e and 1, then 1 and 1 / e.
    plan.sample(0, &sample(1.0, &[-2.0, -1.0]), &rows, &mut slopes, &mut totals);
    plan.sample(1, &sample(-1.0, &[-1.0, 0.0]), &rows, &mut slopes, &mut totals);
    let mut metrics = BTreeMap::new();
    totals.describe(&config, &mut metrics);
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
fn fixed_coefficients_are_the_configurations_after_a_restart() {
    let mut config = TrainConfig::default();
    config.kl.target = 0.1;
    let saved = AdaptiveCoefficients { beta: 0.7, entropy_coef: 0.4, entropy: 0.1 };
    assert_eq!(saved.configured(&config), AdaptiveCoefficients { entropy_coef: 0.0, ..saved });
    config.kl.target = 0.0;
    config.entropy.adaptive = true;
    assert_eq!(saved.configured(&config), AdaptiveCoefficients { beta: config.beta, ..saved });
    let text = serde_json::to_string(&saved).unwrap();
    assert_eq!(serde_json::from_str::<AdaptiveCoefficients>(&text).unwrap(), saved);
    let fresh = AdaptiveCoefficients::new(&config);
    let text = serde_json::to_string(&fresh).unwrap();
    assert_eq!(serde_json::from_str::<AdaptiveCoefficients>(&text).unwrap(), fresh);
}

#[test]
fn lengths_are_of_all_and_of_those_that_ended() {
    let figures: BTreeMap<String, f64> =
        completions([(4, false), (10, true), (2, false)]).into_iter().collect();
    assert_eq!(figures["completion_length"], 16.0 / 3.0);
    assert_eq!((figures["completion_length_min"], figures["completion_length_max"]), (2.0, 10.0));
    assert_eq!(figures["terminated_length"], 3.0);
    assert_eq!((figures["terminated_length_min"], figures["terminated_length_max"]), (2.0, 4.0));
    assert!((figures["truncated_ratio"] - 1.0 / 3.0).abs() < 1e-12);
    // As the peer: 0 where none ended by itself.
    let figures: BTreeMap<String, f64> = completions([(4, true)]).into_iter().collect();
    assert_eq!((figures["terminated_length"], figures["truncated_ratio"]), (0.0, 1.0));
    assert!(completions([]).is_empty());
}
