//! A tiny model and comparisons of tensors, for tests of this crate and of its dependents. Functions
//! panic on errors.

#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "test helpers fail loudly")]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::adapter::weights::LoraWeights;
use crate::adapter::{BaseDtype, LoraConfig, Patterns, peft};
use crate::{Model, ModelDir, ModelSpec};

pub use hone_kernels::testing::waves;

/// A file under `tests/`.
pub fn test_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(name)
}

/// The families of models, each a directory of `tests/fixtures/families`.
pub const FAMILIES: [&str; 10] = [
    "qwen2",
    "qwen3",
    "llama2",
    "llama3",
    "llama-biases",
    "mistral",
    "smollm3",
    "gemma2",
    "phi3",
    "phi3-longrope",
];

/// The directory of a family.
pub fn family(name: &str) -> PathBuf {
    test_file("fixtures/families").join(name)
}

/// The model of a directory.
pub fn load_model(dir: &Path, dtype: BaseDtype) -> Model {
    let dir = ModelDir::open(dir).unwrap();
    let spec = ModelSpec::from_config(&dir.config).unwrap();
    Model::load(spec, &dir.weights, dtype, &Device::Cpu).unwrap()
}

/// The model as candle graphs, as on devices other than the CPU. Its base must not be quantized.
pub fn graphs(model: &Model) -> Model {
    let mut graphs = model.clone();
    graphs.fused = false;
    graphs
}

/// The shape of the tiny model, `tests/fixtures/qwen2-tiny`.
pub fn tiny_spec() -> ModelSpec {
    let text = std::fs::read(test_file("fixtures/qwen2-tiny/config.json")).unwrap();
    ModelSpec::from_config(&serde_json::from_slice::<Value>(&text).unwrap()).unwrap()
}

/// The tiny model's weights.
pub fn tiny_weights(dtype: DType) -> HashMap<String, Tensor> {
    let path = test_file("fixtures/qwen2-tiny/model.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu)
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| (name, tensor.to_dtype(dtype).unwrap()))
        .collect()
}

/// The tiny model.
pub fn tiny_model(dtype: DType) -> Model {
    Model::new(tiny_spec(), tiny_weights(dtype)).unwrap()
}

/// Fills A and B with random values, so that the policy differs from the base.
pub fn randomize(lora: &LoraWeights, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for (_, var) in lora.parameters() {
        let values: Vec<f64> = (0..var.elem_count()).map(|_| rng.random_range(-0.3..0.3)).collect();
        let value = Tensor::from_vec(values, var.shape(), var.device())
            .and_then(|t| t.to_dtype(var.dtype()))
            .unwrap();
        var.set(&value).unwrap();
    }
}

/// The settings with patterns, rslora and exclusions, so that modules differ in rank and scale. The first
/// pattern that matches is not the first in the alphabet.
pub fn varied(config: LoraConfig) -> LoraConfig {
    fn patterns<T: Copy>(list: &[(&str, T)]) -> Patterns<T> {
        list.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect()
    }
    LoraConfig {
        use_rslora: true,
        exclude_modules: ["layers.1.mlp.up_proj", "v_proj"].into(),
        rank_pattern: patterns(&[("q_proj", 3), ("layers\\.0\\.self_attn\\..*", 5)]),
        alpha_pattern: patterns(&[("down_proj", 1.5)]),
        ..config
    }
}

/// Writes an adapter directory with random values.
pub fn write_adapter(dir: &Path, config: &LoraConfig) -> LoraWeights {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let lora =
        LoraWeights::fresh(&tiny_spec(), config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    randomize(&lora, 5);
    peft::write(dir, &lora, config, "tiny").unwrap();
    lora
}

/// The values of every tensor of an adapter.
pub fn all_values(lora: &LoraWeights) -> BTreeMap<String, Vec<f64>> {
    lora.parameters().into_iter().map(|(name, var)| (name, values(var))).collect()
}

/// The largest difference between two sets of tensors, relative to the largest value.
pub fn relative_difference(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let (mut difference, mut scale) = (0.0_f64, 0.0_f64);
    for (name, x) in a {
        for (x, y) in values(x).into_iter().zip(values(&b[name])) {
            difference = difference.max((x - y).abs());
            scale = scale.max(x.abs());
        }
    }
    difference / scale
}

/// All values of a tensor.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// [`Model::stats`] of logits `[n, vocab]` as a candle graph.
pub fn token_stats(logits: &Tensor, targets: &[u32], temperatures: &[f32]) -> Tensor {
    let column = |values: Tensor| values.unsqueeze(1).unwrap();
    let temperatures = column(Tensor::new(temperatures, logits.device()).unwrap());
    let scaled = logits.broadcast_div(&temperatures.to_dtype(logits.dtype()).unwrap()).unwrap();
    let logprobs = scaled.broadcast_sub(&column(scaled.log_sum_exp(D::Minus1).unwrap())).unwrap();
    let targets = column(Tensor::new(targets, logits.device()).unwrap());
    let entropies = (logprobs.exp().unwrap() * &logprobs).unwrap().sum_keepdim(1).unwrap().neg();
    Tensor::cat(&[logprobs.gather(&targets, 1).unwrap(), entropies.unwrap()], 1).unwrap()
}
