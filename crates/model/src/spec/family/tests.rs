//! Every family against transformers (`tests/reference/models/make_families.py`), and its gradients against
//! finite differences.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::safetensors::load;
use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::adapter::peft::tests::named_plan;
use crate::adapter::weights::LoraWeights;
use crate::adapter::{BaseDtype, LinearKind, LoraConfig, Modules, peft};
use crate::spec::RopeScaling;
use crate::testing::{FAMILIES, family, load_model, randomize, token_stats, values};
use crate::transformer::Segments;
use crate::{Model, ModelDir, ModelSpec};

pub(crate) fn config(name: &str) -> Value {
    let path = family(name).join("config.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub(crate) fn spec(name: &str) -> ModelSpec {
    ModelSpec::from_config(&config(name)).unwrap()
}

fn model(name: &str) -> Model {
    load_model(&family(name), BaseDtype::Float32)
}

/// The model in double precision.
pub(crate) fn model64(name: &str) -> Model {
    Model::new(spec(name), weights64(name)).unwrap()
}

fn weight_files(name: &str) -> Vec<PathBuf> {
    ModelDir::open(&family(name)).unwrap().weights
}

pub(crate) fn weights64(name: &str) -> HashMap<String, Tensor> {
    weight_files(name)
        .iter()
        .flat_map(|file| load(file, &Device::Cpu).unwrap())
        .map(|(name, tensor)| (name, tensor.to_dtype(DType::F64).unwrap()))
        .collect()
}

fn reference(name: &str) -> HashMap<String, Tensor> {
    let path = family(name).join("logits.safetensors");
    load(path, &Device::Cpu).unwrap()
}

fn ids(name: &str) -> Tensor {
    reference(name)["ids"].to_dtype(DType::U32).unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0.0, |max, (x, y)| max.max((x - y).abs()))
}

#[test]
fn logits_of_every_family_equal_those_of_transformers() {
    for name in FAMILIES {
        let logits = model(name).forward(&ids(name), None, None).unwrap();
        let difference = largest_difference(&logits, &reference(name)["logits"]);
        assert!(difference < 1e-5, "{name}: largest difference {difference:e}");
        assert!(
            values(&logits).iter().any(|x| x.abs() > 1.0),
            "{name}: the logits are not all small"
        );
    }
}

#[test]
fn padding_changes_no_real_position_of_any_family() {
    for name in FAMILIES {
        let model = model(name);
        // Longer than the windows, so that both passes depend on them.
        let short = ids(name).narrow(1, 0, 31).unwrap();
        let alone = model.forward(&short, None, None).unwrap();
        let padded = model.forward(&ids(name), None, None).unwrap().narrow(1, 0, 31).unwrap();
        let difference = largest_difference(&alone, &padded);
        assert!(difference < 1e-5, "{name}: {difference:e}");
    }
}

#[test]
fn every_option_of_a_family_changes_its_logits() {
    type Edit = (&'static str, fn(&mut ModelSpec));
    let edits: [Edit; 9] = [
        ("qwen2", |s| s.layers[2].window = None),
        ("mistral", |s| s.layers[0].window = Some(23)),
        ("llama3", |s| s.rope.scaling = RopeScaling::Default),
        ("llama-biases", |s| s.rope.scaling = RopeScaling::Default),
        ("smollm3", |s| s.layers[1].rope = true),
        ("gemma2", |s| s.attention_softcap = None),
        ("gemma2", |s| s.attention_scale *= 1.1),
        ("phi3-longrope", |s| s.rope.scaling = RopeScaling::Default),
        ("gemma2", |s| s.embedding_scale = None),
    ];
    for (name, edit) in edits {
        let mut other = spec(name);
        edit(&mut other);
        let model =
            Model::load(other, &weight_files(name), BaseDtype::Float32, &Device::Cpu).unwrap();
        let logits = model.forward(&ids(name), None, None).unwrap();
        let difference = largest_difference(&logits, &reference(name)["logits"]);
        assert!(difference > 1e-3, "{name}: {difference:e}");
    }
}

#[test]
fn rotary_frequencies_equal_those_of_transformers() {
    for name in FAMILIES {
        let expected = values(&reference(name)["inv_freq"]);
        let own = spec(name).rope.frequencies();
        assert_eq!(own.len(), expected.len());
        for (own, expected) in own.iter().zip(expected) {
            // One unit in the last place: the power may be rounded up or down.
            let relative = (f64::from(*own) / expected - 1.0).abs();
            assert!(relative < 1.3e-7, "{name}: {own} against {expected}");
        }
    }
}

fn adapter(r: usize) -> LoraConfig {
    LoraConfig { r, alpha: 4.0, ..LoraConfig::default() }
}

fn random_lora(spec: &ModelSpec, dtype: DType) -> LoraWeights {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let lora = LoraWeights::fresh(spec, &adapter(2), &mut rng, dtype, &Device::Cpu).unwrap();
    randomize(&lora, 2);
    lora
}

fn segments(ids: &Tensor) -> Arc<Segments> {
    let (rows, len) = ids.dims2().unwrap();
    Arc::new(Segments::batch(rows, len))
}

/// Log-probabilities and entropies of all next tokens.
fn stats(model: &Model, hidden: &Tensor) -> Tensor {
    let targets: Vec<u32> = (0..hidden.dims()[0]).map(|i| (i * 7 % 100) as u32).collect();
    let logits = model.logits(hidden).unwrap();
    token_stats(&logits, &targets, &vec![1.0; targets.len()])
}

/// Different weights for all statistics; these are the gradients of [`loss`].
fn weights(stats: &Tensor) -> Tensor {
    let count = stats.elem_count();
    let weight = |i| (i as f64 * 0.7 + 0.3).sin() / count as f64;
    Tensor::from_vec((0..count).map(weight).collect(), stats.shape(), &Device::Cpu).unwrap()
}

/// The weighted sum of the statistics.
fn loss(model: &Model, ids: &Tensor, lora: Option<&LoraWeights>) -> Tensor {
    let ids_of_all = ids.flatten_all().unwrap();
    let hidden = model.hidden(&ids_of_all, &segments(ids), lora, None).unwrap();
    let stats = stats(model, &hidden);
    assert_eq!(stats.elem_count(), 2 * ids.elem_count());
    (&stats * weights(&stats)).unwrap().sum_all().unwrap()
}

fn gradients(model: &Model, ids: &Tensor, lora: &LoraWeights) -> BTreeMap<String, Tensor> {
    let ids_of_all = ids.flatten_all().unwrap();
    let saved = model.forward_saving(&ids_of_all, &segments(ids), lora, None, 1).unwrap();
    let stats = stats(model, saved.hidden());
    let weights = weights(&stats);
    model.backward(saved, &stats, &weights, lora).unwrap()
}

/// Compares gradients with central differences along one direction and two single entries of each
/// variable.
fn check(
    name: &str,
    vars: &[(String, Var)],
    gradients: &BTreeMap<String, Tensor>,
    loss: impl Fn() -> Tensor,
) {
    let value = || loss().to_scalar::<f64>().unwrap();
    for (tensor, var) in vars {
        let start = var.as_detached_tensor().copy().unwrap();
        let gradient = gradients.get(tensor);
        let gradient = values(gradient.unwrap_or_else(|| panic!("{name}: {tensor}: none")));
        assert!(gradient.iter().any(|g| g.abs() > 1e-8), "{name}: {tensor} has no gradient");
        let count = gradient.len();
        let mut directions = vec![(0..count).map(|i| ((i * 37 + 11) as f64).sin()).collect()];
        for entry in [count / 3, count - 1] {
            let single: Vec<f64> = (0..count).map(|i| f64::from(u8::from(i == entry))).collect();
            directions.push(single);
        }
        for direction in directions {
            let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let shifted = |step: f64| {
                let shift: Vec<f64> = direction.iter().map(|d| step * d).collect();
                let shift = Tensor::from_vec(shift, start.shape(), &Device::Cpu).unwrap();
                var.set(&(&start + shift).unwrap()).unwrap();
                value()
            };
            let step = 1e-6;
            let measured = (shifted(step) - shifted(-step)) / (2.0 * step);
            assert!(
                (measured - expected).abs() <= 1e-8 + 1e-6 * expected.abs(),
                "{name}: {tensor}: gradient {expected:e}, finite difference {measured:e}"
            );
        }
        var.set(&start).unwrap();
    }
}

#[test]
fn gradients_of_every_adapter_tensor_equal_finite_differences() {
    for name in FAMILIES {
        let model = model64(name);
        let lora = random_lora(model.spec(), DType::F64);
        let vars: Vec<_> = lora.parameters().into_iter().map(|(n, v)| (n, v.clone())).collect();
        let per_layer = model.spec().linears(0).count();
        assert_eq!(vars.len(), 2 * per_layer * model.spec().num_layers);
        let ids = ids(name).narrow(1, 0, 30).unwrap();
        let gradients = gradients(&model, &ids, &lora);
        check(name, &vars, &gradients, || loss(&model, &ids, Some(&lora)));
    }
}

#[test]
fn gradients_of_every_trained_weight_equal_finite_differences() {
    for name in FAMILIES {
        let vars: Vec<(String, Var)> = weights64(name)
            .into_iter()
            .map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap()))
            .collect();
        let tensors = vars.iter().map(|(n, var)| (n.clone(), var.as_tensor().clone())).collect();
        let model = Model::new(spec(name), tensors).unwrap();
        assert_eq!(vars.len(), model.spec().weight_shapes().len(), "{name}: nothing is ignored");
        let ids = ids(name).narrow(1, 0, 30).unwrap();
        let store = loss(&model, &ids, None).backward().unwrap();
        let gradients = vars
            .iter()
            .filter_map(|(name, var)| Some((name.clone(), store.get(var.as_tensor())?.clone())))
            .collect();
        check(name, &vars, &gradients, || loss(&model, &ids, None));
    }
}

#[test]
fn longrope_rejects_sequences_that_need_other_frequencies() {
    let model = model("phi3-longrope");
    let long = Tensor::zeros((1, 65), DType::U32, &Device::Cpu).unwrap();
    assert!(model.forward(&long.narrow(1, 0, 64).unwrap(), None, None).is_ok());
    insta::assert_snapshot!(model.forward(&long, None, None).unwrap_err(), @"a sequence of 65 tokens: with longrope, sequences of more than original_max_position_embeddings = 64 tokens cannot be trained on");
}

#[test]
fn an_adapter_on_fused_projections_is_written_under_their_names_and_reads_back_the_same() {
    let spec = spec("phi3");
    let lora = random_lora(&spec, DType::F32);
    let dir = tempfile::tempdir().unwrap();
    peft::write(dir.path(), &lora, &adapter(2), "base").unwrap();
    let written: Value =
        serde_json::from_slice(&fs::read(dir.path().join(peft::CONFIG_FILE)).unwrap()).unwrap();
    let names = json!(["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]);
    assert_eq!(written["target_modules"], names);
    let tensors = load(dir.path().join(peft::WEIGHTS_FILE), &Device::Cpu).unwrap();
    let b = &tensors["base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"];
    assert_eq!(b.dims(), [64, 2]);
    let (_, read) = peft::read(dir.path(), &spec, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(read.module_scales(), lora.module_scales());
    for ((name, own), (_, found)) in lora.parameters().iter().zip(read.parameters()) {
        assert_eq!(values(own), values(found), "{name}");
    }
}

#[test]
fn names_of_all_parts_of_a_fused_projection_name_the_projection() {
    let spec = spec("phi3");
    let plan = |target_modules: Modules| {
        named_plan(&spec, &LoraConfig { target_modules, ..LoraConfig::default() })
    };
    let all = plan(Modules::AllLinear).unwrap();
    assert_eq!(plan(LinearKind::ALL.map(LinearKind::as_str).into()).unwrap(), all);
    assert!(all.keys().any(|name| name.ends_with("qkv_proj")));
    let error = plan(["q_proj", "v_proj"].into()).unwrap_err().to_string();
    assert!(error.contains("names `q_proj`, `v_proj`") && error.contains("`qkv_proj`"), "{error}");
}
