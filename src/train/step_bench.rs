//! Seconds per step on a model of the embedded one's size. Not a check: run it with
//! `cargo test --release --lib train::step_bench -- --ignored --nocapture`.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::batch::TrainSample;
use super::learner::Learner;
use super::model::{Model, ModelSpec};
use crate::config::{LoraConfig, TrainConfig};

fn model(layers: usize) -> Model {
    let spec = ModelSpec {
        architecture: "qwen2".to_owned(),
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 384,
        num_layers: layers,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        qkv_bias: true,
        tie_word_embeddings: true,
    };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut tensors = HashMap::new();
    for (name, shape) in spec.weight_shapes() {
        let center = f32::from(u8::from(name.contains("norm")));
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|_| center + rng.random_range(-0.1..0.1)).collect();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    }
    Model::new(spec, tensors).unwrap()
}

fn samples(learner: &Learner) -> Vec<TrainSample> {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    (0..64)
        .map(|i| {
            let mut ids =
                |n: usize| -> Vec<u32> { (0..n).map(|_| rng.random_range(0..512)).collect() };
            let (prompt_ids, ids) = (ids(20), ids(25));
            TrainSample {
                logprobs: learner.score(&prompt_ids, &ids, 1.0).unwrap(),
                prompt_ids,
                ids,
                temperature: 1.0,
                advantage: if i % 2 == 0 { 1.0 } else { -1.0 },
                version: 0,
                truncated: false,
            }
        })
        .collect()
}

/// Processor seconds of this process, where the system tells (wall time means little on a busy
/// machine).
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|x| x.parse::<f64>().ok()).sum::<f64>() / 100.0
}

#[test]
#[ignore = "a measurement, not a check"]
fn seconds_per_step() {
    for (layers, r) in [(2, 16), (4, 16)] {
        let config = TrainConfig {
            beta: 0.01,
            lora: LoraConfig { r, ..LoraConfig::default() },
            ..TrainConfig::default()
        };
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (seconds, cpu, stats) = pool.install(|| {
                let mut learner = Learner::with_model(model(layers), &config).unwrap();
                let samples = samples(&learner);
                learner.step(&samples, 0, 64).unwrap();
                let (start, cpu) = (Instant::now(), cpu_seconds());
                let mut stats = None;
                for _ in 0..5 {
                    stats = Some(learner.step(&samples, 1, 64).unwrap());
                }
                let cpu = (cpu_seconds() - cpu) / 5.0;
                (start.elapsed().as_secs_f64() / 5.0, cpu, stats.unwrap())
            });
            println!(
                "{layers} layers, r {r}, {threads} threads: {seconds:.3} s a step ({cpu:.3} s of processor), kl {:.2e}",
                stats.metrics["kl"]
            );
        }
    }
}
