//! Merging: the logits of base and adapter, one file and shards, and failures that leave no files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

use super::{Precision, merge};
use crate::Model;
use crate::adapter::BaseDtype;
use crate::adapter::peft::tests::{copied, varied_adapter};
use crate::adapter::weights::LoraWeights;
use crate::testing::{load_model, test_file, tiny_model, tiny_spec, tiny_weights, values};

fn base() -> std::path::PathBuf {
    test_file("fixtures/qwen2-tiny")
}

fn logits(model: &Model, lora: Option<&LoraWeights>) -> Vec<f64> {
    let ids = Tensor::new(&[[1_u32, 87, 85, 266, 201, 64, 240, 256]], &Device::Cpu).unwrap();
    values(&model.forward(&ids, lora, None).unwrap())
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn load(dir: &Path) -> Model {
    load_model(dir, BaseDtype::Float32)
}

/// The fixture in two shards with an index, stored as `dtype`, and a hidden file.
fn sharded(dir: &Path, dtype: DType) {
    copied(&base(), dir);
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    fs::write(dir.join(".cache"), "x").unwrap();
    fs::write(dir.join("pytorch_model.bin"), "x").unwrap();
    fs::create_dir(dir.join("more")).unwrap();
    fs::write(dir.join("more/template.jinja"), "{{ x }}").unwrap();
    let mut map = BTreeMap::new();
    let mut halves = [HashMap::new(), HashMap::new()];
    for (i, (name, tensor)) in
        tiny_weights(dtype).into_iter().collect::<BTreeMap<_, _>>().into_iter().enumerate()
    {
        map.insert(name.clone(), format!("model-0000{}-of-00002.safetensors", i % 2 + 1));
        halves[i % 2].insert(name, tensor);
    }
    for (i, half) in halves.iter().enumerate() {
        let name = format!("model-0000{}-of-00002.safetensors", i + 1);
        candle_core::safetensors::save(half, dir.join(name)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 1, "total_parameters": 7}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn a_merged_model_has_the_logits_of_base_and_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let (adapter, out) = (dir.path().join("adapter"), dir.path().join("merged"));
    let (_, lora) = varied_adapter(&adapter);
    let merged = merge(&base(), &adapter, &out, Precision::F32).unwrap();
    assert_eq!(
        (merged.modules, merged.tensors),
        (lora.module_scales().len(), tiny_weights(DType::F32).len())
    );
    let expected = logits(&tiny_model(DType::F32), Some(&lora));
    let found = logits(&load(&out), None);
    assert!(difference(&found, &expected) < 1e-4, "{}", difference(&found, &expected));
    assert!(difference(&found, &logits(&tiny_model(DType::F32), None)) > 0.1);
    // Weights without an adapter equal the base's, and every other file is copied.
    let [before, after] = [base(), out.clone()].map(|dir| {
        candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu).unwrap()
    });
    assert_eq!(before.len(), after.len());
    for (name, tensor) in &before {
        let adapted =
            lora.module_scales().contains_key(name.strip_suffix(".weight").unwrap_or(name));
        let own = tensor.to_dtype(DType::F32).unwrap();
        assert_eq!(difference(&values(&own), &values(&after[name])) > 0.0, adapted, "{name}");
    }
    for entry in fs::read_dir(base()).unwrap() {
        assert!(out.join(entry.unwrap().file_name()).exists());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn shards_keep_their_names_and_types() {
    let dir = tempfile::tempdir().unwrap();
    let [base, adapter, out, wide] =
        ["base", "adapter", "merged", "wide"].map(|name| dir.path().join(name));
    let (_, lora) = varied_adapter(&adapter);
    for dtype in [DType::BF16, DType::F16] {
        for dir in [&base, &out, &wide] {
            let _absent = fs::remove_dir_all(dir);
        }
        sharded(&base, dtype);
        merge(&base, &adapter, &out, Precision::Base).unwrap();
        merge(&base, &adapter, &wide, Precision::F32).unwrap();
        let read = |dir: &Path, i: usize| {
            let name = format!("model-0000{i}-of-00002.safetensors");
            candle_core::safetensors::load(dir.join(name), &Device::Cpu).unwrap()
        };
        for i in [1, 2] {
            let (base, out, wide) = (read(&base, i), read(&out, i), read(&wide, i));
            assert_eq!(base.len(), out.len());
            for (name, tensor) in &wide {
                assert_eq!((tensor.dtype(), out[name].dtype()), (DType::F32, dtype));
                // Summed in f32 and rounded once.
                assert_eq!(values(&tensor.to_dtype(dtype).unwrap()), values(&out[name]), "{name}");
            }
        }
        let expected = logits(&load(&base), Some(&lora));
        assert!(difference(&logits(&load(&wide), None), &expected) < 1e-4);
        assert!(difference(&logits(&load(&out), None), &expected) < 0.5);
    }
    let index = |dir: &Path| -> Value {
        let text = fs::read(dir.join("model.safetensors.index.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    };
    let (before, after) = (index(&base), index(&wide));
    assert_eq!(before["weight_map"], after["weight_map"]);
    assert_eq!(after["metadata"]["total_parameters"], 7);
    let bytes: usize = tiny_weights(DType::F32).values().map(|t| 4 * t.elem_count()).sum();
    assert_eq!(after["metadata"]["total_size"], bytes);
    let config: Value =
        serde_json::from_slice(&fs::read(wide.join("config.json")).unwrap()).unwrap();
    let stored = config.get("dtype").or(config.get("torch_dtype"));
    assert_eq!(stored.unwrap(), "float32");
    assert_eq!(
        fs::read(out.join("config.json")).unwrap(),
        fs::read(base.join("config.json")).unwrap()
    );
    assert_eq!(fs::read(wide.join("more/template.jinja")).unwrap(), b"{{ x }}");
    assert!(!wide.join("pytorch_model.bin").exists() && !wide.join(".cache").exists());
}

#[test]
fn a_failed_merge_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let [own, adapter, out] = ["base", "adapter", "merged"].map(|name| dir.path().join(name));
    copied(&base(), &own);
    let (_, lora) = varied_adapter(&adapter);
    let rejected = |what: &str| {
        let error = merge(&own, &adapter, &out, Precision::Base).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert!(!out.exists() && !dir.path().join(".merged.tmp").exists());
    };
    // A module that the base lacks.
    let weights = adapter.join("adapter_model.safetensors");
    let good = fs::read(&weights).unwrap();
    let config = fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let mut tensors: HashMap<String, Tensor> = lora.tensors().unwrap().into_iter().collect();
    for half in ["lora_A", "lora_B"] {
        let name =
            |layer| format!("base_model.model.model.layers.{layer}.mlp.gate_proj.{half}.weight");
        let tensor = tensors.remove(&name(1)).unwrap();
        tensors.insert(name(5), tensor);
    }
    candle_core::safetensors::save(&tensors, &weights).unwrap();
    rejected("adapter ");
    rejected("`model.layers.5.mlp.gate_proj.weight`");
    // Half a pair.
    tensors.remove("base_model.model.model.layers.5.mlp.gate_proj.lora_B.weight");
    candle_core::safetensors::save(&tensors, &weights).unwrap();
    rejected("layers.5.mlp.gate_proj.lora_B.weight` is missing");
    // A tensor that is not a LoRA tensor.
    tensors.insert(
        "base_model.model.lm_head.weight".to_owned(),
        tensors.values().next().unwrap().clone(),
    );
    candle_core::safetensors::save(&tensors, &weights).unwrap();
    rejected("`base_model.model.lm_head.weight` is not the name of a LoRA tensor");
    fs::write(&weights, &good).unwrap();
    // Settings that do not fit the tensors.
    let path = adapter.join("adapter_config.json");
    fs::write(&path, config.replace("\"q_proj\": 3", "\"q_proj\": 4")).unwrap();
    rejected("self_attn.q_proj has [3, 32] and [32, 3] for rank 4");
    fs::write(&path, config.replace("\"use_dora\": false", "\"use_dora\": true")).unwrap();
    rejected("`use_dora`");
    fs::write(&path, &config).unwrap();
    // A quantized base, and one without weights.
    let text = fs::read_to_string(own.join("config.json")).unwrap();
    let mut quantized: Value = serde_json::from_str(&text).unwrap();
    quantized["quantization_config"] = json!({"quant_method": "gptq"});
    fs::write(own.join("config.json"), quantized.to_string()).unwrap();
    rejected("`quantization_config`");
    fs::write(own.join("config.json"), &text).unwrap();
    fs::rename(own.join("model.safetensors"), own.join("x")).unwrap();
    rejected("has neither model.safetensors nor model.safetensors.index.json");
    fs::rename(own.join("x"), own.join("model.safetensors")).unwrap();
    // An existing target is unchanged.
    fs::create_dir(&out).unwrap();
    let error = merge(&own, &adapter, &out, Precision::Base).unwrap_err().to_string();
    assert!(error.contains("merged") && error.contains("exists"), "{error}");
    fs::remove_dir(&out).unwrap();
    // The temporary directory of an interrupted merge is replaced.
    fs::create_dir(dir.path().join(".merged.tmp")).unwrap();
    merge(&own, &adapter, &out, Precision::Base).unwrap();
    assert!(out.exists() && !dir.path().join(".merged.tmp").exists());
}

#[test]
fn a_gguf_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tiny.gguf");
    fs::copy(test_file("fixtures/gguf/qwen2-q8_0.gguf"), &file).unwrap();
    for base in [file.as_path(), dir.path()] {
        let error = merge(base, dir.path(), &dir.path().join("out"), Precision::Base).unwrap_err();
        let expected = "is a GGUF file: merge into the safetensors model that it was made from";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert!(!dir.path().join("out").exists());
    }
}

#[test]
fn a_value_that_half_precision_cannot_hold_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let [own, adapter, out] = ["base", "adapter", "merged"].map(|name| dir.path().join(name));
    sharded(&own, DType::F16);
    let (config, lora) = varied_adapter(&adapter);
    for (name, var) in lora.parameters() {
        if name.contains("layers.0.mlp.down_proj") {
            var.set(&(var.ones_like().unwrap() * 300.0).unwrap()).unwrap();
        }
    }
    crate::adapter::peft::write(&adapter, &lora, &config, "tiny").unwrap();
    let error = merge(&own, &adapter, &out, Precision::Base).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.mlp.down_proj.weight` is not finite"), "{error}");
    assert!(!out.exists());
    merge(&own, &adapter, &out, Precision::F32).unwrap();
}

/// Writes the input of `tests/clients/check_export.py`.
#[test]
#[ignore = "writes files for a Python test"]
fn an_export_for_python() {
    let dir = std::env::var("HONE_TEST_EXPORT_DIR").unwrap();
    let dir = Path::new(&dir);
    let (adapter, out) = (dir.join("adapter"), dir.join("merged"));
    let (_, lora) = varied_adapter(&adapter);
    merge(&base(), &adapter, &out, Precision::Base).unwrap();
    merge(&base(), &adapter, &dir.join("merged-f32"), Precision::F32).unwrap();
    let (rows, cols) = (3, 9);
    let ids: Vec<u32> =
        (0..rows * cols).map(|i| (i as u32 * 37 + 5) % tiny_spec().vocab_size as u32).collect();
    let ids = Tensor::from_vec(ids, (rows, cols), &Device::Cpu).unwrap();
    let logits = tiny_model(DType::F32).forward(&ids, Some(&lora), None).unwrap();
    let ids = ids.to_dtype(DType::I64).unwrap();
    let tensors = HashMap::from([("ids", ids), ("logits", logits)]);
    candle_core::safetensors::save(&tensors, dir.join("expected.safetensors")).unwrap();
}
