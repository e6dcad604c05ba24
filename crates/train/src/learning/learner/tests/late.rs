//! Samples that are older than `train.max_staleness`, with late feedback.

use hone_model::testing::values;

use super::{Learner, TrainSample, batch};
use crate::config::{CorrectionMode, TrainConfig};
use crate::testing::{record, tiny_config, tiny_learner};

/// Samples as recorded by the learner's own policy.
fn recorded(learner: &Learner) -> Vec<TrainSample> {
    let mut samples = batch(3);
    record(learner, &mut samples, 0.0, 0);
    samples
}

/// Makes a sample late, whose log-probabilities have changed by `change` each since sampling.
fn age(sample: &mut TrainSample, change: f32) {
    sample.late = true;
    sample.logprobs.iter_mut().for_each(|logprob| *logprob -= change);
}

fn assert_equal(a: &Learner, b: &Learner) {
    let (a, b) = (a.lora.tensors().unwrap(), b.lora.tensors().unwrap());
    for (a, b) in a.values().zip(b.values()) {
        for (a, b) in values(a).iter().zip(values(b)) {
            assert!((a - b).abs() < 1e-4, "{a} against {b}");
        }
    }
}

#[test]
fn a_late_sample_counts_by_the_truncated_weight_of_its_sequence() {
    for mode in [CorrectionMode::None, CorrectionMode::TokenTruncate] {
        let mut config = TrainConfig { num_iterations: 2, ..tiny_config() };
        config.sampler_correction.mode = mode;
        let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&config));
        let mut samples = recorded(&learner);
        let mut scaled = samples.clone();
        assert_eq!((samples[2].ids.len(), samples[4].ids.len()), (4, 7));
        // One has become less probable; the other is more probable, which counts no more.
        age(&mut samples[2], -0.5);
        age(&mut samples[4], 0.5);
        scaled[2].advantage *= (-2.0_f64).exp();
        let stats = learner.step(&samples, 9, 16).unwrap();
        assert_eq!((stats.skipped, stats.faded), (None, Vec::new()));
        other.step(&scaled, 9, 16).unwrap();
        assert_equal(&learner, &other);
    }
}

#[test]
fn a_sample_far_from_the_policy_is_left_out() {
    let (mut learner, mut other) = (tiny_learner(&tiny_config()), tiny_learner(&tiny_config()));
    let mut samples = recorded(&learner);
    age(&mut samples[2], -2.0);
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded, stats.refused), (vec![2], Vec::new()));
    assert_eq!(stats.metrics["samples"], 9.0);
    // The result is the same as without the sample, normalizer included.
    samples.remove(2);
    other.step(&samples, 9, 16).unwrap();
    assert_equal(&learner, &other);
    // Without any sample left the step is skipped.
    for sample in &mut samples {
        age(sample, -20.0);
    }
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded.len(), stats.skipped.is_some()), (9, true));
}
