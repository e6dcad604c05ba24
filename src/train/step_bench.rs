//! Seconds per step on a model of the embedded one's size, and the share of the machine's peak on a
//! larger one. Not checks: run them with
//! `cargo test --release --lib train::step_bench -- --ignored --nocapture --test-threads 1`.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::batch::TrainSample;
use super::learner::Learner;
use super::model::parallel::with_threads;
use super::model::{Model, ModelSpec};
use crate::config::{LinearKind, LoraConfig, TrainConfig};

fn qwen2(fields: serde_json::Value) -> ModelSpec {
    let mut config = serde_json::json!({ "model_type": "qwen2", "tie_word_embeddings": true });
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    ModelSpec::from_config(&config).unwrap()
}

fn small(layers: usize) -> ModelSpec {
    qwen2(serde_json::json!({
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
    }))
}

/// About 100 million parameters.
fn large() -> ModelSpec {
    qwen2(serde_json::json!({
        "vocab_size": 24_000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 13, "num_attention_heads": 12, "num_key_value_heads": 4,
    }))
}

fn model(spec: ModelSpec) -> Model {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut tensors = HashMap::new();
    let spread = 1.0 / (spec.hidden_size as f32).sqrt();
    for (name, shape) in spec.weight_shapes() {
        let center = f32::from(u8::from(name.contains("norm")));
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| center + rng.random_range(-spread..spread))
            .collect();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    }
    Model::new(spec, tensors).unwrap()
}

/// Groups of 8 completions of one prompt.
fn samples(learner: &Learner, groups: usize, prompt: usize, completion: usize) -> Vec<TrainSample> {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let vocab = learner.spec().vocab_size as u32;
    let mut samples = Vec::new();
    for _ in 0..groups {
        let mut ids =
            |n: usize| -> Vec<u32> { (0..n).map(|_| rng.random_range(0..vocab)).collect() };
        let prompt_ids = ids(prompt);
        for i in 0..8 {
            let ids = ids(completion);
            samples.push(TrainSample {
                logprobs: learner.score(&prompt_ids, &ids, 1.0).unwrap(),
                prompt_ids: prompt_ids.clone(),
                ids,
                temperature: 1.0,
                advantage: if i % 2 == 0 { 1.0 } else { -1.0 },
                version: 0,
                truncated: false,
            });
        }
    }
    samples
}

/// Processor seconds of this process, where the system tells (wall time means little on a busy
/// machine).
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|x| x.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// A line of `/proc/self/status` in MiB.
fn memory(key: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().find_map(|x| x.parse::<f64>().ok()).unwrap_or_default() / 1024.0
}

/// Starts the peak of resident memory anew.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The best of a few products of large squares on this pool, in GFLOP/s: of wall time, and of
/// processor time times threads.
fn peak(threads: usize) -> (f64, f64) {
    let n = 1536;
    let x = Tensor::rand(-1.0_f32, 1.0, (n, n), &Device::Cpu).unwrap();
    let flops = 2.0 * (n as f64).powi(3) * 4.0 / 1e9;
    let (mut wall, mut cpu) = (0.0_f64, 0.0_f64);
    for _ in 0..6 {
        let (start, used) = (Instant::now(), cpu_seconds());
        for _ in 0..4 {
            with_threads(threads, || super::model::ops::linear(&x, &x, None)).unwrap();
        }
        wall = wall.max(flops / start.elapsed().as_secs_f64());
        cpu = cpu.max(flops / (cpu_seconds() - used) * threads as f64);
    }
    (wall, cpu)
}

#[test]
#[ignore = "a measurement, not a check"]
fn seconds_per_step() {
    for layers in [2, 4] {
        let config = TrainConfig {
            beta: 0.01,
            lora: LoraConfig { r: 16, ..LoraConfig::default() },
            ..TrainConfig::default()
        };
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (seconds, cpu, stats, grown) = pool.install(|| {
                let mut learner = Learner::with_model(model(small(layers)), &config).unwrap();
                let samples = samples(&learner, 8, 20, 25);
                reset_peak();
                let before = memory("VmRSS:");
                learner.step(&samples, 0, 64).unwrap();
                let (mut best, cpu) = (f64::INFINITY, cpu_seconds());
                let mut stats = None;
                for _ in 0..20 {
                    let start = Instant::now();
                    stats = Some(learner.step(&samples, 1, 64).unwrap());
                    best = best.min(start.elapsed().as_secs_f64());
                }
                let cpu = (cpu_seconds() - cpu) / 20.0;
                (best, cpu, stats.unwrap(), memory("VmHWM:") - before)
            });
            println!(
                "{layers} layers, {threads} threads: best {seconds:.4} s a step ({cpu:.4} s of processor), {grown:.0} MiB more at the peak, kl {:.2e}, loss tokens {:.2}",
                stats.metrics["kl"], stats.metrics["loss_token_fraction"]
            );
        }
    }
}

/// Floating-point operations of matrix products that one step needs: forward, and backward to the
/// inputs of frozen linears; twice more for the adapter's own factors. Without what is computed
/// again, and without prompts computed for each member.
fn useful_gflop(spec: &ModelSpec, r: usize, prompt: usize, completion: usize, beta: bool) -> f64 {
    let tokens = (prompt + 8 * (completion - 1)) as f64;
    let (mut frozen, mut adapter) = (0.0, 0.0);
    for kind in LinearKind::ALL {
        let (out, inner) = spec.linear_shape(kind);
        frozen += (out * inner) as f64;
        adapter += (r * (out + inner)) as f64;
    }
    let layers = spec.num_layers as f64;
    let (frozen, adapter) = (frozen * layers, adapter * layers);
    let head = (spec.vocab_size * spec.hidden_size) as f64 * (8 * completion) as f64;
    // Scores and mixtures, of pairs of tokens: 2 products forward, 4 backward.
    let pairs =
        prompt * (prompt + 1) / 2 + 8 * (completion * prompt + completion * (completion + 1) / 2);
    let attention = layers * (pairs * spec.num_heads * spec.head_dim) as f64;
    let passes = if beta { 3.0 } else { 2.0 };
    let attended = if beta { 8.0 } else { 6.0 };
    2.0 * (passes * (frozen * tokens + head) + 3.0 * adapter * tokens + attended * attention) / 1e9
}

#[test]
#[ignore = "a measurement, not a check"]
fn share_of_the_peak() {
    let threads = 2;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let spec = large();
        let parameters: usize =
            spec.weight_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        println!("{:.1} M parameters", parameters as f64 / 1e6);
        let config = TrainConfig {
            beta: 0.0,
            lora: LoraConfig { r: 16, ..LoraConfig::default() },
            ..TrainConfig::default()
        };
        println!("{}", super::memory::Plan::new(&spec, &config, threads, 0));
        let mut learner = Learner::with_model(model(spec.clone()), &config).unwrap();
        for (prompt, completion) in [(32, 480), (256, 256)] {
            let samples = samples(&learner, 1, prompt, completion);
            let useful = useful_gflop(&spec, 16, prompt, completion, false);
            for _ in 0..2 {
                let (before_wall, before_cpu) = peak(threads);
                reset_peak();
                let (rss, cpu) = (memory("VmRSS:"), cpu_seconds());
                let start = Instant::now();
                learner.step(&samples, 1, 512).unwrap();
                let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
                let grown = memory("VmHWM:") - rss;
                let (after_wall, after_cpu) = peak(threads);
                let (peak_wall, peak_cpu) = (before_wall.max(after_wall), before_cpu.max(after_cpu));
                println!(
                    "{prompt}+{completion}: {wall:.2} s, {cpu:.2} s of processor, {useful:.0} GFLOP: {:.0} GFLOP/s, {:.0} % of {peak_wall:.0}; by processor time {:.0} % of {peak_cpu:.0}; {grown:.0} MiB over {rss:.0}",
                    useful / wall,
                    100.0 * useful / wall / peak_wall,
                    100.0 * useful / cpu * threads as f64 / peak_cpu,
                );
            }
        }
    });
}
