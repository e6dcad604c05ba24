//! Steps, roll-back, checkpoints and resume.

use std::path::Path;

use candle_core::DType;
use serde_json::json;

use hone_model::adapter::{Modules, peft};
use hone_model::testing::{randomize, tiny_model, values};
use hone_model::{Model, ModelSpec};

use super::Learner;
use crate::config::{CorrectionMode, ScheduleKind, TrainConfig};
use crate::data::packing::TrainSample;
use crate::error::LearnError;
use crate::learning::checkpoint::{latest, list, prune, step_dir};
use crate::testing::{random_samples, record, score, tiny_config, tiny_learner};

/// All bits of the adapter, in a fixed order.
fn bits(learner: &Learner) -> Vec<u64> {
    let tensors = learner.adapter().unwrap();
    tensors.values().flat_map(values).map(f64::to_bits).collect()
}

fn batch(seed: u64) -> Vec<TrainSample> {
    random_samples(10, seed)
}

#[test]
fn a_fresh_policy_is_the_base_and_a_step_moves_it_the_right_way() {
    let config = TrainConfig { max_sampler_difference: 0.05, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let mut samples = batch(1);
    record(&learner, &mut samples, 0.0, 0);
    let stats = learner.step(&samples, 1, 16).unwrap();
    let get = |name: &str| stats.metrics[name];
    assert_eq!(stats.skipped, None);
    assert!(stats.refused.is_empty());
    assert_eq!(learner.step_count(), 1);
    // On policy and equal to the reference: no divergence, no clipping, ratio 1.
    assert!(get("kl").abs() < 1e-9 && get("clip_low") == 0.0 && get("clip_high") == 0.0);
    assert!((get("ratio_min") - 1.0).abs() < 1e-5 && (get("ratio_max") - 1.0).abs() < 1e-5);
    assert!(get("sampler_difference_max") < 1e-5);
    assert!(get("grad_norm") > 0.0 && (get("learning_rate") - 1e-2).abs() < 1e-12);
    let tokens: usize = samples.iter().map(|s| s.ids.len()).sum();
    assert_eq!((get("tokens"), get("samples")), (tokens as f64, 10.0));
    assert!((get("completion_length") - tokens as f64 / 10.0).abs() < 1e-12);
    assert!(get("entropy") > 0.0 && get("entropy") < (288.0_f64).ln() + 1e-6);
    // What was rewarded has become more probable, weighted by the advantage.
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
        version: 0,
        truncated: false,
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
        assert!(!stats.metrics.contains_key("kl"), "not computed, so not reported");
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
    samples[3].logprobs[0] = -1e30;
    samples[3].advantage = -1.0;
    let stats = learner.step(&samples, 9, 16).unwrap();
    assert!(stats.skipped.is_some());
    assert_eq!(bits(&learner), before);
    assert_eq!(learner.step_count(), 1);
    assert!(learner.step(&good, 9, 16).unwrap().skipped.is_none());
    assert!(learner.adapter().unwrap().values().all(|t| values(t).iter().all(|x| x.is_finite())));
}

#[test]
fn samples_that_the_sampler_cannot_have_drawn_are_refused() {
    let config = TrainConfig { max_sampler_difference: 0.05, ..tiny_config() };
    let (mut learner, mut other) = (tiny_learner(&config), tiny_learner(&config));
    let mut samples = batch(3);
    record(&learner, &mut samples, 0.0, 0);
    for logprob in &mut samples[4].logprobs {
        *logprob -= 0.5;
    }
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!(stats.refused, vec![4]);
    assert_eq!(stats.metrics["samples"], 9.0);
    assert!(stats.metrics["sampler_difference_mean"] < 1e-5);
    // As if it had never been there, normaliser included.
    samples.remove(4);
    other.step(&samples, 1, 16).unwrap();
    for (a, b) in learner.adapter().unwrap().values().zip(other.adapter().unwrap().values()) {
        for (a, b) in values(a).iter().zip(values(b)) {
            assert!((a - b).abs() < 1e-4, "{a} against {b}");
        }
    }
    // Of another version it is off-policy, not wrong.
    let stats = learner.step(&samples, 2, 16).unwrap();
    assert!(stats.refused.is_empty());
    // None left: skipped.
    for logprob in samples.iter_mut().flat_map(|s| &mut s.logprobs) {
        *logprob -= 3.0;
    }
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!((stats.refused.len(), stats.skipped.is_some()), (9, true));
}

#[test]
fn truncated_completions_are_left_out_where_asked() {
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
    // The figures of completions are of all.
    let tokens: usize = samples.iter().map(|s| s.ids.len()).sum();
    let prompts: usize = samples.iter().map(|s| s.prompt_ids.len()).sum();
    assert_eq!(stats.metrics["truncated_ratio"], 0.2);
    assert_eq!(stats.metrics["completion_length"], tokens as f64 / 10.0);
    assert_eq!(stats.metrics["terminated_length"], (tokens - 9) as f64 / 8.0);
    assert!(stats.metrics["completion_length_max"] >= f64::from(longest));
    assert_eq!(stats.metrics["terminated_length_min"], f64::from(shortest));
    assert_eq!(stats.metrics["num_tokens"], (tokens + prompts) as f64);
    // As if they had never been there, normaliser included.
    samples.retain(|sample| !sample.truncated);
    other.step(&samples, 9, 16).unwrap();
    for (a, b) in learner.adapter().unwrap().values().zip(other.adapter().unwrap().values()) {
        for (a, b) in values(a).iter().zip(values(b)) {
            assert!((a - b).abs() < 1e-4, "{a} against {b}");
        }
    }
}

#[test]
fn a_sampler_correction_takes_the_ratio_against_the_first_pass() {
    let mut config = TrainConfig { num_iterations: 3, ..tiny_config() };
    config.sampler_correction.mode = CorrectionMode::TokenTruncate;
    config.lora.dropout = 0.2;
    let mut learner = tiny_learner(&config);
    let mut samples = batch(3);
    record(&learner, &mut samples, 0.2, 1);
    let stats = learner.step(&samples, 1, 16).unwrap();
    // The weights are of the same old log-probabilities in every pass.
    let get = |name: &str| stats.metrics[name];
    let bound = 0.2_f64.exp() + 1e-4;
    assert!(get("sampler_ratio_max") < bound && get("sampler_ratio_max") > 1.1);
    assert!(get("sampler_ratio_min") > 1.0 / bound && get("sampler_ratio_min") < 0.9);
    assert!(get("sampler_difference_max") < 0.2 + 1e-5);
    // What the updates moved is in the ratio.
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
}

#[test]
fn several_iterations_update_as_often_on_the_same_samples() {
    let config = TrainConfig { num_iterations: 3, ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let mut samples = batch(5);
    record(&learner, &mut samples, 0.0, 0);
    let stats = learner.step(&samples, 1, 16).unwrap();
    assert_eq!(learner.step_count(), 1);
    // The later passes are off policy, the comparison with the sampler is not.
    assert!(stats.metrics["ratio_max"] > 1.001);
    assert!(stats.metrics["sampler_difference_max"] < 1e-5);
    assert_eq!(stats.metrics["samples"], 10.0);
}

/// Everything on: adaptive coefficients, sampler correction, entropy quantile, dropout, warm-up, decay, weight decay, iterations, micro-batches.
fn busy_config() -> TrainConfig {
    let mut config = tiny_config();
    config.lora.dropout = 0.2;
    config.kl.target = 0.001;
    config.kl.horizon = 100.0;
    config.entropy.adaptive = true;
    config.entropy.target = 9.0;
    config.sampler_correction.mode = CorrectionMode::SequenceMask;
    config.top_entropy_quantile = 0.8;
    TrainConfig {
        seed: 7,
        schedule: ScheduleKind::Cosine,
        warmup_steps: 2,
        total_steps: 20,
        weight_decay: 0.01,
        num_iterations: 2,
        micro_batch: 4,
        ..config
    }
}

#[test]
fn an_interrupted_run_goes_on_to_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = tiny_learner(&busy_config());
    let mut first = tiny_learner(&busy_config());
    for step in 0..3 {
        whole.step(&batch(step), 9, 16).unwrap();
        first.step(&batch(step), 9, 16).unwrap();
    }
    let path = step_dir(dir.path(), 3);
    let extra = json!({"cursor": "0190", "seen": 3});
    first.save(&path, &extra).unwrap();
    drop(first);
    let mut second = tiny_learner(&TrainConfig { seed: 1234, ..busy_config() });
    assert_eq!(second.load(&path).unwrap(), extra);
    assert_eq!(second.step_count(), 3);
    for step in 3..6 {
        let a = whole.step(&batch(step), 9, 16).unwrap();
        let b = second.step(&batch(step), 9, 16).unwrap();
        assert_eq!(a, b);
        // Two updates a step.
        assert!((a.metrics["entropy_coef"] - 0.01 * (step + 1) as f64).abs() < 1e-12);
        assert!(a.metrics["beta"] != 0.1);
    }
    assert_eq!(bits(&whole), bits(&second));
}

#[test]
fn roll_back_restores_the_policy_and_forgets_the_moments() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&tiny_config());
    let fresh = bits(&learner);
    learner.step(&batch(1), 9, 16).unwrap();
    let first = bits(&learner);
    learner.snapshot().unwrap().write(dir.path(), "tiny").unwrap();
    learner.step(&batch(2), 9, 16).unwrap();
    let second = bits(&learner);
    assert_ne!(first, second);
    learner.reset_to(Some(dir.path())).unwrap();
    assert_eq!(bits(&learner), first);
    assert_eq!(learner.step_count(), 2);
    // Without the old moments the same batch gives another step than before.
    learner.step(&batch(2), 9, 16).unwrap();
    assert_ne!(bits(&learner), second);
    learner.reset_to(None).unwrap();
    assert_eq!(bits(&learner), fresh);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut narrow = tiny_config();
    narrow.lora.target_modules = ["q_proj"].into();
    tiny_learner(&narrow).snapshot().unwrap().write(&dir.path().join("narrow"), "tiny").unwrap();
    tiny_learner(&narrow).save(&dir.path().join("step-1"), &json!(null)).unwrap();
    let mut learner = tiny_learner(&tiny_config());
    let before = bits(&learner);
    let error = learner.reset_to(Some(&dir.path().join("narrow"))).unwrap_err();
    assert!(
        error.to_string().contains("it has nothing on model.layers.0.mlp.down_proj, which"),
        "{error}"
    );
    let error = learner.load(&dir.path().join("step-1")).unwrap_err();
    assert!(
        error.to_string().contains("it has nothing on model.layers.0.mlp.down_proj, which"),
        "{error}"
    );
    let error = learner.reset_to(Some(&dir.path().join("nothing"))).unwrap_err();
    assert!(error.to_string().contains("adapter_config.json"), "{error}");
    let config = dir.path().join("narrow").join(peft::CONFIG_FILE);
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"use_dora\": false", "\"use_dora\": true")).unwrap();
    let error = learner.reset_to(Some(&dir.path().join("narrow"))).unwrap_err();
    assert!(error.to_string().contains("`use_dora` is true, which is not supported"), "{error}");
    assert_eq!(bits(&learner), before);
}

#[test]
fn a_checkpoint_of_another_base_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = step_dir(dir.path(), 1);
    tiny_learner(&tiny_config()).save(&path, &json!({})).unwrap();
    let mut weights = hone_model::testing::tiny_weights(DType::F32);
    let norm = weights["model.norm.weight"].clone();
    weights.insert("model.norm.weight".to_owned(), (norm * 1.5).unwrap());
    let model = Model::new(crate::testing::tiny_spec(), weights).unwrap();
    let mut other = Learner::with_model(model, &tiny_config()).unwrap();
    let error = other.load(&path).unwrap_err();
    assert!(error.to_string().contains("belongs to another base model"), "{error}");
}

fn damage(path: &Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn torn_checkpoints_are_clear_errors() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&tiny_config());
    learner.step(&batch(1), 9, 16).unwrap();
    let mut error = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = step_dir(dir.path(), 1);
        learner.save(&path, &json!({})).unwrap();
        damage(&path.join(name), change);
        let before = bits(&learner);
        let error = learner.load(&path).unwrap_err();
        assert_eq!(bits(&learner), before, "{name}");
        assert!(matches!(error, LearnError::Checkpoint { .. }), "{error}");
        error.to_string()
    };
    let half = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let flip = |bytes: &mut Vec<u8>| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    };
    assert!(error("state.json", &half).contains("state.json"));
    assert!(error("adapter.safetensors", &half).contains("is not the file that was saved"));
    assert!(error("moments.safetensors", &flip).contains("is not the file that was saved"));
    let foreign = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(bytes.clone())
            .unwrap()
            .replace("hone-checkpoint", "something")
            .into_bytes();
    };
    assert!(error("state.json", &foreign).contains("`format` is `something`"));
    let path = step_dir(dir.path(), 1);
    learner.save(&path, &json!({})).unwrap();
    std::fs::remove_file(path.join("moments.safetensors")).unwrap();
    assert!(learner.load(&path).unwrap_err().to_string().contains("moments.safetensors"));
}

#[test]
fn an_interrupted_save_leaves_the_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(latest(dir.path()).unwrap(), None);
    assert_eq!(latest(&dir.path().join("nowhere")).unwrap(), None);
    let learner = tiny_learner(&tiny_config());
    for step in [1, 2, 10, 9] {
        learner.save(&step_dir(dir.path(), step), &json!(step)).unwrap();
    }
    // What a killed process leaves: a temporary directory, half written.
    let torn = dir.path().join(".step-000000000011.tmp");
    std::fs::create_dir(&torn).unwrap();
    std::fs::write(torn.join("state.json"), "{").unwrap();
    assert_eq!(latest(dir.path()).unwrap(), Some(step_dir(dir.path(), 10)));
    prune(dir.path(), 2).unwrap();
    let kept = list(dir.path()).unwrap();
    assert_eq!(kept, vec![step_dir(dir.path(), 9), step_dir(dir.path(), 10)]);
    assert!(!torn.exists());
    // Saving again in the same place replaces it.
    learner.save(&step_dir(dir.path(), 10), &json!("again")).unwrap();
    let mut other = tiny_learner(&tiny_config());
    assert_eq!(other.load(&step_dir(dir.path(), 10)).unwrap(), json!("again"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let message = |change: &dyn Fn(&mut TrainConfig)| {
        let mut config = tiny_config();
        change(&mut config);
        Learner::with_model(tiny_model(DType::F32), &config).err().unwrap().to_string()
    };
    assert_eq!(message(&|c| c.lora.r = 0), "`train.lora.r` is 0, but must be at least 1");
    assert!(message(&|c| c.micro_batch = 0).contains("train.micro_batch"));
    assert!(message(&|c| c.num_iterations = 0).contains("train.num_iterations"));
    assert!(message(&|c| c.lora.dropout = 1.0).contains("train.lora.dropout"));
    assert!(
        message(&|c| c.lora.target_modules = Modules::Names(Vec::new())).contains("target_modules")
    );
}

#[test]
fn adapters_are_named_shaped_and_seeded_as_peft_has_them() {
    let learner = tiny_learner(&tiny_config());
    let tensors = learner.adapter().unwrap();
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

#[test]
fn scores_do_not_depend_on_what_else_is_in_the_batch() {
    let learner = tiny_learner(&tiny_config());
    let mut samples = batch(6);
    record(&learner, &mut samples, 0.0, 0);
    let mut trained = tiny_learner(&tiny_config());
    let stats = trained.step(&samples, 1, 16).unwrap();
    assert!(stats.metrics["sampler_difference_max"] < 1e-5);
    let policy = learner.snapshot().unwrap();
    assert!(policy.score(&[], &[1], 1.0).is_err());
    assert!(policy.score(&[1], &[999], 1.0).is_err());
}

/// Writes what `tests/reference/check_peft.py` reads.
#[test]
#[ignore = "its result is for Python"]
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
