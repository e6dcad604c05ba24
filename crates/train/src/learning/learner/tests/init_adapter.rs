//! Learners that start from an adapter directory.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};
use serde_json::json;

use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, Patterns, peft};
use hone_model::testing::{randomize, tiny_model, tiny_spec, values};

use crate::config::{KlConfig, TrainConfig};
use crate::error::Result;
use crate::learning::learner::Learner;
use crate::testing::{random_samples, tiny_config};

fn patterns<T: Copy>(list: &[(&str, T)]) -> Patterns<T> {
    list.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect()
}

/// Settings that give modules different ranks and scales.
fn varied() -> LoraConfig {
    LoraConfig {
        use_rslora: true,
        exclude_modules: ["layers.1.mlp.up_proj", "v_proj"].into(),
        rank_pattern: patterns(&[("q_proj", 3), ("layers\\.0\\.self_attn\\..*", 5)]),
        alpha_pattern: patterns(&[("down_proj", 1.5)]),
        ..tiny_config().lora
    }
}

/// Writes an adapter directory with random values.
fn written(dir: &Path, config: &LoraConfig) -> LoraWeights {
    let mut rng = rand::SeedableRng::seed_from_u64(5);
    let lora =
        LoraWeights::fresh(&tiny_spec(), config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    randomize(&lora, 5);
    peft::write(dir, &lora, config, "tiny").unwrap();
    lora
}

fn all_values(lora: &LoraWeights) -> BTreeMap<String, Vec<f64>> {
    lora.parameters().into_iter().map(|(name, var)| (name, values(var))).collect()
}

/// A learner that starts from an adapter directory.
fn from(dir: &Path, lora: LoraConfig) -> Result<Learner> {
    let lora = LoraConfig { init_adapter: dir.to_owned(), ..lora };
    Learner::with_model(tiny_model(DType::F32), &TrainConfig { lora, ..tiny_config() })
}

#[test]
fn a_run_starts_from_an_adapter_and_takes_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let lora = written(dir.path(), &varied());
    let mut learner =
        from(dir.path(), LoraConfig { dropout: 0.1, ..LoraConfig::default() }).unwrap();
    assert_eq!(all_values(learner.served()), all_values(&lora));
    assert_eq!(learner.config.lora.dropout, 0.1);
    assert!(learner.step(&random_samples(6, 1), 9, 16).unwrap().skipped.is_none());
    assert_ne!(all_values(learner.served()), all_values(&lora));
    // Checkpoints and rollback have the adapter's shape too.
    let path = dir.path().join("step-000000000001");
    learner.save(&path, &json!(null)).unwrap();
    let mut resumed = from(dir.path(), LoraConfig::default()).unwrap();
    resumed.load(&path).unwrap();
    assert_eq!(all_values(resumed.served()), all_values(learner.served()));
    resumed.reset_to(None).unwrap();
    assert_eq!(resumed.served().module_scales(), lora.module_scales());
}

#[test]
fn a_key_that_contradicts_the_adapter_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &tiny_config().lora);
    let message = |lora: LoraConfig| from(dir.path(), lora).err().unwrap().to_string();
    let error = message(LoraConfig { r: 8, ..LoraConfig::default() });
    assert!(error.contains("its r is 2, but `train.lora.r` is 8"), "{error}");
    let error = message(LoraConfig { use_rslora: true, ..LoraConfig::default() });
    assert!(error.contains("its use_rslora is false, but"), "{error}");
    // Keys that agree with the adapter are allowed.
    assert!(from(dir.path(), LoraConfig { r: 2, alpha: 4.0, ..LoraConfig::default() }).is_ok());
}

/// The KL that a step reports, which is to the reference before the step.
fn kl(learner: &mut Learner, seed: u64) -> f64 {
    learner.step(&random_samples(6, seed), u64::MAX, 16).unwrap().metrics["kl"]
}

#[test]
fn the_adapter_to_start_from_is_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &varied());
    let start = || from(dir.path(), LoraConfig::default()).unwrap();
    let mut learner = start();
    assert!(kl(&mut learner, 1).abs() < 1e-9);
    assert!(kl(&mut learner, 2) > 1e-6);
    // A checkpoint restores it, also where another adapter is configured by then.
    let saved = dir.path().join("step-000000000002");
    learner.save(&saved, &json!(null)).unwrap();
    let other = tempfile::tempdir().unwrap();
    let lora = written(other.path(), &varied());
    randomize(&lora, 6);
    peft::write(other.path(), &lora, &varied(), "tiny").unwrap();
    let mut resumed = from(other.path(), LoraConfig::default()).unwrap();
    resumed.load(&saved).unwrap();
    assert_eq!(kl(&mut resumed, 3), kl(&mut learner, 3), "bit for bit");
    // So do a return to a version, and a rollback to the adapter itself.
    learner.return_to(&saved).unwrap();
    resumed.return_to(&saved).unwrap();
    assert_eq!(kl(&mut resumed, 4), kl(&mut learner, 4), "bit for bit");
    learner.reset_to(Some(dir.path())).unwrap();
    assert!(kl(&mut learner, 5).abs() < 1e-9);
    // The base is not the reference.
    learner.reset_to(None).unwrap();
    assert!(kl(&mut learner, 6) > 1e-6);
}

#[test]
fn synchronization_starts_from_the_adapter() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &varied());
    let with = |sync_mixup| {
        let lora = LoraConfig { init_adapter: dir.path().to_owned(), ..LoraConfig::default() };
        let kl = KlConfig { sync_steps: 2, sync_mixup, ..KlConfig::default() };
        let config = TrainConfig { lora, kl, ..tiny_config() };
        Learner::with_model(tiny_model(DType::F32), &config).unwrap()
    };
    let kls = |mut learner: Learner| [1, 2, 3].map(|seed| kl(&mut learner, seed));
    let (full, partial) = (kls(with(1.0)), kls(with(0.5)));
    let fixed = kls(from(dir.path(), LoraConfig::default()).unwrap());
    assert!(full[0].abs() < 1e-9 && full[2].abs() < 1e-9, "{full:?}");
    assert_eq!(fixed[..2], partial[..2]);
    assert!(partial[2] > 1e-9 && partial[2] < fixed[2], "{partial:?} of {fixed:?}");
}
