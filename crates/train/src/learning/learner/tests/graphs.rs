//! Whole steps by candle graphs, as on devices other than the CPU, against those of the fused kernels.

use hone_model::Model;
use hone_model::adapter::LoraConfig;
use hone_model::testing::{FAMILIES, graphs, randomize, values};

use super::batch;
use crate::config::{
    EntropyConfig, KlConfig, KlEstimator, LossKind, RatioLevel, Recompute, TrainConfig,
};
use crate::data::packing::TrainSample;
use crate::learning::learner::Learner;
use crate::testing::{family_model, record, tiny_config};

const LOSSES: [LossKind; 10] = [
    LossKind::Grpo,
    LossKind::DrGrpo,
    LossKind::Bnpo,
    LossKind::Dapo,
    LossKind::Cispo,
    LossKind::Sapo,
    LossKind::Luspo,
    LossKind::Gspo,
    LossKind::Reinforce,
    LossKind::Vespo,
];

const ESTIMATORS: [KlEstimator; 4] =
    [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Corrected];

/// Two updates a step, whose ratios differ from 1, and a reference. It follows the policy in half of the settings; others
/// have an adaptive KL coefficient, dropout, an entropy bonus or recompute all layers.
fn config(loss: LossKind, estimator: KlEstimator, variant: usize) -> TrainConfig {
    let is = |bit: usize| variant >> bit & 1 == 1;
    let level = match loss {
        LossKind::Luspo => RatioLevel::Sequence,
        _ => RatioLevel::default(),
    };
    TrainConfig {
        loss: loss.into(),
        kl: KlConfig {
            estimator,
            target: if is(1) { 0.001 } else { 0.0 },
            sync_steps: if is(3) { 0 } else { 2 },
            ..KlConfig::default()
        },
        num_iterations: 2,
        importance_sampling_level: level,
        entropy: EntropyConfig { coef: if is(0) { 0.1 } else { 0.0 }, ..EntropyConfig::default() },
        top_entropy_quantile: if is(1) { 0.7 } else { 1.0 },
        recompute: if is(2) { Recompute::Always } else { Recompute::Never },
        lora: LoraConfig { dropout: if is(1) { 0.2 } else { 0.0 }, ..tiny_config().lora },
        ..tiny_config()
    }
}

/// Pairs of completions of one prompt, a late one, a correction, and one with a masked token.
fn samples(learner: &Learner, seed: u64) -> Vec<TrainSample> {
    let mut samples = batch(seed);
    samples.truncate(6);
    let vocab = learner.spec().vocab_size as u32;
    for i in 0..samples.len() {
        samples[i].prompt_ids = samples[i - i % 2].prompt_ids.clone();
        let TrainSample { prompt_ids, ids, .. } = &mut samples[i];
        prompt_ids.iter_mut().chain(ids).for_each(|id| *id %= vocab);
    }
    record(learner, &mut samples, 0.3, seed);
    samples[1].masked = (0..samples[1].ids.len()).map(|i| i == 0).collect();
    samples[2].late = true;
    samples[5].correction = true;
    samples
}

/// The largest difference between the metrics and between the adapters of the two paths, over several steps.
fn difference(model: &Model, config: &TrainConfig, steps: u64) -> f64 {
    let mut learners = [model.clone(), graphs(model)].map(|model| {
        let learner = Learner::with_model(model, config).unwrap();
        randomize(&learner.lora, 2);
        learner
    });
    let mut largest = 0.0_f64;
    for step in 0..steps {
        let samples = samples(&learners[0], step);
        let [fused, graph] =
            learners.each_mut().map(|learner| learner.step(&samples, 1, 12).unwrap());
        assert_eq!((&fused.skipped, &fused.faded), (&None, &graph.faded));
        assert!(fused.metrics.keys().eq(graph.metrics.keys()));
        for (name, value) in &fused.metrics {
            let difference = (value - graph.metrics[name]).abs() / value.abs().max(1.0);
            assert!(difference < 1e-9, "{config:?}, step {step}: {name} differs by {difference:e}");
            largest = largest.max(difference);
        }
    }
    let [fused, graph] = learners.map(|learner| learner.lora.tensors().unwrap());
    let pairs = fused.values().flat_map(values).zip(graph.values().flat_map(values));
    let largest = pairs.fold(largest, |largest, (a, b)| largest.max((a - b).abs()));
    assert!(largest > 0.0, "both are the same path");
    largest
}

#[test]
fn steps_by_graphs_equal_fused_ones_for_every_family_loss_and_kl_estimator() {
    for (f, name) in FAMILIES.into_iter().enumerate() {
        let model = family_model(name);
        for (l, loss) in LOSSES.into_iter().enumerate() {
            for (k, estimator) in ESTIMATORS.into_iter().enumerate() {
                let config = config(loss, estimator, f + l + 2 * k);
                let difference = difference(&model, &config, 3);
                assert!(difference < 1e-9, "{name}, {config:?}: {difference:e}");
            }
        }
    }
}

#[test]
fn twenty_steps_by_graphs_equal_fused_ones_in_every_family() {
    for (i, name) in FAMILIES.into_iter().enumerate() {
        let config = config(LOSSES[i], ESTIMATORS[i % 4], i);
        let difference = difference(&family_model(name), &config, 20);
        assert!(difference < 1e-9, "{name}, {config:?}: {difference:e}");
    }
}
