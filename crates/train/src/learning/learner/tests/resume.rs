//! Averages and eight-bit moments across checkpoints, and undoing of skipped steps.

use std::path::Path;

use serde_json::json;

use hone_model::adapter::LoraConfig;
use hone_model::testing::values;

use super::{batch, recorded};
use crate::config::{
    AverageConfig, AverageKind, CorrectionMode, OptimizerKind, PeakRate, Schedule, ScheduleKind,
    TrainConfig,
};
use crate::learning::checkpoint::step_dir;
use crate::learning::learner::{Learner, StepStats};
use crate::testing::{tiny_config, tiny_learner};

/// The bits of all values of the trained and of the served adapter.
fn bits(learner: &Learner) -> [Vec<u64>; 2] {
    [&learner.lora, learner.served()]
        .map(|lora| lora.tensors().unwrap())
        .map(|tensors| tensors.values().flat_map(values).map(f64::to_bits).collect())
}

/// Many features at once.
fn busy(average: TrainConfig) -> TrainConfig {
    TrainConfig {
        optimizer: OptimizerKind::AdamW8bit.into(),
        num_iterations: 2,
        micro_batch: 4,
        // Wide enough to quantize A and B of some modules.
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

fn resumes_exactly(config: &TrainConfig) -> StepStats {
    let dir = tempfile::tempdir().unwrap();
    let (mut uninterrupted, mut first) = (tiny_learner(config), tiny_learner(config));
    for step in 0..3 {
        uninterrupted.step(&batch(step), 9, 16).unwrap();
        first.step(&batch(step), 9, 16).unwrap();
    }
    let path = step_dir(dir.path(), 3);
    let extra = json!({"cursor": "0190", "seen": 3});
    first.save(&path, &extra).unwrap();
    drop(first);
    let mut second = tiny_learner(&TrainConfig { seed: 99, ..config.clone() });
    assert_eq!(second.load(&path).unwrap(), extra);
    assert_eq!((second.step_count(), bits(&second)), (3, bits(&uninterrupted)));
    let mut last = StepStats::default();
    for step in 3..6 {
        last = uninterrupted.step(&batch(step), 9, 16).unwrap();
        assert_eq!(last, second.step(&batch(step), 9, 16).unwrap());
    }
    assert_eq!(bits(&second), bits(&uninterrupted));
    last
}

fn ema(decay: f64) -> AverageConfig {
    AverageConfig { decay, ..AverageKind::Ema.into() }
}

#[test]
fn averages_and_eight_bit_moments_resume_exactly() {
    // Averaging starts before and after the checkpoint.
    let swa = |start| AverageConfig { start, ..AverageKind::Swa.into() };
    for average in [ema(0.7), swa(2), swa(5)] {
        resumes_exactly(&busy(TrainConfig { average, ..tiny_config() }));
    }
}

/// Adaptive coefficients, sampler correction, entropy quantile, dropout, warm-up, rate and weight decay.
#[test]
fn an_interrupted_run_continues_with_the_same_numbers() {
    let mut config = tiny_config();
    config.lora.dropout = 0.2;
    config.kl.target = 0.001;
    config.entropy.target = 9.0;
    config.sampler_correction.kind = CorrectionMode::SequenceMask;
    config.top_entropy_quantile = 0.8;
    let last = resumes_exactly(&TrainConfig {
        seed: 7,
        schedule: Schedule { steps: 20, ..ScheduleKind::Cosine.into() },
        warmup_steps: Some(2.0),
        weight_decay: 0.01,
        num_iterations: 2,
        micro_batch: 4,
        ..config
    });
    // Each step has two updates.
    assert!((last.metrics["entropy_coef"] - 0.01 * 6.0).abs() < 1e-12);
    assert!(last.metrics["beta"] != 0.1);
}

#[test]
fn the_average_is_served_scored_and_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&TrainConfig { average: ema(0.5), ..tiny_config() });
    let mut plain = tiny_learner(&tiny_config());
    let mut after = Vec::new();
    for step in 0..2 {
        learner.step(&batch(step), 9, 16).unwrap();
        plain.step(&batch(step), 9, 16).unwrap();
        after.push(plain.lora.tensors().unwrap());
    }
    // Training does not use the average.
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
    // A rollback starts a new average.
    learner.reset_to(Some(dir.path())).unwrap();
    assert_eq!(bits(&learner)[0], bits(&learner)[1]);
}

#[test]
fn samples_of_a_served_average_are_off_policy_and_not_refused() {
    let config = TrainConfig {
        average: ema(0.9),
        max_sampler_difference: 1e-4,
        learning_rate: PeakRate::Fixed(0.05),
        ..tiny_config()
    };
    let mut learner = tiny_learner(&config);
    for step in 0..4 {
        // Recorded as if sampled from the served average.
        let samples = recorded(&learner, step);
        let stats = learner.step(&samples, 1, 16).unwrap();
        assert_eq!((stats.refused.len(), stats.skipped), (0, None));
        // After one step the average equals the adapter, so samples are still compared.
        assert_eq!(stats.metrics.contains_key("sampler_difference_mean"), step < 2);
    }
}

fn saved(learner: &Learner, dir: &Path) -> Vec<Vec<u8>> {
    learner.save(dir, &json!(null)).unwrap();
    ["adapter.safetensors", "moments.safetensors", "average.safetensors", "state.json"]
        .map(|name| std::fs::read(dir.join(name)).unwrap())
        .to_vec()
}

#[test]
fn a_skipped_step_does_not_change_the_saved_state() {
    let dir = tempfile::tempdir().unwrap();
    let config = busy(TrainConfig { average: ema(0.9), ..tiny_config() });
    let mut learner = tiny_learner(&config);
    learner.step(&batch(1), 9, 16).unwrap();
    let before = saved(&learner, &step_dir(dir.path(), 1));
    let mut bad = batch(2);
    // The loss or its gradient overflows, whatever the ratios are.
    bad[3].advantage = f64::MAX;
    assert!(learner.step(&bad, 9, 16).unwrap().skipped.is_some());
    assert_eq!(saved(&learner, &step_dir(dir.path(), 2)), before);
}

#[test]
fn a_failing_iteration_undoes_the_earlier_ones() {
    let dir = tempfile::tempdir().unwrap();
    // The first update is finite, but so large that the second pass is not.
    let config = TrainConfig {
        num_iterations: 3,
        average: ema(0.9),
        learning_rate: PeakRate::Fixed(1e25),
        max_grad_norm: 0.0,
        ..tiny_config()
    };
    let mut learner = tiny_learner(&config);
    let step = |learner: &mut Learner, rate| {
        learner.set_peak_rate(rate);
        learner.step(&batch(1), 9, 16).unwrap().skipped
    };
    assert_eq!(step(&mut learner, 1e-3), None);
    let before = saved(&learner, &step_dir(dir.path(), 1));
    assert!(step(&mut learner, 1e25).is_some());
    assert_eq!(saved(&learner, &step_dir(dir.path(), 2)), before);
    // The same samples can still be trained on.
    assert_eq!(step(&mut learner, 1e-3), None);
}
