//! What the tests of this module share.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use super::batch::TrainSample;
use super::learner::Learner;
use super::lora::Lora;
use super::model::{Model, ModelSpec};
use crate::config::{LoraConfig, TrainConfig};

/// A file under `tests/`.
pub(super) fn test_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// The shape of `tests/fixtures/qwen2-tiny`.
pub(super) fn tiny_spec() -> ModelSpec {
    let text = std::fs::read(test_file("fixtures/qwen2-tiny/config.json")).unwrap();
    ModelSpec::from_config(&serde_json::from_slice::<Value>(&text).unwrap()).unwrap()
}

/// The tiny model's weights.
pub(super) fn tiny_weights(dtype: DType) -> HashMap<String, Tensor> {
    let path = test_file("fixtures/qwen2-tiny/model.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu)
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| (name, tensor.to_dtype(dtype).unwrap()))
        .collect()
}

/// The tiny model.
pub(super) fn tiny_model(dtype: DType) -> Model {
    Model::new(tiny_spec(), tiny_weights(dtype)).unwrap()
}

/// Settings that train all seven linears with rank 2 and use every term of the loss.
pub(super) fn tiny_config() -> TrainConfig {
    TrainConfig {
        learning_rate: 1e-2,
        beta: 0.1,
        micro_batch: 64,
        max_sampler_difference: 0.0,
        lora: LoraConfig { r: 2, alpha: 4.0, ..LoraConfig::default() },
        ..TrainConfig::default()
    }
}

/// A learner over the tiny model.
pub(super) fn tiny_learner(config: &TrainConfig) -> Learner {
    Learner::with_model(tiny_model(DType::F32), config).unwrap()
}

/// Fills A and B with random values, so that the policy is not the base.
pub(super) fn randomise(lora: &Lora, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for (_, var) in lora.parameters() {
        let values: Vec<f64> = (0..var.elem_count()).map(|_| rng.random_range(-0.3..0.3)).collect();
        let value = Tensor::from_vec(values, var.shape(), var.device())
            .and_then(|t| t.to_dtype(var.dtype()))
            .unwrap();
        var.set(&value).unwrap();
    }
}

/// Samples of different lengths and temperatures whose recorded log-probabilities lie around
/// `center`, so that some ratios are clipped on either side where that is near the policy's own.
pub(super) fn random_samples(count: usize, seed: u64) -> Vec<TrainSample> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let vocab = tiny_spec().vocab_size as u32;
    (0..count)
        .map(|i| {
            let mut ids = |n: usize| (0..n).map(|_| rng.random_range(0..vocab)).collect();
            let (prompt_ids, ids): (Vec<u32>, Vec<u32>) = (ids(3 + i % 5), ids(1 + (i * 7) % 11));
            TrainSample {
                logprobs: ids.iter().map(|_| rng.random_range(-8.0..-4.0)).collect(),
                prompt_ids,
                ids,
                temperature: [1.0, 0.7, 1.3][i % 3],
                advantage: rng.random_range(-2.0..2.0),
                version: 1,
                truncated: false,
            }
        })
        .collect()
}

/// Log-probabilities of a sample's ids under the policy as it is served.
pub(super) fn score(learner: &Learner, sample: &TrainSample) -> Vec<f32> {
    let policy = learner.snapshot().unwrap();
    policy.score(&sample.prompt_ids, &sample.ids, sample.temperature).unwrap()
}

/// Replaces recorded log-probabilities by the policy's own plus noise within `±spread`.
pub(super) fn record(learner: &Learner, samples: &mut [TrainSample], spread: f32, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for sample in samples {
        let own = score(learner, sample);
        sample.logprobs = own.iter().map(|l| l + rng.random_range(-1.0..1.0) * spread).collect();
    }
}

/// The largest difference between two sets of tensors, relative to the largest value.
pub(super) fn relative_difference(
    a: &BTreeMap<String, Tensor>,
    b: &BTreeMap<String, Tensor>,
) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let (mut difference, mut scale) = (0.0_f64, 0.0_f64);
    for (name, x) in a {
        let (x, y) = (values(x), values(&b[name]));
        for (x, y) in x.iter().zip(&y) {
            difference = difference.max((x - y).abs());
            scale = scale.max(x.abs());
        }
    }
    difference / scale
}

/// All values of a tensor.
pub(super) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}
