//! Gradients of the whole loss against finite differences, and against other layouts of the step.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use candle_core::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use hone_model::Model;
use hone_model::adapter::weights::LoraWeights;
use hone_model::kernels::parallel::threads;
use hone_model::testing::{
    FAMILIES, randomize, relative_difference, tiny_model, token_stats, values,
};

use super::{ForwardBackward, LogprobCache, PassOutput};
use crate::config::{
    CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig, KlEstimator, Loss, LossKind,
    RatioLevel, TrainConfig,
};
use crate::data::packing::{PackedBatch, ShardLimits, TrainSample, shards};
use crate::learning::map_shards;
use crate::learning::objective::AdaptiveCoefficients;
use crate::memory;
use crate::testing::{family_model, random_samples, tiny_config, wide_weights};

fn setup(dtype: DType, config: &TrainConfig) -> (Model, LoraWeights) {
    let model = tiny_model(dtype);
    let lora = random_lora(&model, config);
    (model, lora)
}

fn random_lora(model: &Model, config: &TrainConfig) -> LoraWeights {
    let (mut rng, dtype) = (ChaCha8Rng::seed_from_u64(1), model.dtype());
    let lora =
        LoraWeights::fresh(model.spec(), &config.lora, &mut rng, dtype, model.device()).unwrap();
    randomize(&lora, 2);
    lora
}

fn run(
    model: &Model,
    lora: &LoraWeights,
    config: &TrainConfig,
    samples: &[TrainSample],
) -> PassOutput {
    run_with(model, lora, config, samples, &LogprobCache::default())
}

fn run_with(
    model: &Model,
    lora: &LoraWeights,
    config: &TrainConfig,
    samples: &[TrainSample],
    cache: &LogprobCache,
) -> PassOutput {
    let active: Vec<usize> = (0..samples.len()).collect();
    let lengths = samples.iter().map(|s| s.ids.len()).collect();
    let pass = pass(model, lora, config, samples, &active, cache);
    ForwardBackward { lengths, ..pass }.run().unwrap()
}

/// A pass in which all samples are left out of the loss.
fn pass<'a>(
    model: &'a Model,
    lora: &'a LoraWeights,
    config: &'a TrainConfig,
    samples: &'a [TrainSample],
    active: &'a [usize],
    cache: &'a LogprobCache,
) -> ForwardBackward<'a> {
    ForwardBackward {
        model,
        device: None,
        lora,
        reference: None,
        config,
        samples,
        active,
        adaptive: AdaptiveCoefficients::new(config),
        lengths: vec![0; samples.len()],
        max_completion_tokens: 12,
        longest_shard: 0,
        current_version: None,
        dropout_seed: 5,
        cache,
    }
}

/// Samples whose recorded log-probabilities are near the policy's, so that some ratios are within
/// the bounds and some are cut on either side.
fn near_samples(model: &Model, lora: &LoraWeights, count: usize) -> Vec<TrainSample> {
    let mut samples = random_samples(count, 3);
    for (i, sample) in samples.iter_mut().enumerate() {
        let parts = [(sample.prompt_ids.as_slice(), sample.ids.as_slice(), sample.temperature)];
        let layout = PackedBatch::new(&parts, model.device()).unwrap();
        let hidden = model.hidden(&layout.ids, &layout.segments, Some(lora), None).unwrap();
        let logits = model.logits(&hidden.index_select(&layout.rows, 0).unwrap()).unwrap();
        let stats = token_stats(&logits, &layout.targets, &layout.temperatures);
        for (t, own) in values(&stats.narrow(1, 0, 1).unwrap()).into_iter().enumerate() {
            let shift = [0.05, -0.11, 0.5, -0.4][(i + t) % 4];
            sample.logprobs[t] = (own + shift) as f32;
        }
    }
    samples
}

fn check_gradients(config: &TrainConfig, dtype: DType, step: f64, tolerance: f64) {
    check_gradients_of(config, dtype, step, tolerance, |_| {});
}

/// Compares the gradient with central differences for every tensor of the adapter, in one random
/// direction and for single entries.
fn check_gradients_of(
    config: &TrainConfig,
    dtype: DType,
    step: f64,
    tolerance: f64,
    change: impl Fn(&mut TrainSample),
) {
    let (model, lora) = setup(dtype, config);
    let mut samples = near_samples(&model, &lora, 6);
    samples.iter_mut().for_each(change);
    let output = run(&model, &lora, config, &samples);
    // As in later iterations of a step, the log-probabilities from before the first update are
    // constants.
    let cache = LogprobCache { old: output.logprobs.old, ..LogprobCache::default() };
    let loss = || run_with(&model, &lora, config, &samples, &cache).totals.loss;
    let scale = output.gradients.values().flat_map(values).fold(0.0_f64, |max, g| max.max(g.abs()));
    let mut checked = 0;
    for (name, var) in lora.parameters() {
        let start = var.as_detached_tensor().copy().unwrap();
        let gradient = values(&output.gradients[&name]);
        assert!(gradient.iter().any(|g| g.abs() > 1e-6 * scale), "{name} has no gradient");
        let count = gradient.len();
        let mut directions: Vec<Vec<f64>> = Vec::new();
        directions.push((0..count).map(|i| ((i * 37 + 11) as f64).sin()).collect());
        for entry in [0, count / 3, count / 2, count - 1] {
            directions.push((0..count).map(|i| f64::from(u8::from(i == entry))).collect());
        }
        for direction in directions {
            let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let length = direction.iter().map(|d| d * d).sum::<f64>().sqrt();
            let shifted = |sign: f64| {
                let shift: Vec<f64> = direction.iter().map(|d| sign * step / length * d).collect();
                let shift = Tensor::from_vec(shift, start.shape(), start.device()).unwrap();
                var.set(&(&start + shift.to_dtype(dtype).unwrap()).unwrap()).unwrap();
                loss()
            };
            let measured = (shifted(1.0) - shifted(-1.0)) / (2.0 * step) * length;
            let error = (measured - expected).abs();
            assert!(
                error <= tolerance * (scale + expected.abs()) * length,
                "{name}: gradient {expected:e}, finite difference {measured:e}"
            );
            checked += 1;
        }
        var.set(&start).unwrap();
    }
    assert_eq!(checked, 2 * 7 * 2 * 5);
}

#[test]
fn gradients_of_every_adapter_tensor_equal_finite_differences() {
    for loss in [LossKind::Grpo, LossKind::DrGrpo, LossKind::Dapo] {
        let config = TrainConfig { loss: loss.into(), ..tiny_config() };
        check_gradients(&config, DType::F64, 1e-5, 1e-7);
    }
}

/// One setting for each term of the loss that the others do not reach.
fn other_losses() -> Vec<TrainConfig> {
    let config = tiny_config();
    let with = |loss: LossKind| TrainConfig { loss: loss.into(), ..config.clone() };
    let kl = |estimator| KlConfig { estimator, ..KlConfig::default() };
    let correction = |kind| CorrectionConfig { kind, clip_min: 0.7, clip_max: 1.5 };
    let sapo = Loss { tau_neg: 2.0, ..LossKind::Sapo.into() };
    vec![
        TrainConfig {
            entropy: EntropyConfig { coef: 0.3, ..EntropyConfig::default() },
            ..with(LossKind::Bnpo)
        },
        TrainConfig { kl: kl(KlEstimator::Corrected), ..with(LossKind::Gspo) },
        TrainConfig { importance_sampling_level: RatioLevel::Sequence, ..with(LossKind::Luspo) },
        TrainConfig { kl: kl(KlEstimator::K2), loss: sapo, ..with(LossKind::Sapo) },
        TrainConfig { kl: kl(KlEstimator::K1), ..with(LossKind::Reinforce) },
        TrainConfig { delta: 1.4, kl: kl(KlEstimator::Corrected), ..with(LossKind::Dapo) },
        TrainConfig { dual_clip: 1.4, off_policy_mask_threshold: 0.02, ..with(LossKind::Grpo) },
        TrainConfig {
            top_entropy_quantile: 0.4,
            entropy: EntropyConfig { coef: 0.3, ..EntropyConfig::default() },
            ..with(LossKind::Dapo)
        },
        TrainConfig {
            sampler_correction: correction(CorrectionMode::SequenceTruncate),
            ..with(LossKind::Dapo)
        },
        TrainConfig {
            sampler_correction: correction(CorrectionMode::TokenMask),
            ..with(LossKind::Sapo)
        },
    ]
}

#[test]
fn gradients_of_every_other_loss_equal_finite_differences() {
    for config in other_losses() {
        check_gradients(&config, DType::F64, 1e-5, 1e-6);
    }
    // cispo treats the ratio as a constant. With all ratios above the bound 1 + 0 it is one.
    let config = TrainConfig { loss: LossKind::Cispo.into(), clip_high: 0.0, ..tiny_config() };
    let below = |sample: &mut TrainSample| sample.logprobs.iter_mut().for_each(|l| *l -= 1.0);
    check_gradients_of(&config, DType::F64, 1e-5, 1e-6, below);
}

#[test]
fn gradients_in_single_precision_equal_finite_differences() {
    check_gradients(&tiny_config(), DType::F32, 1e-2, 2e-2);
}

#[test]
fn gradients_with_dropout_equal_finite_differences() {
    // Passes with the same seed have the same dropout masks.
    let mut config = tiny_config();
    config.lora.dropout = 0.3;
    check_gradients(&config, DType::F64, 1e-5, 1e-7);
}

#[test]
fn the_test_batch_reaches_every_branch_of_the_loss() {
    let config = tiny_config();
    let (model, lora) = setup(DType::F32, &config);
    let samples = near_samples(&model, &lora, 6);
    let mut metrics = std::collections::BTreeMap::new();
    run(&model, &lora, &config, &samples).totals.insert_metrics(&config, &mut metrics);
    for name in ["clip_low", "clip_high"] {
        assert!(metrics[name] > 0.0 && metrics[name] < 0.6, "{name} is {}", metrics[name]);
    }
    assert!(metrics["kl"] > 0.01);
}

/// The largest relative change of the gradient between several micro-batch sizes.
fn micro_batch_difference(dtype: DType, config: &TrainConfig) -> f64 {
    let (model, lora) = setup(dtype, config);
    let samples = near_samples(&model, &lora, 24);
    let whole = run(&model, &lora, config, &samples);
    [1, 3, 7, 16].into_iter().fold(0.0, |max: f64, micro_batch| {
        let config = TrainConfig { micro_batch, ..config.clone() };
        let parts = run(&model, &lora, &config, &samples);
        assert!((whole.totals.loss - parts.totals.loss).abs() < 1e-6);
        max.max(relative_difference(&whole.gradients, &parts.gradients))
    })
}

#[test]
fn micro_batches_do_not_change_the_gradient() {
    for loss in [LossKind::Grpo, LossKind::DrGrpo, LossKind::Dapo] {
        let config = TrainConfig { loss: loss.into(), ..tiny_config() };
        let exact = micro_batch_difference(DType::F64, &config);
        assert!(exact < 1e-12, "{loss:?}: {exact:e}");
        // In single precision the difference is rounding.
        let rounded = micro_batch_difference(DType::F32, &config);
        assert!(rounded < 5e-6, "{loss:?}: {rounded:e}");
    }
    for config in other_losses() {
        let exact = micro_batch_difference(DType::F64, &config);
        assert!(exact < 1e-12, "{:?}: {exact:e}", config.loss);
    }
}

#[test]
fn order_and_samples_of_weight_zero_do_not_change_the_gradient() {
    let config = tiny_config();
    let (model, lora) = setup(DType::F32, &config);
    let samples = near_samples(&model, &lora, 9);
    let before = run(&model, &lora, &config, &samples);
    let mut reversed = samples.clone();
    reversed.reverse();
    let after = run(&model, &lora, &config, &reversed);
    assert!(relative_difference(&before.gradients, &after.gradients) < 5e-6);
    // A long sample of weight 0 does not change it either.
    let mut padded = samples.clone();
    let mut long = samples[0].clone();
    long.prompt_ids = vec![7; 60];
    padded.push(long);
    let lengths: Vec<usize> = samples.iter().map(|s| s.ids.len()).chain([0]).collect();
    let active: Vec<usize> = (0..padded.len()).collect();
    let cache = LogprobCache::default();
    let pass = pass(&model, &lora, &config, &padded, &active, &cache);
    let output = ForwardBackward { lengths, ..pass }.run().unwrap();
    assert!(relative_difference(&before.gradients, &output.gradients) < 5e-6);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let config = tiny_config();
    let (model, lora) = setup(DType::F32, &config);
    let samples = near_samples(&model, &lora, 24);
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&model, &lora, &config, &samples))
    };
    let (one, three) = (with(1), with(3));
    assert_eq!(one.totals.loss.to_bits(), three.totals.loss.to_bits());
    for (name, gradient) in &one.gradients {
        assert_eq!(values(gradient), values(&three.gradients[name]), "{name}");
    }
}

#[test]
fn shared_and_repeated_prompts_have_equal_results() {
    let config = tiny_config();
    let (model, lora) = setup(DType::F64, &config);
    let samples = random_samples(7, 4);
    // Two prompts, interleaved; a completion of one token has an empty segment.
    let parts: Vec<_> = samples
        .iter()
        .enumerate()
        .map(|(i, s)| (samples[i % 2].prompt_ids.as_slice(), s.ids.as_slice(), s.temperature))
        .collect();
    assert!(parts.iter().any(|part| part.1.len() == 1));
    compare_with_unshared(&model, &lora, &parts);
}

#[test]
fn a_conversation_is_one_sequence_with_equal_results() {
    let config = tiny_config();
    let (model, lora) = setup(DType::F64, &config);
    let mut samples = random_samples(5, 4);
    // Three turns, the last one with two answers, and another answer to the first prompt.
    for i in 1..3 {
        let before = &samples[i - 1];
        let prompt = [&before.prompt_ids[..], &before.ids, &[3, 1]].concat();
        samples[i].prompt_ids = prompt;
    }
    samples[3].prompt_ids = samples[2].prompt_ids.clone();
    samples[4].prompt_ids = samples[0].prompt_ids.clone();
    samples[4].ids[0] = u32::from(samples[0].ids[0] == 0);
    let of = |s: &'_ TrainSample| (s.prompt_ids.clone(), s.ids.clone(), s.temperature);
    let owned: Vec<_> = samples.iter().map(of).collect();
    let parts: Vec<_> = owned.iter().map(|(p, ids, t)| (&p[..], &ids[..], *t)).collect();
    let layout = PackedBatch::new(&parts, model.device()).unwrap();
    let last = samples[2].prompt_ids.len() + samples[2].ids.len() + samples[3].ids.len() - 2;
    let other = samples[4].ids.len() - 1;
    assert_eq!(layout.segments.tokens(), last + other);
    compare_with_unshared(&model, &lora, &parts);
}

/// Samples of two graded groups and three rated answers, whose prompts begin with the same system prompt, and
/// some of them with the same examples. A rated answer goes on from a completion of the first group.
fn tree_samples() -> Vec<TrainSample> {
    let mut samples = random_samples(8, 6);
    let ids = |first: u32, len: u32| (0..len).map(|i| (first + i * 13) % 90).collect::<Vec<_>>();
    let (system, examples) = (ids(1, 19), [ids(2, 8), ids(5, 6)]);
    let prompt = |example: usize, own: &[u32]| [&system[..], &examples[example], own].concat();
    for (i, sample) in samples.iter_mut().enumerate() {
        sample.prompt_ids = match i {
            0 | 3 | 5 => prompt(0, &ids(70, 4)),
            1 | 4 => prompt(1, &ids(71, 9)),
            2 => prompt(0, &ids(72, 5)),
            _ => prompt(1, &ids(73, 2)),
        };
        sample.ids = ids(i as u32 * 17, 3 + i as u32 % 4);
    }
    // Completions with the same first tokens, and equal ones.
    samples[3].ids = [&samples[0].ids[..2], &[80, 81, 82]].concat();
    samples[4].ids = samples[1].ids.clone();
    samples[7].prompt_ids = [&samples[5].prompt_ids[..], &samples[5].ids, &[7, 8]].concat();
    for sample in &mut samples {
        sample.logprobs = sample.ids.iter().map(|id| -3.0 - *id as f32 / 90.0).collect();
    }
    samples
}

#[test]
fn a_tree_of_prompts_has_equal_results_in_every_family() {
    let config = tiny_config();
    let alone = TrainConfig { micro_batch: 1, ..config.clone() };
    let samples = tree_samples();
    let of = |s: &'_ TrainSample| (s.prompt_ids.clone(), s.ids.clone(), s.temperature);
    let owned: Vec<_> = samples.iter().map(of).collect();
    let parts: Vec<_> = owned.iter().map(|(p, ids, t)| (&p[..], &ids[..], *t)).collect();
    for name in FAMILIES {
        let model = family_model(name);
        let lora = random_lora(&model, &config);
        compare_with_unshared(&model, &lora, &parts);
        // The whole pass, with the reference.
        let shared = run(&model, &lora, &config, &samples);
        let separate = run(&model, &lora, &alone, &samples);
        // The system prompt, both examples, the rests of prompts, and what only one completion has.
        let tokens = 19 + (8 + 6) + (4 + 9 + 5 + 2) + (2 + 3 + 4 + 2 + 3 + 4 + 8);
        assert_eq!(shared.totals.computed_tokens, f64::from(tokens), "{name}");
        let all: usize = samples.iter().map(|s| s.prompt_ids.len() + s.ids.len() - 1).sum();
        assert_eq!(separate.totals.computed_tokens, all as f64);
        assert!((shared.totals.loss - separate.totals.loss).abs() < 1e-12, "{name}");
        let difference = relative_difference(&shared.gradients, &separate.gradients);
        assert!(difference < 1e-11, "{name}: {difference:e}");
        for (index, logprobs) in &shared.logprobs.reference {
            let other = &separate.logprobs.reference[index];
            assert!(logprobs.iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-11), "{name}");
        }
        assert_eq!(shared.logprobs.reference.len(), samples.len());
    }
}

/// Compares statistics and gradients of completions that share their prompts with those that do not.
fn compare_with_unshared(model: &Model, lora: &LoraWeights, parts: &[(&[u32], &[u32], f32)]) {
    let run = |layout: &PackedBatch| {
        let saved = model.forward_saving(&layout.ids, &layout.segments, lora, None, 2).unwrap();
        let (targets, temperatures) = (&layout.targets, &layout.temperatures);
        let stats = model.stats(saved.hidden(), &layout.rows, targets, temperatures).unwrap();
        let probe: Vec<f64> = (0..stats.elem_count()).map(|i| (i as f64 * 0.7).sin()).collect();
        let probe = Tensor::from_vec(probe, stats.shape(), model.device()).unwrap();
        let gradients = model.backward(saved, &stats, &probe, lora).unwrap();
        (values(&stats), gradients)
    };
    let shared = PackedBatch::new(parts, model.device()).unwrap();
    let repeated = PackedBatch::unshared(parts, model.device()).unwrap();
    assert!(shared.segments.tokens() < repeated.segments.tokens());
    let (a, b) = (run(&shared), run(&repeated));
    for (x, y) in a.0.iter().zip(&b.0) {
        assert!((x - y).abs() < 1e-12);
    }
    assert!(relative_difference(&a.1, &b.1) < 1e-12);
}

#[test]
fn shards_of_a_narrow_model_run_in_parallel_and_those_of_a_wide_one_on_all_threads() {
    let samples = random_samples(60, 8);
    let active: Vec<usize> = (0..samples.len()).collect();
    let mut spec = tiny_model(DType::F32).spec().clone();
    spec.hidden_size = 512;
    let wide = Model::new(spec.clone(), wide_weights(&spec)).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for (model, is_wide) in [(tiny_model(DType::F32), false), (wide, true)] {
        let max_tokens = memory::shard_tokens(model.spec());
        let limits = ShardLimits { target: max_tokens, longest: max_tokens };
        let parts = shards(&samples, &active, 64, limits).remove(0);
        assert_eq!(parts.len() == 1, is_wide);
        // Each shard waits for the other one, which starts in time only if they run in parallel.
        let started = (Mutex::new(0), Condvar::new());
        let limit = Duration::from_millis(if is_wide { 100 } else { 60_000 });
        let shard = |_: &i32| {
            let mut count = started.0.lock().unwrap();
            *count += 1;
            started.1.notify_all();
            let alone = |count: &mut i32| *count == 1;
            let waited = started.1.wait_timeout_while(count, limit, alone).unwrap().1;
            (threads(), waited.timed_out())
        };
        let results = pool.install(|| map_shards(model.spec(), &[0, 1], shard));
        let expected = if is_wide { [(2, true), (2, false)] } else { [(1, false); 2] };
        assert_eq!(results, expected);
    }
}
