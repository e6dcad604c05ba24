//! Learners that start from an adapter directory.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};
use serde_json::json;

use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, Patterns, peft};
use hone_model::testing::{randomize, tiny_model, tiny_spec, values};

use crate::config::TrainConfig;
use crate::error::Result;
use crate::learning::learner::Learner;
use crate::testing::{random_samples, tiny_config};

fn patterns<T: Copy>(list: &[(&str, T)]) -> Patterns<T> {
    Patterns(list.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect())
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
