//! Adapter directories: the modules, ranks and scales of PEFT, and what is rejected.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use serde_json::{Value, json};

use crate::adapter::weights::{LoraWeights, plan};
use crate::adapter::{LoraConfig, LoraInit, ModuleScale, Modules, peft};
use crate::testing::{all_values, test_file, tiny_spec, values, varied, write_adapter};
use crate::{ModelSpec, Result};

/// All linear layers with rank 2.
fn rank_two() -> LoraConfig {
    LoraConfig { r: 2, alpha: 4.0, ..LoraConfig::default() }
}

/// [`plan`] by module name.
pub(crate) fn named_plan(
    spec: &ModelSpec,
    config: &LoraConfig,
) -> Result<BTreeMap<String, ModuleScale>> {
    let plan = plan(spec, config)?.into_iter();
    Ok(plan.map(|((layer, kind), module)| (kind.module(layer), module)).collect())
}

fn read(dir: &Path) -> Result<(LoraConfig, LoraWeights)> {
    peft::read(dir, &tiny_spec(), DType::F32, &Device::Cpu)
}

#[test]
fn modules_ranks_and_scales_are_those_of_peft() {
    let text = fs::read_to_string(test_file("reference/peft/peft_rules.json")).unwrap();
    // The settings as text, because the order of patterns matters.
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("{\"config\"")).collect();
    assert_eq!(lines.len(), 13);
    let dir = tempfile::tempdir().unwrap();
    for line in lines {
        let (config, _) = line.split_once(", \"modules\"").unwrap();
        let config = config.strip_prefix("{\"config\": ").unwrap();
        fs::write(dir.path().join(peft::CONFIG_FILE), config).unwrap();
        let config = peft::read_config(dir.path()).unwrap();
        let own: BTreeMap<String, (usize, f64)> = named_plan(&tiny_spec(), &config)
            .unwrap()
            .into_iter()
            .map(|(name, module)| (name, (module.r, module.scale)))
            .collect();
        let case: Value = serde_json::from_str(line.trim_end_matches(',')).unwrap();
        let expected: BTreeMap<String, (usize, f64)> =
            serde_json::from_value(case["modules"].clone()).unwrap();
        assert_eq!(own.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{line}");
        for (name, (r, scale)) in &own {
            assert_eq!(*r, expected[name].0, "{name}: {}", case["config"]);
            assert!((scale - expected[name].1).abs() < 1e-12, "{name}: {}", case["config"]);
        }
    }
}

#[test]
fn a_written_adapter_reads_back_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let config = varied(rank_two());
    let lora = write_adapter(dir.path(), &config);
    let (found, again) = read(dir.path()).unwrap();
    assert_eq!(all_values(&again), all_values(&lora));
    assert_eq!(again.module_scales(), lora.module_scales());
    assert_eq!(lora.module_scales()["model.layers.0.self_attn.q_proj"].r, 3);
    assert_eq!(lora.module_scales()["model.layers.0.self_attn.k_proj"].r, 5);
    // "all-linear" becomes a list of names; the rest is unchanged.
    assert!(matches!(&found.target_modules, Modules::Names(names) if names.len() == 6));
    assert_eq!(LoraConfig { target_modules: Modules::AllLinear, ..found }, config);
}

#[test]
fn adapters_in_16_bits_are_upcast() {
    let dir = tempfile::tempdir().unwrap();
    let lora = write_adapter(dir.path(), &rank_two());
    for dtype in [DType::F16, DType::BF16] {
        let tensors = lora.tensors().unwrap().into_iter();
        let narrow: std::collections::HashMap<_, _> =
            tensors.map(|(name, t)| (name, t.to_dtype(dtype).unwrap())).collect();
        candle_core::safetensors::save(&narrow, dir.path().join(peft::WEIGHTS_FILE)).unwrap();
        let (_, read) = read(dir.path()).unwrap();
        for (name, var) in read.parameters() {
            assert_eq!(var.dtype(), DType::F32);
            assert_eq!(values(var), values(&narrow[&name]));
        }
    }
}

#[test]
fn options_beyond_a_low_rank_product_are_rejected_by_name() {
    let dir = tempfile::tempdir().unwrap();
    write_adapter(dir.path(), &rank_two());
    let path = dir.path().join(peft::CONFIG_FILE);
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let error = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
        let error = read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")), "{error}");
        error
    };
    assert!(error("use_dora", json!(true)).ends_with("`use_dora` is true, which is not supported"));
    error("bias", json!("lora_only"));
    error("modules_to_save", json!(["lm_head"]));
    error("trainable_token_indices", json!([1, 2]));
    error("lora_bias", json!(true));
    error("fan_in_fan_out", json!(true));
    error("megatron_config", json!({"x": 1}));
    error("layer_replication", json!([[0, 1]]));
    error("target_parameters", json!(["experts.up"]));
    error("alora_invocation_tokens", json!([3]));
    error("layers_pattern", json!("blocks"));
    error("peft_type", json!("LOHA"));
    for start in ["pissa", "pissa_niter_4", "olora", "loftq", "corda"] {
        let error = error("init_lora_weights", json!(start));
        assert!(
            error.contains(&format!("\"{start}\", which changes the base's weights")),
            "{error}"
        );
    }
}

#[test]
fn errors_name_the_modules_of_another_models_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let lora = write_adapter(dir.path(), &rank_two());
    let mut tensors: std::collections::HashMap<_, _> =
        lora.tensors().unwrap().into_iter().collect();
    let name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight";
    let moved = tensors.remove(name).unwrap();
    tensors.insert(name.replace("layers.1.mlp", "layers.9.mlp"), moved);
    candle_core::safetensors::save(&tensors, dir.path().join(peft::WEIGHTS_FILE)).unwrap();
    let error = read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("on `model.layers.9.mlp.up_proj`, which the model does not"), "{error}");

    let config = LoraConfig { target_modules: ["q_proj", "w1"].into(), ..rank_two() };
    let error = named_plan(&tiny_spec(), &config).unwrap_err().to_string();
    assert_eq!(
        error,
        "`train.lora.target_modules` names `w1`, but the model has no such linear layer"
    );
    let config = LoraConfig { target_modules: Modules::Pattern(".*lm_head".to_owned()), ..config };
    let error = named_plan(&tiny_spec(), &config).unwrap_err().to_string();
    assert!(error.contains("`train.lora.target_modules` is \".*lm_head\""), "{error}");
}

#[test]
fn pickles_are_rejected_by_name() {
    let dir = tempfile::tempdir().unwrap();
    write_adapter(dir.path(), &rank_two());
    let path = dir.path().join(peft::WEIGHTS_FILE);
    fs::rename(path, dir.path().join("adapter_model.bin")).unwrap();
    let error = read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("adapter_model.bin is a pickle"), "{error}");
}

#[test]
fn gaussian_initial_values_have_a_deviation_of_one_over_the_rank() {
    let config = LoraConfig { r: 8, init_weights: LoraInit::Gaussian, ..LoraConfig::default() };
    let mut rng = rand::SeedableRng::seed_from_u64(1);
    let lora =
        LoraWeights::fresh(&tiny_spec(), &config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    let mut list = Vec::new();
    for (name, var) in lora.parameters() {
        if name.contains("lora_A") {
            list.extend(values(var));
        } else {
            assert!(values(var).iter().all(|x| *x == 0.0));
        }
    }
    let n = list.len() as f64;
    let mean = list.iter().sum::<f64>() / n;
    let deviation = (list.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
    assert!(mean.abs() < 0.02 && (deviation - 0.125).abs() < 0.01, "{mean} {deviation}");
}

/// Copies a directory's files.
pub(crate) fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let files: Vec<PathBuf> = fs::read_dir(from).unwrap().map(|e| e.unwrap().path()).collect();
    for file in files.iter().filter(|file| file.is_file()) {
        fs::copy(file, to.join(file.file_name().unwrap())).unwrap();
    }
}

/// An adapter whose modules differ in rank and scale, in a directory.
pub(crate) fn varied_adapter(dir: &Path) -> (LoraConfig, LoraWeights) {
    let config = varied(rank_two());
    let lora = write_adapter(dir, &config);
    (config, lora)
}
