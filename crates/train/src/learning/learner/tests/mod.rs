//! Steps and settings.

mod checkpoints;
mod graphs;
mod init_adapter;
mod resume;
mod wide;

use std::path::Path;

use candle_core::DType;
use serde_json::json;

use hone_model::ModelSpec;
use hone_model::adapter::{Modules, peft};
use hone_model::testing::{randomize, tiny_model, values};

use super::Learner;
use crate::config::{CorrectionMode, TrainConfig};
use crate::data::packing::TrainSample;
use crate::testing::{random_samples, record, score, tiny_config, tiny_learner};

/// The bits of all values of the adapter.
fn bits(learner: &Learner) -> Vec<u64> {
    let tensors = learner.lora.tensors().unwrap();
    tensors.values().flat_map(values).map(f64::to_bits).collect()
}

/// Compares the adapters of two learners.
fn assert_near(a: &Learner, b: &Learner) {
    let (a, b) = (a.lora.tensors().unwrap(), b.lora.tensors().unwrap());
    for (a, b) in a.values().zip(b.values()) {
        for (a, b) in values(a).iter().zip(values(b)) {
            assert!((a - b).abs() < 1e-4, "{a} against {b}");
        }
    }
}

fn batch(seed: u64) -> Vec<TrainSample> {
    random_samples(10, seed)
}

fn recorded(learner: &Learner, seed: u64) -> Vec<TrainSample> {
    let mut samples = batch(seed);
    record(learner, &mut samples, 0.0, 0);
    samples
}

#[test]
fn a_fresh_policy_is_the_base_and_a_step_increases_the_advantage() {
    let config = TrainConfig { max_sampler_difference: 0.05, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let samples = recorded(&learner, 1);
    let stats = learner.step(&samples, 1, 16).unwrap();
    let get = |name: &str| stats.metrics[name];
    assert_eq!(stats.skipped, None);
    assert!(stats.refused.is_empty());
    assert_eq!(learner.step_count(), 1);
    // The policy is on policy and equals the reference: no KL, no clipping, ratio 1.
    assert!(get("kl").abs() < 1e-9 && get("clip_low") == 0.0 && get("clip_high") == 0.0);
    assert!((get("ratio_min") - 1.0).abs() < 1e-5 && (get("ratio_max") - 1.0).abs() < 1e-5);
    assert!(get("sampler_difference_max") < 1e-5);
    assert!(get("grad_norm") > 0.0 && (get("learning_rate") - 1e-2).abs() < 1e-12);
    let tokens: usize = samples.iter().map(|s| s.ids.len()).sum();
    assert_eq!((get("tokens"), get("samples")), (tokens as f64, 10.0));
    assert!((get("completion_length") - tokens as f64 / 10.0).abs() < 1e-12);
    assert!(get("entropy") > 0.0 && get("entropy") < (288.0_f64).ln() + 1e-6);
    // The change of log-probability, weighted by the advantage, is positive.
    let mut gain = 0.0;
    for sample in &samples {
        let after = score(&learner, sample);
        let change: f32 = after.iter().zip(&sample.logprobs).map(|(a, b)| a - b).sum();
        gain += sample.advantage * f64::from(change);
    }
    assert!(gain > 0.1, "gain {gain}");
}

#[test]
fn repeated_steps_learn_a_preferred_answer() {
    let config = TrainConfig { beta: 0.0, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let sample = |ids: Vec<u32>, advantage| TrainSample {
        prompt_ids: vec![5, 6, 7],
        logprobs: vec![0.0; ids.len()],
        ids,
        temperature: 1.0,
        advantage,
        ..TrainSample::default()
    };
    let mut samples = vec![sample(vec![30, 31, 2], 1.0), sample(vec![40, 41, 2], -1.0)];
    let margin = |learner: &Learner, samples: &[TrainSample]| {
        let total = |sample| score(learner, sample).iter().sum::<f32>();
        total(&samples[0]) - total(&samples[1])
    };
    let before = margin(&learner, &samples);
    for _ in 0..20 {
        record(&learner, &mut samples, 0.0, 0);
        let stats = learner.step(&samples, 9, 16).unwrap();
        assert!(!stats.metrics.contains_key("kl"), "without beta there is no KL");
        assert!(!stats.metrics.contains_key("sampler_difference_mean"), "no current sample");
    }
    let after = margin(&learner, &samples);
    assert!(after > before + 5.0, "{before} to {after}");
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    let mut learner = tiny_learner(&tiny_config());
    let mut samples = batch(2);
    record(&learner, &mut samples, 0.1, 0);
    learner.step(&samples, 9, 16).unwrap();
    let before = bits(&learner);
    let good = samples.clone();
    samples[3].advantage = f64::MAX;
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert!(stats.skipped.is_some());
    assert_eq!(bits(&learner), before);
    assert_eq!(learner.step_count(), 1);
    assert!(learner.step(&good, 9, 16).unwrap().skipped.is_none());
    assert!(
        learner.lora.tensors().unwrap().values().all(|t| values(t).iter().all(|x| x.is_finite()))
    );
}

#[test]
fn samples_whose_recorded_logprobs_differ_from_recomputed_ones_are_refused() {
    let config = TrainConfig { max_sampler_difference: 0.05, ..tiny_config() };
    let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&config));
    let mut samples = recorded(&learner, 3);
    for logprob in &mut samples[4].logprobs {
        *logprob -= 0.5;
    }
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!(stats.refused, vec![4]);
    assert_eq!(stats.metrics["samples"], 9.0);
    assert!(stats.metrics["sampler_difference_mean"] < 1e-5);
    // The result is the same as without the sample, normalizer included.
    samples.remove(4);
    other.step(&samples, 1, 16).unwrap();
    assert_near(&learner, &other);
    // Samples of another version are off-policy and are not compared.
    let stats = learner.step(&samples, 2, 16).unwrap();
    assert!(stats.refused.is_empty());
    // Without any sample left the step is skipped.
    for logprob in samples.iter_mut().flat_map(|s| &mut s.logprobs) {
        *logprob -= 3.0;
    }
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!((stats.refused.len(), stats.skipped.is_some()), (9, true));
}

#[test]
fn truncated_completions_are_left_out_if_configured() {
    let config = TrainConfig { mask_truncated_completions: true, ..tiny_config() };
    let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&tiny_config()));
    let mut samples = batch(3);
    record(&learner, &mut samples, 0.1, 0);
    let (longest, shortest) = (10, 1);
    assert_eq!((samples[4].ids.len(), samples[8].ids.len()), (7, 2));
    samples[4].truncated = true;
    samples[8].truncated = true;
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!(stats.metrics["samples"], 8.0);
    // Completion metrics include the samples that are left out.
    let tokens: usize = samples.iter().map(|s| s.ids.len()).sum();
    let prompts: usize = samples.iter().map(|s| s.prompt_ids.len()).sum();
    assert_eq!(stats.metrics["truncated_ratio"], 0.2);
    assert_eq!(stats.metrics["completion_length"], tokens as f64 / 10.0);
    assert_eq!(stats.metrics["terminated_length"], (tokens - 9) as f64 / 8.0);
    assert!(stats.metrics["completion_length_max"] >= f64::from(longest));
    assert_eq!(stats.metrics["terminated_length_min"], f64::from(shortest));
    assert_eq!(stats.metrics["num_tokens"], (tokens + prompts) as f64);
    // The result is the same as without the samples, normalizer included.
    samples.retain(|sample| !sample.truncated);
    other.step(&samples, 9, 16).unwrap();
    assert_near(&learner, &other);
}

#[test]
fn with_a_sampler_correction_the_ratio_is_relative_to_the_first_pass() {
    let mut config = TrainConfig { num_iterations: 3, ..tiny_config() };
    config.sampler_correction.kind = CorrectionMode::TokenTruncate;
    config.lora.dropout = 0.2;
    let mut learner = tiny_learner(&config);
    let mut samples = batch(3);
    record(&learner, &mut samples, 0.2, 1);
    let stats = learner.step(&samples, 1, 16).unwrap();
    // The old log-probabilities, and so the weights, are the same in every pass.
    let get = |name: &str| stats.metrics[name];
    let bound = 0.2_f64.exp() + 1e-4;
    assert!(get("sampler_ratio_max") < bound && get("sampler_ratio_max") > 1.1);
    assert!(get("sampler_ratio_min") > 1.0 / bound && get("sampler_ratio_min") < 0.9);
    assert!(get("sampler_difference_max") < 0.2 + 1e-5);
    // The ratio covers the updates.
    assert!(get("ratio_max") > 1.001);
    config.num_iterations = 1;
    config.lora.dropout = 0.0;
    let mut learner = tiny_learner(&config);
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!((stats.metrics["ratio_min"], stats.metrics["ratio_max"]), (1.0, 1.0));
}

#[test]
fn malformed_samples_are_errors_that_name_the_field() {
    let mut learner = tiny_learner(&tiny_config());
    let mut message = |change: &dyn Fn(&mut TrainSample)| {
        let mut samples = batch(4);
        change(&mut samples[2]);
        learner.step(&samples, 0, 16).unwrap_err().to_string()
    };
    assert_eq!(message(&|s| s.prompt_ids.clear()), "sample 2: `prompt_ids` is empty");
    assert!(message(&|s| s.ids.clear()).contains("`ids` is empty"));
    assert!(message(&|s| s.logprobs.push(0.0)).contains("logprobs"));
    assert!(message(&|s| s.ids[0] = 288).contains("288 is outside the vocabulary"));
    assert!(message(&|s| s.temperature = 0.0).contains("`temperature` is 0"));
    assert!(message(&|s| s.logprobs[0] = f32::NAN).contains("NaN"));
    assert!(message(&|s| s.advantage = f64::INFINITY).contains("`advantage`"));
    let policy = learner.snapshot().unwrap();
    assert!(policy.score(&[], &[1], 1.0).is_err() && policy.score(&[1], &[999], 1.0).is_err());
}

#[test]
fn several_iterations_update_repeatedly_on_the_same_samples() {
    let config = TrainConfig { num_iterations: 3, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let samples = recorded(&learner, 5);
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!(learner.step_count(), 1);
    // Later passes are off policy; only the first one is compared with the sampler.
    assert!(stats.metrics["ratio_max"] > 1.001);
    assert!(stats.metrics["sampler_difference_max"] < 1e-5);
    assert_eq!(stats.metrics["samples"], 10.0);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let message = |change: &dyn Fn(&mut TrainConfig)| {
        let mut config = tiny_config();
        change(&mut config);
        Learner::with_model(tiny_model(DType::F32), &config).err().unwrap().to_string()
    };
    assert_eq!(message(&|c| c.lora.r = 0), "`train.lora.r` is 0, but must be at least 1");
    assert!(
        message(&|c| c.lora.target_modules = Modules::Names(Vec::new())).contains("target_modules")
    );
}

#[test]
fn adapters_have_the_names_shapes_and_initial_values_of_peft() {
    let learner = tiny_learner(&tiny_config());
    let tensors = learner.lora.tensors().unwrap();
    assert_eq!(tensors.len(), 2 * 7 * 2);
    let a = &tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"];
    let b = &tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"];
    assert_eq!((a.dims(), b.dims()), ([2, 48].as_slice(), [32, 2].as_slice()));
    let bound = 1.0 / 48.0_f64.sqrt();
    let list = values(a);
    assert!(list.iter().all(|x| x.abs() <= bound));
    assert!(list.iter().any(|x| x.abs() > 0.8 * bound));
    assert!(values(b).iter().all(|x| *x == 0.0));
    assert_eq!(bits(&learner), bits(&tiny_learner(&tiny_config())));
    let other = tiny_learner(&TrainConfig { seed: 1, ..tiny_config() });
    assert_ne!(bits(&learner), bits(&other));
}

/// Writes the files that `tests/reference/peft/check_peft.py` reads.
#[test]
#[ignore = "writes files for a Python script"]
fn an_adapter_for_python() {
    let dir = std::env::var("HONE_TEST_PEFT_DIR").unwrap();
    let dir = Path::new(&dir);
    let mut config = tiny_config();
    config.lora.exclude_modules = ["up_proj"].into();
    let learner = tiny_learner(&config);
    learner.snapshot().unwrap().write(dir, "qwen2-tiny").unwrap();
    let spec: &ModelSpec = learner.spec();
    let (_, lora) = peft::read(dir, spec, DType::F32, &candle_core::Device::Cpu).unwrap();
    randomize(&lora, 3);
    peft::write(dir, &lora, &config.lora, "qwen2-tiny").unwrap();
    let mut learner = tiny_learner(&config);
    learner.reset_to(Some(dir)).unwrap();
    let (prompt, ids) = ([1, 87, 85, 266, 201], [64, 240, 256, 2]);
    let logprobs = learner.snapshot().unwrap().score(&prompt, &ids, 0.8).unwrap();
    let expected =
        json!({"prompt_ids": prompt, "ids": ids, "temperature": 0.8, "logprobs": logprobs});
    std::fs::write(dir.join("expected.json"), expected.to_string()).unwrap();
}

/// Makes a sample late, whose log-probabilities have changed by `change` each since sampling.
fn age(sample: &mut TrainSample, change: f32) {
    sample.late = true;
    sample.logprobs.iter_mut().for_each(|logprob| *logprob -= change);
}

#[test]
fn a_late_sample_counts_by_the_truncated_weight_of_its_sequence() {
    for mode in [CorrectionMode::None, CorrectionMode::TokenTruncate] {
        let mut config = TrainConfig { num_iterations: 2, ..tiny_config() };
        config.sampler_correction.kind = mode;
        let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&config));
        let mut samples = recorded(&learner, 3);
        let mut scaled = samples.clone();
        assert_eq!((samples[2].ids.len(), samples[4].ids.len()), (4, 7));
        (samples[2].advantage, scaled[2].advantage) = (-1.0, -1.0);
        // One has become less probable; the other is more probable, which counts no more.
        age(&mut samples[2], -0.5);
        age(&mut samples[4], 0.5);
        scaled[2].advantage *= (-2.0_f64).exp();
        let stats = learner.step(&samples, 9, 16).unwrap();
        assert_eq!((stats.skipped, stats.faded), (None, Vec::new()));
        other.step(&scaled, 9, 16).unwrap();
        assert_near(&learner, &other);
    }
}

#[test]
fn a_sample_far_from_the_policy_is_left_out() {
    let (mut learner, mut other) = (tiny_learner(&tiny_config()), tiny_learner(&tiny_config()));
    let mut samples = recorded(&learner, 3);
    samples.iter_mut().for_each(|sample| sample.advantage = -sample.advantage.abs());
    age(&mut samples[2], -2.0);
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded, stats.refused), (vec![2], Vec::new()));
    assert_eq!(stats.metrics["samples"], 9.0);
    // The result is the same as without the sample, normalizer included.
    samples.remove(2);
    other.step(&samples, 9, 16).unwrap();
    assert_near(&learner, &other);
    // Without any sample left the step is skipped.
    for sample in &mut samples {
        age(sample, -20.0);
    }
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert_eq!((stats.faded.len(), stats.skipped.is_some()), (9, true));
}

/// The policy has moved away from an answer that a user then likes.
#[test]
fn a_liked_answer_that_became_rare_is_learned_again() {
    let mut learner = tiny_learner(&TrainConfig { beta: 0.0, ..tiny_config() });
    let mut sample = recorded(&learner, 3).swap_remove(4);
    sample.advantage = 1.0;
    age(&mut sample, -2.0);
    let before: f32 = score(&learner, &sample).iter().sum();
    let stats = learner.step(std::slice::from_ref(&sample), 9, 16).unwrap();
    assert_eq!(stats.faded, Vec::<usize>::new());
    let after: f32 = score(&learner, &sample).iter().sum();
    assert!(after > before + 0.01, "{before} {after}");
}

fn correction(prompt: &[u32], ids: &[u32]) -> TrainSample {
    TrainSample {
        prompt_ids: prompt.to_vec(),
        ids: ids.to_vec(),
        temperature: 1.0,
        version: u64::MAX,
        correction: true,
        ..TrainSample::default()
    }
}

/// Mean over all tokens of the negative log-probability.
fn nll(learner: &Learner, corrections: &[TrainSample]) -> f64 {
    let all: Vec<f32> = corrections.iter().flat_map(|sample| score(learner, sample)).collect();
    -all.iter().map(|l| f64::from(*l)).sum::<f64>() / all.len() as f64
}

#[test]
fn the_likelihood_of_corrections_rises_beside_other_samples() {
    // Two updates with a sampler correction: neither the ratio nor the KL concerns corrections.
    let mut config =
        TrainConfig { correction_weight: 1.0, num_iterations: 2, micro_batch: 4, ..tiny_config() };
    config.sampler_correction.kind = CorrectionMode::TokenTruncate;
    let mut learner = tiny_learner(&config);
    let corrections = [correction(&[5, 6, 7], &[30, 31, 2]), correction(&[8, 9], &[40, 2])];
    let before = nll(&learner, &corrections);
    let mut metrics = Vec::new();
    for seed in 0..20 {
        let mut samples = recorded(&learner, seed);
        samples.extend(corrections.clone());
        let stats = learner.step(&samples, u64::MAX, 16).unwrap();
        assert_eq!((stats.skipped, stats.refused, stats.faded), (None, vec![], vec![]));
        assert_eq!(stats.metrics["samples"], 10.0);
        assert_eq!(stats.metrics["correction/samples"], 2.0);
        metrics.push(stats.metrics["correction/nll"]);
    }
    let after = nll(&learner, &corrections);
    assert!(after < before - 1.0 && metrics[19] < metrics[0] - 1.0, "{before} to {after}");
}

#[test]
fn a_step_of_corrections_alone_reports_their_likelihood() {
    let config = TrainConfig { correction_weight: 0.5, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let corrections = [correction(&[5, 6, 7], &[30, 31, 2]), correction(&[8, 9], &[40, 2])];
    let own = nll(&learner, &corrections);
    let stats = learner.step(&corrections, 1, 16).unwrap();
    assert!((stats.metrics["correction/nll"] - own).abs() < 1e-4);
    assert!((stats.metrics["loss"] - 0.5 * own).abs() < 1e-4);
    assert!(nll(&learner, &corrections) < own);
    for name in ["samples", "completion_length", "kl", "sampler_difference_mean"] {
        assert!(!stats.metrics.contains_key(name), "{name}");
    }
}

#[test]
fn without_a_weight_corrections_change_nothing() {
    let (mut learner, mut other) = (tiny_learner(&tiny_config()), tiny_learner(&tiny_config()));
    let mut samples = recorded(&learner, 3);
    other.step(&samples, 9, 16).unwrap();
    samples.push(correction(&[5, 6, 7], &[30, 31, 2]));
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert!(!stats.metrics.contains_key("correction/nll"));
    assert_eq!(bits(&learner), bits(&other));
    let stats = learner.step(&samples[10..], 9, 16).unwrap();
    assert!(stats.skipped.is_some(), "no sample is left");
}
