//! Quantized models against the same models with their dequantized values in f32, and GGUF files against
//! the safetensors files that they were made from.

mod gguf;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use hone_core::testing::skip_without;

use super::{BaseMatrix, BlockFormat, LoadOptions, Quantize, WeightFiles};
use crate::adapter::LoraConfig;
use crate::adapter::weights::LoraWeights;
use crate::kernels::compute::{Compute, available};
use crate::testing::{
    randomize, relative_difference, test_file, tiny_spec, tiny_weights, values, waves,
};
use crate::transformer::Segments;
use crate::{Model, ModelSpec};

/// A shape whose rows are whole blocks of 256 values, except those of the attention's output.
fn spec() -> ModelSpec {
    ModelSpec::from_config(&json!({
        "model_type": "llama", "vocab_size": 90, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "intermediate_size": 512,
        "tie_word_embeddings": true,
    }))
    .unwrap()
}

fn weight_file(dir: &tempfile::TempDir) -> Vec<PathBuf> {
    let tensors: HashMap<String, Tensor> = spec()
        .weight_shapes()
        .into_iter()
        .enumerate()
        .map(|(i, (name, shape))| {
            let values = waves(shape.iter().product(), i as f32).into_iter();
            let offset = if shape.len() == 1 { 1.0 } else { 0.0 };
            let values: Vec<f32> = values.map(|x| 0.05 * x + offset).collect();
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            (name, tensor.to_dtype(DType::BF16).unwrap())
        })
        .collect();
    let path = dir.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path).unwrap();
    vec![path]
}

/// The same values in f32.
fn dequantized(spec: &ModelSpec, files: &[PathBuf], options: LoadOptions) -> Model {
    let weights = WeightFiles::open(spec, files).unwrap();
    let weights = weights.load_all(spec, &options, &Device::Cpu).unwrap();
    let float = |matrix: BaseMatrix| matrix.to_float().unwrap().to_dtype(DType::F32).unwrap();
    let weights = weights.into_iter().map(|(name, matrix)| (name, float(matrix))).collect();
    Model::new(spec.clone(), weights).unwrap()
}

/// Logits, statistics and the adapter's gradients.
fn results(model: &Model) -> (Vec<f64>, Vec<f64>, BTreeMap<String, Tensor>) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let config = LoraConfig { r: 4, ..LoraConfig::default() };
    let lora =
        LoraWeights::fresh(model.spec(), &config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    randomize(&lora, 4);
    let ids = Tensor::new(&[1_u32, 5, 9, 2, 7, 3, 11], &Device::Cpu).unwrap();
    let logits = model.forward(&ids.unsqueeze(0).unwrap(), Some(&lora), None).unwrap();
    let segments = Arc::new(Segments::batch(1, 7));
    // Activations of one layer are kept, those of the others are recomputed.
    let saved = model.forward_saving(&ids, &segments, &lora, None, 1).unwrap();
    let rows = Tensor::new(&[0_u32, 2, 5], &Device::Cpu).unwrap();
    let stats = model.stats(&saved.hidden().clone(), &rows, &[5, 2, 3], &[1.0, 0.7, 1.3]).unwrap();
    let grad = Tensor::new(&[[0.3_f32, 0.1], [-1.0, 0.0], [0.5, -0.2]], &Device::Cpu).unwrap();
    let gradients = model.backward(saved, &stats, &grad, &lora).unwrap();
    (values(&logits), values(&stats), gradients)
}

#[test]
fn a_quantized_model_computes_with_the_dequantized_values() {
    let (dir, spec) = (tempfile::tempdir().unwrap(), spec());
    let files = weight_file(&dir);
    let mut digests = Vec::new();
    for quantize in Quantize::ALL {
        let options = LoadOptions { quantize, ..LoadOptions::default() };
        let small = Model::load(spec.clone(), &files, options, &Device::Cpu).unwrap();
        let wide = dequantized(&spec, &files, options);
        let ((logits, stats, gradients), expected) = (results(&small), results(&wide));
        assert_eq!(logits, expected.0, "{quantize:?}: bit for bit");
        // The output layer is widened in pieces, so these sums differ in order.
        let stats = stats.iter().zip(&expected.1).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(stats < 1e-4, "{quantize:?}: {stats:e}");
        let difference = relative_difference(&gradients, &expected.2);
        assert!(difference < 1e-4, "{quantize:?}: {difference:e}");
        assert_eq!(small.digest().unwrap(), wide.digest().unwrap());
        digests.push(small.digest().unwrap());
    }
    digests.dedup();
    assert_eq!(digests.len(), 3, "each quantization is another base");
}

/// The largest difference, relative to the largest value.
fn relative(found: &[f64], expected: &[f64]) -> f64 {
    let largest =
        |values: &mut dyn Iterator<Item = f64>| values.fold(0.0_f64, |m, x| m.max(x.abs()));
    let mut differences = found.iter().zip(expected).map(|(a, b)| a - b);
    largest(&mut differences) / largest(&mut expected.iter().copied())
}

#[test]
fn products_in_bf16_are_the_same_for_every_type_in_memory() {
    if available(Compute::Bf16) == Compute::F32 {
        return skip_without("fast products in bf16");
    }
    let (dir, spec) = (tempfile::tempdir().unwrap(), spec());
    let files = weight_file(&dir);
    for quantize in Quantize::ALL {
        let options = LoadOptions { quantize, ..LoadOptions::default() };
        let small = Model::load(spec.clone(), &files, options, &Device::Cpu).unwrap();
        let wide = dequantized(&spec, &files, options);
        let exact = results(&small);
        let [small, wide] = [small, wide].map(|model| model.with_compute(Compute::Bf16));
        assert_eq!(small.compute(), Compute::Bf16);
        let (found, again) = (results(&small), results(&wide));
        assert_eq!((&found.0, &found.1), (&again.0, &again.1), "{quantize:?}: bit for bit");
        assert!(relative_difference(&found.2, &again.2) == 0.0, "{quantize:?}: bit for bit");
        assert_ne!(found.0, exact.0, "{quantize:?}");
        assert_ne!(found.1, exact.1, "{quantize:?}");
    }
}

/// Of a trained model: with the weights above, a token attends almost to one other, and small differences
/// decide which.
#[test]
fn products_in_bf16_change_results_within_bounds() {
    if available(Compute::Bf16) == Compute::F32 {
        return skip_without("fast products in bf16");
    }
    let file = |name: &str| test_file("../models/embedded").join(name);
    let config = std::fs::read(file("config.json")).unwrap();
    let spec = ModelSpec::from_config(&serde_json::from_slice(&config).unwrap()).unwrap();
    let files = [file("model.safetensors")];
    let model = Model::load(spec, &files, LoadOptions::default(), &Device::Cpu).unwrap();
    let exact = results(&model);
    let found = results(&model.with_compute(Compute::Bf16));
    for (name, difference, bound) in [
        ("logits", relative(&found.0, &exact.0), 2e-2),
        ("statistics", relative(&found.1, &exact.1), 2e-2),
        ("gradients", relative_difference(&found.2, &exact.2), 1e-1),
    ] {
        // f32 alone differs by less than 1e-5.
        assert!((1e-5..bound).contains(&difference), "{name}: {difference:e}");
    }
}

#[test]
fn only_the_fused_kernels_compute_in_bf16() {
    let models = [DType::F32, DType::F64].map(|dtype| {
        let weights = tiny_weights(dtype);
        Model::new(tiny_spec(), weights).unwrap().with_compute(Compute::Bf16)
    });
    assert_eq!(models[0].compute(), available(Compute::Bf16));
    assert_eq!(models[1].compute(), Compute::F32);
    let variables: HashMap<String, Tensor> = tiny_weights(DType::F32)
        .into_iter()
        .map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap().into_inner()))
        .collect();
    let trained = Model::new(tiny_spec(), variables).unwrap().with_compute(Compute::Bf16);
    assert_eq!(trained.compute(), Compute::F32);
}

#[test]
fn rows_are_selected_by_id() {
    let blocks: Vec<u8> =
        (0..4_u8).flat_map(|row| [[0, 60].to_vec(), vec![row; 32]].concat()).collect();
    let matrix = super::QuantizedMatrix::new(BlockFormat::Q8_0, (4, 32), blocks).unwrap();
    let matrix = BaseMatrix::from(matrix);
    let ids = Tensor::new(&[3_u32, 0, 3], &Device::Cpu).unwrap();
    let rows = matrix.select_rows(&ids, DType::F64).unwrap();
    // The scale is 1.
    assert_eq!(values(&rows), [[3.0; 32], [0.0; 32], [3.0; 32]].concat());
    assert_eq!(values(&matrix.to_float().unwrap().get(2).unwrap()), [2.0; 32]);
    assert_eq!(matrix.first_values(40).unwrap(), [vec![0.0; 32], vec![1.0; 8]].concat());
    let outside = Tensor::new(&[4_u32], &Device::Cpu).unwrap();
    assert!(matrix.select_rows(&outside, DType::F32).is_err());
}

#[test]
fn quantized_weights_need_the_fused_kernels() {
    let mut weights: HashMap<String, BaseMatrix> =
        tiny_weights(DType::F32).into_iter().map(|(name, w)| (name, w.into())).collect();
    let name = "model.layers.0.mlp.up_proj.weight".to_owned();
    let shape = (48, 32);
    let blocks = super::QuantizedMatrix::new(BlockFormat::Q8_0, shape, vec![0; 48 * 34]).unwrap();
    weights.insert(name, blocks.into());
    assert!(Model::new(tiny_spec(), weights.clone()).is_ok());
    let norm = "model.norm.weight".to_owned();
    let trained = Var::ones(32, DType::F32, &Device::Cpu).unwrap();
    weights.insert(norm.clone(), trained.as_tensor().clone().into());
    let error = Model::new(tiny_spec(), weights.clone()).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"quantized weights can be used on the CPU only, and with no weight of the base trained");
    let blocks = super::QuantizedMatrix::new(BlockFormat::Q8_0, (1, 32), vec![0; 34]).unwrap();
    weights.insert(norm, blocks.into());
    let error = Model::new(tiny_spec(), weights).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"model weights: `model.norm.weight` has shape [1, 32], but config.json requires [32]");
}
