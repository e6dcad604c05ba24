//! A model of hidden size 512, from which one shard at a time runs on all threads: gradients against
//! PyTorch, and steps that must not depend on threads, recomputation or the base's storage.

use std::collections::HashMap;
use std::sync::LazyLock;

use candle_core::{DType, Tensor};
use rayon::ThreadPoolBuilder;
use serde::Deserialize;
use serde_json::Value;

use hone_core::testing::skip_without;
use hone_model::adapter::LoraConfig;
use hone_model::kernels::compute::Compute;
use hone_model::testing::{test_file, values};
use hone_model::{Model, ModelSpec};

use super::bits;
use crate::config::{Recompute, TrainConfig};
use crate::data::packing::TrainSample;
use crate::learning::forward_backward::{ForwardBackward, LogprobCache, PassOutput};
use crate::learning::learner::Learner;
use crate::testing::{hashed, tiny_config, wide_tensor, wide_weights};

/// Written by `tests/reference/learning/make_wide_cases.py`.
#[derive(Deserialize)]
struct Case {
    config: Value,
    lora: LoraConfig,
    settings: TrainConfig,
    samples: Vec<Sample>,
    loss: f64,
    gradients: HashMap<String, Gradient>,
}

#[derive(Deserialize)]
struct Sample {
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    temperature: f32,
    advantage: f64,
    logprobs: Vec<f32>,
}

/// PyTorch's gradient of one tensor: its norm, its products with hashed directions, and values at
/// equal distances.
#[derive(Deserialize)]
struct Gradient {
    norm: f64,
    products: Vec<f64>,
    entries: Vec<f64>,
}

static CASE: LazyLock<Case> = LazyLock::new(|| {
    let text = std::fs::read(test_file("reference/learning/wide_cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
});

static SPEC: LazyLock<ModelSpec> = LazyLock::new(|| ModelSpec::from_config(&CASE.config).unwrap());

/// Matrices of the base in `storage`, and everything else in `dtype`.
fn weights(storage: DType, dtype: DType) -> HashMap<String, Tensor> {
    let convert = |(name, tensor): (String, Tensor)| {
        let dtype = if tensor.rank() == 2 { storage } else { dtype };
        (name, tensor.to_dtype(dtype).unwrap())
    };
    wide_weights(&SPEC).into_iter().map(convert).collect()
}

fn config() -> TrainConfig {
    let TrainConfig { loss, beta, clip_low, clip_high, .. } = CASE.settings;
    // Three samples a shard, so that a pass adds the gradients of several shards. The reference has no
    // dual clip.
    let lora = CASE.lora.clone();
    TrainConfig {
        loss,
        beta,
        clip_low,
        clip_high,
        dual_clip: 0.0,
        micro_batch: 3,
        lora,
        ..tiny_config()
    }
}

fn learner(weights: HashMap<String, Tensor>, config: &TrainConfig) -> Learner {
    let learner = Learner::with_model(Model::new(SPEC.clone(), weights).unwrap(), config).unwrap();
    for (name, var) in learner.lora.parameters() {
        var.set(&wide_tensor(&name, var.dims()).to_dtype(var.dtype()).unwrap()).unwrap();
    }
    learner
}

fn samples() -> Vec<TrainSample> {
    CASE.samples
        .iter()
        .map(|sample| TrainSample {
            prompt_ids: sample.prompt_ids.clone(),
            ids: sample.ids.clone(),
            logprobs: sample.logprobs.clone(),
            temperature: sample.temperature,
            advantage: sample.advantage,
            version: 1,
            ..TrainSample::default()
        })
        .collect()
}

fn pass(learner: &Learner) -> PassOutput {
    let samples = samples();
    let active: Vec<usize> = (0..samples.len()).collect();
    ForwardBackward {
        model: &learner.model,
        device: None,
        lora: &learner.lora,
        reference: None,
        config: &learner.config,
        samples: &samples,
        active: &active,
        adaptive: learner.adaptive,
        lengths: samples.iter().map(|sample| sample.ids.len()).collect(),
        max_completion_tokens: 30,
        longest_shard: 0,
        current_version: None,
        dropout_seed: 5,
        cache: &LogprobCache::default(),
    }
    .run()
    .unwrap()
}

#[test]
fn gradients_equal_those_of_transformers_and_peft() {
    // transformers computes norms, rotations and attention weights in f32, whatever the model's type.
    for (dtype, compute, tolerance) in [
        (DType::F64, Compute::F32, 2e-6),
        (DType::F32, Compute::F32, 1e-4),
        (DType::F32, Compute::Bf16, 3e-2),
    ] {
        let learner = learner(weights(dtype, dtype), &TrainConfig { compute, ..config() });
        if learner.model.compute() != compute {
            skip_without("fast products in bf16");
            continue;
        }
        let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let PassOutput { gradients, totals, .. } = pool.install(|| pass(&learner));
        assert!((totals.loss - CASE.loss).abs() < tolerance, "{} {}", totals.loss, CASE.loss);
        assert_eq!(gradients.len(), CASE.gradients.len());
        for (name, expected) in &CASE.gradients {
            let own = values(&gradients[name]);
            let check = |what: &str, own: f64, torch: f64, scale: f64| {
                let error = (own - torch).abs();
                assert!(error < tolerance * scale, "{name}, {what}: {own:e} against {torch:e}");
            };
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            check("norm", norm(&own), expected.norm, expected.norm);
            for (i, product) in expected.products.iter().enumerate() {
                let direction = hashed(&format!("direction {i}"), own.len());
                let dot = own.iter().zip(&direction).map(|(g, d)| g * d).sum();
                check("product", dot, *product, expected.norm * norm(&direction));
            }
            let distance = own.len() / expected.entries.len();
            for (i, entry) in expected.entries.iter().enumerate() {
                check("entry", own[i * distance], *entry, expected.norm);
            }
        }
    }
}

/// The bits of the loss and of the adapter after two steps.
fn stepped(weights: HashMap<String, Tensor>, config: &TrainConfig, threads: usize) -> Vec<u64> {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let mut learner = learner(weights, config);
        let start = bits(&learner);
        let mut results = Vec::new();
        for _ in 0..2 {
            let stats = learner.step(&samples(), 9, 30).unwrap();
            assert_eq!(stats.skipped, None);
            results.push(stats.metrics["loss"].to_bits());
        }
        let end = bits(&learner);
        assert!(start.iter().zip(&end).all(|(start, end)| start != end), "a value did not move");
        results.extend(end);
        results
    })
}

fn f32_weights() -> HashMap<String, Tensor> {
    weights(DType::F32, DType::F32)
}

/// Settings without and with dropout, and with products in bf16.
fn configs() -> [TrainConfig; 3] {
    let mut dropout = config();
    dropout.lora.dropout = 0.2;
    [config(), dropout, TrainConfig { compute: Compute::Bf16, ..config() }]
}

#[test]
fn steps_have_the_same_bits_on_any_number_of_threads() {
    for config in configs() {
        let one = stepped(f32_weights(), &config, 1);
        for threads in [2, 5] {
            assert!(stepped(f32_weights(), &config, threads) == one, "{threads} threads");
        }
    }
}

#[test]
fn steps_have_the_same_bits_with_recomputed_layers() {
    for config in configs() {
        let with =
            |recompute| stepped(f32_weights(), &TrainConfig { recompute, ..config.clone() }, 2);
        assert!(with(Recompute::Never) == with(Recompute::Always));
    }
}

#[test]
fn steps_over_a_16_bit_base_equal_those_over_its_values_in_32_bits() {
    for storage in [DType::BF16, DType::F16] {
        let half = weights(storage, DType::F32);
        let widened: HashMap<_, _> = half
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.to_dtype(DType::F32).unwrap()))
            .collect();
        let results = stepped(half, &config(), 2);
        assert!(results == stepped(widened, &config(), 2), "{storage:?}");
        assert!(results != stepped(f32_weights(), &config(), 2), "rounding changes the results");
    }
}
