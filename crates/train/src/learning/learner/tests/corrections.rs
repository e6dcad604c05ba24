//! Corrections: supervised samples beside those that a policy sampled.

use super::{Learner, TrainSample, bits, recorded};
use crate::config::{CorrectionMode, TrainConfig};
use crate::testing::{score, tiny_config, tiny_learner};

fn correction(prompt: &[u32], ids: &[u32]) -> TrainSample {
    TrainSample {
        prompt_ids: prompt.to_vec(),
        ids: ids.to_vec(),
        temperature: 1.0,
        version: u64::MAX,
        correction: true,
        ..TrainSample::default()
    }
}

/// Mean over all tokens of the negative log-probability.
fn nll(learner: &Learner, corrections: &[TrainSample]) -> f64 {
    let all: Vec<f32> = corrections.iter().flat_map(|sample| score(learner, sample)).collect();
    -all.iter().map(|l| f64::from(*l)).sum::<f64>() / all.len() as f64
}

#[test]
fn the_likelihood_of_corrections_rises_beside_other_samples() {
    // Two updates with a sampler correction: neither the ratio nor the KL concerns corrections.
    let mut config =
        TrainConfig { correction_weight: 1.0, num_iterations: 2, micro_batch: 4, ..tiny_config() };
    config.sampler_correction.kind = CorrectionMode::TokenTruncate;
    let mut learner = tiny_learner(&config);
    let corrections = [correction(&[5, 6, 7], &[30, 31, 2]), correction(&[8, 9], &[40, 2])];
    let before = nll(&learner, &corrections);
    let mut metrics = Vec::new();
    for seed in 0..20 {
        let mut samples = recorded(&learner, seed);
        samples.extend(corrections.clone());
        let stats = learner.step(&samples, u64::MAX, 16).unwrap();
        assert_eq!((stats.skipped, stats.refused, stats.faded), (None, vec![], vec![]));
        assert_eq!(stats.metrics["samples"], 10.0);
        assert_eq!(stats.metrics["correction/samples"], 2.0);
        metrics.push(stats.metrics["correction/nll"]);
    }
    let after = nll(&learner, &corrections);
    assert!(after < before - 1.0 && metrics[19] < metrics[0] - 1.0, "{before} to {after}");
}

#[test]
fn a_step_of_corrections_alone_reports_their_likelihood() {
    let config = TrainConfig { correction_weight: 0.5, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let corrections = [correction(&[5, 6, 7], &[30, 31, 2]), correction(&[8, 9], &[40, 2])];
    let own = nll(&learner, &corrections);
    let stats = learner.step(&corrections, 1, 16).unwrap();
    assert!((stats.metrics["correction/nll"] - own).abs() < 1e-4);
    assert!((stats.metrics["loss"] - 0.5 * own).abs() < 1e-4);
    assert!(nll(&learner, &corrections) < own);
    for name in ["samples", "completion_length", "kl", "sampler_difference_mean"] {
        assert!(!stats.metrics.contains_key(name), "{name}");
    }
}

#[test]
fn without_a_weight_corrections_change_nothing() {
    let (mut learner, mut other) = (tiny_learner(&tiny_config()), tiny_learner(&tiny_config()));
    let mut samples = recorded(&learner, 3);
    other.step(&samples, 9, 16).unwrap();
    samples.push(correction(&[5, 6, 7], &[30, 31, 2]));
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert!(!stats.metrics.contains_key("correction/nll"));
    assert_eq!(bits(&learner), bits(&other));
    let stats = learner.step(&samples[10..], 9, 16).unwrap();
    assert!(stats.skipped.is_some(), "no sample is left");
}
