//! The model and the samples of the training benchmark.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

use hone_engine::ModelDir;
use hone_model::adapter::BaseDtype;
use hone_model::{Model, ModelSpec, embedded};
use hone_train::{Learner, TrainSample};

const WEIGHTS_SEED: u64 = 1;

const TOKENS_SEED: u64 = 2;

/// The model of a benchmark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Subject {
    #[default]
    Embedded,
    /// A random Qwen2 with 100 million parameters and matrices in f32 or bf16.
    Random100m(DType),
    Dir(PathBuf),
}

impl FromStr for Subject {
    type Err = std::convert::Infallible;

    /// `embedded`, `100m`, `100m-bf16`, or a directory.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "embedded" => Self::Embedded,
            "100m" => Self::Random100m(DType::F32),
            "100m-bf16" => Self::Random100m(DType::BF16),
            dir => Self::Dir(PathBuf::from(dir)),
        })
    }
}

/// `config.json` of [`Subject::Random100m`].
fn config_100m() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 24_000,
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 13,
        "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "use_sliding_window": false, "sliding_window": null,
        "torch_dtype": "float32", "eos_token_id": 388, "pad_token_id": 386, "bos_token_id": null,
    })
}

/// Random weights by name: uniform with a spread that keeps the size of activations, norms near 1;
/// matrices in `dtype`.
fn random_weights(spec: &ModelSpec, dtype: DType) -> anyhow::Result<HashMap<String, Tensor>> {
    let mut rng = ChaCha8Rng::seed_from_u64(WEIGHTS_SEED);
    let spread = 1.0 / (spec.hidden_size as f32).sqrt();
    let mut tensors = HashMap::new();
    for (name, shape) in spec.weight_shapes() {
        let center = f32::from(u8::from(name.contains("norm")));
        let count = shape.iter().product();
        let values: Vec<f32> =
            (0..count).map(|_| center + rng.random_range(-spread..spread)).collect();
        let dtype = if shape.len() == 2 { dtype } else { DType::F32 };
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?);
    }
    Ok(tensors)
}

impl Subject {
    /// The model's directory; a temporary one, which is returned too, for models that are not in one.
    pub fn open(&self) -> anyhow::Result<(ModelDir, Option<TempDir>)> {
        if let Self::Dir(path) = self {
            return Ok((ModelDir::open(path)?, None));
        }
        let folder = tempfile::tempdir()?;
        self.write(folder.path())?;
        Ok((ModelDir::open(folder.path())?, Some(folder)))
    }

    /// Loads the model in its stored types.
    pub fn load(&self) -> anyhow::Result<Model> {
        let (dir, _folder) = self.open()?;
        let spec = ModelSpec::from_config(&dir.config)?;
        Ok(Model::load(spec, &dir.weights, BaseDtype::Auto, &Device::Cpu)?)
    }

    /// Writes a Hugging Face directory with the embedded model's tokenizer.
    pub fn write(&self, to: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
        for (name, bytes) in embedded::FILES {
            fs::write(to.join(name), bytes)?;
        }
        match self {
            Self::Embedded => Ok(()),
            Self::Random100m(dtype) => {
                let config = config_100m();
                let tensors = random_weights(&ModelSpec::from_config(&config)?, *dtype)?;
                fs::write(to.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
                Ok(candle_core::safetensors::save(&tensors, to.join("model.safetensors"))?)
            }
            Self::Dir(path) => anyhow::bail!("{} is already a model directory", path.display()),
        }
    }
}

/// The shape of random samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    pub groups: usize,
    pub group_size: usize,
    pub prompt: usize,
    /// Tokens that all prompts begin with.
    pub common: usize,
    /// Mean tokens of a completion.
    pub completion: usize,
    /// Lengths are uniform within this share of `completion`.
    pub spread: f64,
}

/// A completion in a data file, which `benches/peers` also read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub prompt: Vec<u32>,
    /// The completion's ids, including the stop token.
    pub completion: Vec<u32>,
    pub advantage: f64,
    /// Recorded log-probabilities of the completion's ids; computed by the model if absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<f32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// The completions of one step, by group.
    pub samples: Vec<Row>,
}

impl Data {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("reading {}", path.display()))
    }

    /// Random tokens with advantages of mean 0 and deviation 1 in every group, or of all if a group is one
    /// completion.
    pub fn random(shape: &Workload, vocab: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(TOKENS_SEED);
        let ids = |rng: &mut ChaCha8Rng, count: usize| -> Vec<u32> {
            (0..count).map(|_| rng.random_range(0..vocab.max(1) as u32)).collect()
        };
        let mut samples = Vec::new();
        let common = ids(&mut rng, shape.common);
        let own = shape.prompt.saturating_sub(shape.common).max(1);
        for group in 0..shape.groups {
            let prompt = [common.as_slice(), &ids(&mut rng, own)].concat();
            for member in 0..shape.group_size {
                let factor = 1.0 + shape.spread * rng.random_range(-1.0..=1.0);
                let length = (shape.completion as f64 * factor).round().max(1.0) as usize;
                let completion = ids(&mut rng, length);
                // As in a batch of ratings, answers to different prompts are compared.
                let advantage = match shape.group_size {
                    1 => advantage(group, shape.groups),
                    size => advantage(member, size),
                };
                let logprobs = Vec::new();
                samples.push(Row { prompt: prompt.clone(), completion, advantage, logprobs });
            }
        }
        Self { samples }
    }

    /// The trainer's samples, of version 0, with missing log-probabilities computed by the learner.
    pub fn samples(self, learner: &Learner) -> anyhow::Result<Vec<TrainSample>> {
        let policy = learner.snapshot()?;
        let sample = |row: Row| {
            let logprobs = match row.logprobs.is_empty() {
                true => policy.score(&row.prompt, &row.completion, 1.0)?,
                false => row.logprobs,
            };
            Ok(TrainSample {
                prompt_ids: row.prompt,
                ids: row.completion,
                logprobs,
                masked: Vec::new(),
                temperature: 1.0,
                advantage: row.advantage,
                version: 0,
                truncated: false,
                late: false,
                correction: false,
            })
        };
        self.samples.into_iter().map(sample).collect()
    }
}

/// Evenly spread values of mean 0 and deviation 1.
fn advantage(member: usize, group_size: usize) -> f64 {
    let n = group_size as f64;
    let deviation = ((n * n - 1.0) / 12.0).sqrt().max(1e-9);
    (member as f64 - (n - 1.0) / 2.0) / deviation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_groups_have_the_requested_shape() {
        let shape = Workload {
            groups: 3,
            group_size: 4,
            prompt: 7,
            common: 5,
            completion: 20,
            spread: 0.5,
        };
        let data = Data::random(&shape, 50);
        assert_eq!(data.samples.len(), 12);
        for group in data.samples.chunks(4) {
            assert!(group.iter().all(|row| row.prompt == group[0].prompt && row.prompt.len() == 7));
            let sum: f64 = group.iter().map(|row| row.advantage).sum();
            let square: f64 = group.iter().map(|row| row.advantage.powi(2)).sum();
            assert!(sum.abs() < 1e-12 && (square - 4.0).abs() < 1e-12, "{sum} {square}");
        }
        let first = &data.samples[0].prompt;
        assert!(data.samples.iter().all(|row| row.prompt[..5] == first[..5]));
        assert_ne!(data.samples[4].prompt, *first);
        assert!(data.samples.iter().all(|row| (10..=30).contains(&row.completion.len())));
        assert_eq!(data, Data::random(&shape, 50));
    }
}
