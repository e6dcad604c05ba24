//! GGUF files that gguf made (`tests/reference/gguf/make_gguf.py`) against the models that they were made
//! from, and quantized ones against transformers with the dequantized weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;

use hone_core::digest::sha256;

use super::{dequantized, results};
use crate::adapter::BaseDtype;
use crate::spec::family::tests::spec;
use crate::testing::{test_file, tiny_spec, values};
use crate::weights::{BlockFormat, LoadOptions, WeightFiles, WeightType};
use crate::{Model, ModelDir, ModelSpec};

fn gguf(name: &str) -> PathBuf {
    test_file("fixtures/gguf").join(format!("{name}.gguf"))
}

/// The model of a file, by the shape of the model that it was made from.
fn model(spec: &ModelSpec, file: PathBuf) -> Model {
    Model::load(spec.clone(), &[file], BaseDtype::Auto, &Device::Cpu).unwrap()
}

/// GGUF files with floats, and the family that each was made from.
const FLOATS: [(&str, &str); 8] = [
    ("llama2-f32", "llama2"),
    ("llama3-bf16", "llama3"),
    ("mistral-f16", "mistral"),
    ("qwen3-f32", "qwen3"),
    ("gemma2-f32", "gemma2"),
    ("phi3-f32", "phi3"),
    ("phi3-longrope-bf16", "phi3-longrope"),
    ("smollm3-f32", "smollm3"),
];

fn logits(model: &Model) -> Vec<f64> {
    let ids = Tensor::new(&[[5_u32, 9, 2, 77, 3, 11, 64, 30]], &Device::Cpu).unwrap();
    values(&model.forward(&ids, None, None).unwrap())
}

#[test]
fn weights_of_every_family_equal_those_of_safetensors_files() {
    for (file, family) in FLOATS {
        let spec = spec(family);
        let dir = ModelDir::open(&test_file("fixtures/families").join(family)).unwrap();
        let expected =
            Model::load(spec.clone(), &dir.weights, BaseDtype::Auto, &Device::Cpu).unwrap();
        let found = model(&spec, gguf(file));
        assert_eq!(found.embedding().stored(), expected.embedding().stored(), "{file}");
        let (found, expected) = (logits(&found), logits(&expected));
        if family == "gemma2" {
            // Its norms are stored with 1 added, which rounds them.
            let differences = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            let largest = differences.fold(0.0, f64::max);
            assert!(largest < 1e-5, "{file}: {largest:e}");
        } else {
            assert_eq!(found, expected, "{file}: bit for bit");
        }
    }
    let path = test_file("fixtures/qwen2-tiny/model.safetensors");
    let expected = Model::load(tiny_spec(), &[path], BaseDtype::Auto, &Device::Cpu).unwrap();
    assert_eq!(logits(&model(&tiny_spec(), gguf("qwen2-f32"))), logits(&expected));
}

#[test]
fn metadata_describe_the_model_that_the_file_was_made_from() {
    let found =
        |file: &str| ModelSpec::from_config(&ModelDir::open(&gguf(file)).unwrap().config).unwrap();
    assert_eq!(found("qwen2-f32"), tiny_spec());
    for (file, family) in FLOATS {
        let mut expected = spec(family);
        // What files do not hold: llama.cpp has fixed values.
        match family {
            "mistral" => expected.layers.iter_mut().for_each(|layer| layer.window = None),
            "gemma2" => expected.attention_scale = 1.0 / 16_f64.sqrt(),
            "smollm3" => {
                let layers = expected.layers.iter_mut().enumerate();
                layers.for_each(|(i, layer)| layer.rope = i != 3);
            }
            _ => {}
        }
        assert_eq!(found(file), expected, "{file}");
    }
}

/// `tests/reference/gguf/gguf_cases.json`.
#[derive(Deserialize)]
struct GgufCases {
    files: BTreeMap<String, GgufCase>,
}

#[derive(Deserialize)]
struct GgufCase {
    config: Value,
    /// SHA-256 of the matrices' dequantized values.
    matrices: BTreeMap<String, String>,
}

fn cases() -> GgufCases {
    let text = fs::read(test_file("reference/gguf/gguf_cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

#[test]
fn quantized_values_are_bit_for_bit_those_of_gguf() {
    let mut formats = Vec::new();
    for (name, case) in cases().files {
        let spec = ModelSpec::from_config(&case.config).unwrap();
        let files = WeightFiles::open(&spec, &[gguf(&name)]).unwrap();
        let weights = files.load_all(&spec, &LoadOptions::default(), &Device::Cpu).unwrap();
        for (matrix, expected) in case.matrices {
            let found = weights[&matrix].to_float().unwrap().to_dtype(DType::F32).unwrap();
            let found = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let bytes: Vec<u8> = found.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(sha256(bytes), expected, "{name}: {matrix}");
            formats.extend(match weights[&matrix].stored() {
                WeightType::Blocks(format) => Some(format),
                WeightType::Float(_) => None,
            });
        }
    }
    formats.sort();
    formats.dedup();
    let mut all = BlockFormat::ALL;
    all.sort();
    assert_eq!(formats, all);
}

#[test]
fn quantized_models_equal_transformers_with_the_dequantized_weights() {
    let path = test_file("reference/gguf/gguf_logits.safetensors");
    let reference = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    for (name, case) in cases().files {
        let spec = ModelSpec::from_config(&case.config).unwrap();
        let model = model(&spec, gguf(&name));
        let ids = reference[&format!("{name}.ids")].to_dtype(DType::U32).unwrap();
        let logits = values(&model.forward(&ids, None, None).unwrap());
        let expected = values(&reference[&format!("{name}.logits")]);
        let largest = expected.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        let difference =
            logits.iter().zip(&expected).fold(0.0_f64, |max, (a, b)| max.max((a - b).abs()));
        assert!(largest > 0.5, "{name}: {largest}");
        assert!(difference < 1e-5 * largest.max(1.0), "{name}: {difference:e} of {largest}");

        let wide = dequantized(&spec, &[gguf(&name)], LoadOptions::default());
        assert_eq!(results(&model).0, results(&wide).0, "{name}: bit for bit");
        let options = BaseDtype::Float32;
        let float32 = Model::load(spec, &[gguf(&name)], options, &Device::Cpu).unwrap();
        assert_eq!(results(&float32).0, results(&wide).0, "{name}: bit for bit");
    }
}

#[test]
fn other_types_and_missing_tensors_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let mut bytes = fs::read(gguf("llama2-q4_0")).unwrap();
    let name = b"blk.1.ffn_up.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // After the name: the number of dimensions, two dimensions, then the type. 13 is Q5_K.
    bytes[at + 20] = 13;
    fs::write(&path, &bytes).unwrap();
    let load =
        || Model::load(spec("llama2"), std::slice::from_ref(&path), BaseDtype::Auto, &Device::Cpu);
    let error = load().unwrap_err().to_string().replace(&path.display().to_string(), "PATH");
    insta::assert_snapshot!(error, @"PATH: tensor blk.1.ffn_up.weight is of type Q5_K; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K");
    bytes[at - 8] = b'o';
    fs::write(&path, &bytes).unwrap();
    let error = load().unwrap_err().to_string();
    insta::assert_snapshot!(error, @"model weights: `model.layers.1.mlp.up_proj.weight` is missing: the file has no tensor `blk.1.ffn_up.weight`");
    let both = [gguf("llama2-f32"), path];
    let error = Model::load(spec("llama2"), &both, BaseDtype::Auto, &Device::Cpu);
    insta::assert_snapshot!(error.unwrap_err(), @"model weights: a model in several GGUF files cannot be read");
}
