//! Averages, eight-bit moments and bad steps: what a learner keeps, serves and undoes.

use std::path::Path;

use serde_json::json;

use hone_model::adapter::LoraConfig;
use hone_model::testing::values;

use super::Learner;
use crate::config::{OptimizerKind, TrainConfig};
use crate::data::packing::TrainSample;
use crate::learning::checkpoint::step_dir;
use crate::testing::{random_samples, record, tiny_config, tiny_learner};

fn batch(seed: u64) -> Vec<TrainSample> {
    random_samples(10, seed)
}

/// All bits of what is trained and of what is served.
fn bits(learner: &Learner) -> [Vec<u64>; 2] {
    [learner.adapter().unwrap(), learner.served().tensors().unwrap()]
        .map(|tensors| tensors.values().flat_map(values).map(f64::to_bits).collect())
}

/// Everything on at once.
fn busy(average: TrainConfig) -> TrainConfig {
    TrainConfig {
        optimizer: OptimizerKind::AdamW8bit,
        num_iterations: 2,
        micro_batch: 4,
        // Wide enough for A and B of some modules to be kept in eight bits.
        lora: LoraConfig {
            r: 140,
            alpha: 8.0,
            dropout: 0.2,
            use_rslora: true,
            ..average.lora.clone()
        },
        ..average
    }
}

fn goes_on_exactly(config: &TrainConfig) {
    let dir = tempfile::tempdir().unwrap();
    let (mut whole, mut first) = (tiny_learner(config), tiny_learner(config));
    for step in 0..3 {
        whole.step(&batch(step), 9, 16).unwrap();
        first.step(&batch(step), 9, 16).unwrap();
    }
    let path = step_dir(dir.path(), 3);
    first.save(&path, &json!(1)).unwrap();
    let mut second = tiny_learner(&TrainConfig { seed: 99, ..config.clone() });
    second.load(&path).unwrap();
    assert_eq!(bits(&second), bits(&whole));
    for step in 3..6 {
        assert_eq!(
            whole.step(&batch(step), 9, 16).unwrap(),
            second.step(&batch(step), 9, 16).unwrap()
        );
    }
    assert_eq!(bits(&second), bits(&whole));
    assert_eq!(second.optimizer_bytes(), whole.optimizer_bytes());
}

#[test]
fn averages_and_eight_bit_moments_go_on_exactly() {
    goes_on_exactly(&busy(TrainConfig { ema_decay: 0.7, ..tiny_config() }));
    // Averaging begins before the checkpoint, and after it.
    goes_on_exactly(&busy(TrainConfig { swa_start: 2, ..tiny_config() }));
    goes_on_exactly(&busy(TrainConfig { swa_start: 5, ..tiny_config() }));
}

#[test]
fn eight_bits_take_about_a_quarter() {
    let config = busy(tiny_config());
    let bytes = |config: &TrainConfig| {
        let mut learner = tiny_learner(config);
        learner.step(&batch(1), 9, 16).unwrap();
        learner.optimizer_bytes()
    };
    let whole = bytes(&TrainConfig { optimizer: OptimizerKind::AdamW, ..config.clone() });
    let eight = bytes(&config);
    assert!(eight * 3 < whole, "{eight} of {whole}");
}

#[test]
fn the_average_is_what_is_served_scored_and_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&TrainConfig { ema_decay: 0.5, ..tiny_config() });
    let mut plain = tiny_learner(&tiny_config());
    let mut after = Vec::new();
    for step in 0..2 {
        learner.step(&batch(step), 9, 16).unwrap();
        plain.step(&batch(step), 9, 16).unwrap();
        after.push(plain.adapter().unwrap());
    }
    // Training does not see the average.
    assert_eq!(bits(&learner)[0], bits(&plain)[0]);
    for (name, average) in learner.served().tensors().unwrap() {
        let [one, two] = [&after[0], &after[1]].map(|t| values(&t[&name]));
        for (own, (one, two)) in values(&average).iter().zip(one.iter().zip(two)) {
            assert!((own - (one + two) / 2.0).abs() < 1e-7, "{name}");
        }
    }
    learner.snapshot().unwrap().write(dir.path(), "tiny").unwrap();
    let mut served = tiny_learner(&tiny_config());
    served.reset_to(Some(dir.path())).unwrap();
    let score =
        |learner: &Learner| learner.snapshot().unwrap().score(&[5, 6], &[7, 8, 9], 1.0).unwrap();
    assert_eq!(score(&learner), score(&served));
    assert_ne!(score(&learner), score(&plain));
    // A roll-back starts a new average.
    learner.reset_to(Some(dir.path())).unwrap();
    assert_eq!(bits(&learner)[0], bits(&learner)[1]);
}

#[test]
fn averaged_samples_are_off_policy_and_not_refused() {
    let config = TrainConfig {
        ema_decay: 0.9,
        max_sampler_difference: 1e-4,
        learning_rate: 0.05,
        ..tiny_config()
    };
    let mut learner = tiny_learner(&config);
    for step in 0..4 {
        let mut samples = batch(step);
        // As the served average would have drawn them.
        record(&learner, &mut samples, 0.0, 0);
        let stats = learner.step(&samples, 1, 16).unwrap();
        assert_eq!((stats.refused.len(), stats.skipped), (0, None));
        // After one step the average is the adapter: the comparison still holds then.
        assert_eq!(stats.metrics.contains_key("sampler_difference_mean"), step < 2);
    }
}

/// A sample whose loss is not finite.
fn spoil(samples: &mut [TrainSample]) {
    samples[3].logprobs[0] = -1e30;
    samples[3].advantage = -1.0;
}

fn saved(learner: &Learner, dir: &Path) -> Vec<Vec<u8>> {
    learner.save(dir, &json!(null)).unwrap();
    ["adapter.safetensors", "moments.safetensors", "average.safetensors", "state.json"]
        .map(|name| std::fs::read(dir.join(name)).unwrap())
        .to_vec()
}

#[test]
fn a_bad_step_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let config = busy(TrainConfig { ema_decay: 0.9, ..tiny_config() });
    let mut learner = tiny_learner(&config);
    learner.step(&batch(1), 9, 16).unwrap();
    let before = saved(&learner, &step_dir(dir.path(), 1));
    let mut bad = batch(2);
    spoil(&mut bad);
    assert!(learner.step(&bad, 9, 16).unwrap().skipped.is_some());
    assert_eq!(saved(&learner, &step_dir(dir.path(), 2)), before);
}

#[test]
fn an_iteration_that_fails_takes_the_ones_before_it_along() {
    let dir = tempfile::tempdir().unwrap();
    // The first update is finite, but so large that the second pass is not.
    let config = TrainConfig {
        num_iterations: 3,
        ema_decay: 0.9,
        learning_rate: 1e25,
        max_grad_norm: 0.0,
        ..tiny_config()
    };
    let mut learner = tiny_learner(&config);
    let calm = |learner: &mut Learner, rate| {
        learner.set_peak_rate(rate);
        learner.step(&batch(1), 9, 16).unwrap().skipped
    };
    assert_eq!(calm(&mut learner, 1e-3), None);
    let before = saved(&learner, &step_dir(dir.path(), 1));
    assert!(calm(&mut learner, 1e25).is_some());
    assert_eq!(saved(&learner, &step_dir(dir.path(), 2)), before);
    // And the same samples can still be learnt from.
    assert_eq!(calm(&mut learner, 1e-3), None);
}
