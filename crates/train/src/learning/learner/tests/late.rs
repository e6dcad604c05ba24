//! Samples that are older than `train.max_staleness`, with late feedback.

use super::{TrainSample, assert_near, recorded};
use crate::config::{CorrectionMode, TrainConfig};
use crate::testing::{tiny_config, tiny_learner};

/// Makes a sample late, whose log-probabilities have changed by `change` each since sampling.
fn age(sample: &mut TrainSample, change: f32) {
    sample.late = true;
    sample.logprobs.iter_mut().for_each(|logprob| *logprob -= change);
}

#[test]
fn a_late_sample_counts_by_the_truncated_weight_of_its_sequence() {
    for mode in [CorrectionMode::None, CorrectionMode::TokenTruncate] {
        let mut config = TrainConfig { num_iterations: 2, ..tiny_config() };
        config.sampler_correction.kind = mode;
        let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&config));
        let mut samples = recorded(&learner, 3);
        let mut scaled = samples.clone();
        assert_eq!((samples[2].ids.len(), samples[4].ids.len()), (4, 7));
        // One has become less probable; the other is more probable, which counts no more.
        age(&mut samples[2], -0.5);
        age(&mut samples[4], 0.5);
        scaled[2].advantage *= (-2.0_f64).exp();
        let stats = learner.step(&samples, 9, 16).unwrap();
        assert_eq!((stats.skipped, stats.faded), (None, Vec::new()));
        other.step(&scaled, 9, 16).unwrap();
        assert_near(&learner, &other);
    }
}

#[test]
fn a_sample_far_from_the_policy_is_left_out() {
    let (mut learner, mut other) = (tiny_learner(&tiny_config()), tiny_learner(&tiny_config()));
    let mut samples = recorded(&learner, 3);
    age(&mut samples[2], -2.0);
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded, stats.refused), (vec![2], Vec::new()));
    assert_eq!(stats.metrics["samples"], 9.0);
    // The result is the same as without the sample, normalizer included.
    samples.remove(2);
    other.step(&samples, 9, 16).unwrap();
    assert_near(&learner, &other);
    // Without any sample left the step is skipped.
    for sample in &mut samples {
        age(sample, -20.0);
    }
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded.len(), stats.skipped.is_some()), (9, true));
}
