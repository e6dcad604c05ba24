//! Learners that start from an adapter directory.

use std::path::Path;

use candle_core::DType;
use serde_json::{Value, json};

use hone_model::adapter::{LoraConfig, peft};
use hone_model::testing::{all_values, randomize, tiny_model, write_adapter};

use crate::config::{KlConfig, PeakRate, TrainConfig};
use crate::error::Result;
use crate::learning::learner::Learner;
use crate::testing::{random_samples, tiny_config, tiny_learner};

/// Settings that give modules different ranks and scales.
fn varied() -> LoraConfig {
    hone_model::testing::varied(tiny_config().lora)
}

/// A learner that starts from an adapter directory.
fn from(dir: &Path, lora: LoraConfig) -> Result<Learner> {
    let lora = LoraConfig { init_adapter: dir.to_owned(), ..lora };
    Learner::with_model(tiny_model(DType::F32), &TrainConfig { lora, ..tiny_config() })
}

#[test]
fn a_run_starts_from_an_adapter_and_takes_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let lora = write_adapter(dir.path(), &varied());
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
    write_adapter(dir.path(), &tiny_config().lora);
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
    write_adapter(dir.path(), &varied());
    let start = || from(dir.path(), LoraConfig::default()).unwrap();
    let mut learner = start();
    assert!(kl(&mut learner, 1).abs() < 1e-9);
    assert!(kl(&mut learner, 2) > 1e-6);
    // A checkpoint restores it, also where another adapter is configured by then.
    let saved = dir.path().join("step-000000000002");
    learner.save(&saved, &json!(null)).unwrap();
    let other = tempfile::tempdir().unwrap();
    let lora = write_adapter(other.path(), &varied());
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
    write_adapter(dir.path(), &varied());
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

fn config(sync_steps: u64, sync_mixup: f64) -> TrainConfig {
    TrainConfig {
        beta: 0.1,
        learning_rate: PeakRate::Fixed(0.05),
        kl: KlConfig { sync_steps, sync_mixup, ..KlConfig::default() },
        ..tiny_config()
    }
}

/// The KL that each step reports, which is to the reference before the step.
fn kls(learner: &mut Learner, steps: u64) -> Vec<f64> {
    let step = |seed| learner.step(&random_samples(4, seed), u64::MAX, 12).unwrap().metrics["kl"];
    (0..steps).map(step).collect()
}

#[test]
fn the_kl_is_to_the_base_until_the_first_synchronization() {
    let mut fixed = tiny_learner(&config(0, 0.6));
    let base = kls(&mut fixed, 5);
    assert!(base[0].abs() < 1e-12 && base[4] > 1e-6, "{base:?}");

    // A full synchronization every second step: the third step's KL is to the policy itself.
    let mut full = tiny_learner(&config(2, 1.0));
    let own = kls(&mut full, 5);
    assert_eq!(own[..2], base[..2]);
    assert!(own[2].abs() < 1e-12, "{own:?}");
    assert!(own[3] > 1e-9 && own[4].abs() < 1e-12, "{own:?}");

    // A partial one is between the base and the policy. Both took the same two steps.
    let mut partial = tiny_learner(&config(2, 0.5));
    let own = kls(&mut partial, 3);
    assert!(own[2] > 1e-9 && own[2] < base[2], "{own:?} of {base:?}");
}

#[test]
fn a_checkpoint_keeps_the_reference_and_a_rollback_resets_it_to_the_base() {
    let synced = config(2, 0.6);
    let mut uninterrupted = tiny_learner(&synced);
    kls(&mut uninterrupted, 3);
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("step-3");
    uninterrupted.save(&saved, &Value::Null).unwrap();
    let mut resumed = tiny_learner(&synced);
    resumed.load(&saved).unwrap();
    assert_eq!(kls(&mut uninterrupted, 3), kls(&mut resumed, 3), "bit for bit");

    uninterrupted.reset_to(None).unwrap();
    assert!(kls(&mut uninterrupted, 1)[0].abs() < 1e-12, "a fresh adapter is the base");
    // Without synchronization the saved reference is ignored.
    let mut fixed = tiny_learner(&config(0, 0.6));
    fixed.load(&saved).unwrap();
    let mut synchronized = tiny_learner(&config(2, 0.6));
    synchronized.load(&saved).unwrap();
    assert_ne!(kls(&mut fixed, 1), kls(&mut synchronized, 1));
}

/// A version without a kept state: its adapter is what the reference would be near.
#[test]
fn a_rollback_to_an_adapter_makes_it_the_synchronized_reference() {
    let dir = tempfile::tempdir().unwrap();
    for (sync_steps, is_near) in [(2, true), (0, false)] {
        let mut learner = tiny_learner(&config(sync_steps, 0.6));
        kls(&mut learner, 5);
        learner.snapshot().unwrap().write(dir.path(), "tiny").unwrap();
        learner.reset_to(Some(dir.path())).unwrap();
        let kl = kls(&mut learner, 1)[0];
        assert_eq!(kl.abs() < 1e-9, is_near, "{sync_steps}: {kl}");
    }
}
