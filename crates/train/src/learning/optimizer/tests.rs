//! AdamW and gradient clipping against PyTorch, eight-bit moments against PyTorch with moments
//! rounded to the code books of bitsandbytes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;
use serde_json::Value;

use hone_model::testing::{test_file, values};

use super::{AdamW, QuantizedBlocks, SIGNED, UNSIGNED, clip_global_norm};
use crate::config::{OptimizerConfig, OptimizerKind, TrainConfig};
use crate::error::Result;

fn tensor(case: &Value, name: &str, list: &Value) -> Tensor {
    let shape: Vec<usize> = serde_json::from_value(case["shapes"][name].clone()).unwrap();
    let list: Vec<f64> = serde_json::from_value(list[name].clone()).unwrap();
    Tensor::from_vec(list, shape, &Device::Cpu).unwrap()
}

#[test]
fn updates_equal_those_of_pytorch() {
    let text = std::fs::read(test_file("reference/learning/learning_cases.json")).unwrap();
    let case = &serde_json::from_slice::<Value>(&text).unwrap()["adamw"];
    let settings = &case["settings"];
    let config = TrainConfig {
        optimizer: OptimizerConfig {
            beta1: settings["betas"][0].as_f64().unwrap(),
            beta2: settings["betas"][1].as_f64().unwrap(),
            eps: settings["eps"].as_f64().unwrap(),
            ..OptimizerConfig::default()
        },
        weight_decay: settings["weight_decay"].as_f64().unwrap(),
        ..TrainConfig::default()
    };
    let (mut optimizer, rate) = (AdamW::default(), settings["lr"].as_f64().unwrap());
    let vars: Vec<(String, Var)> = ["a", "b"]
        .iter()
        .map(|n| ((*n).to_owned(), Var::from_tensor(&tensor(case, n, &case["start"])).unwrap()))
        .collect();
    let named: Vec<(String, &Var)> = vars.iter().map(|(n, v)| (n.clone(), v)).collect();
    for step in case["steps"].as_array().unwrap() {
        let mut gradients: BTreeMap<String, Tensor> =
            vars.iter().map(|(n, _)| (n.clone(), tensor(case, n, &step["gradients"]))).collect();
        let limit = case["limit"].as_f64().unwrap();
        let norm = clip_global_norm(&mut gradients, limit).unwrap();
        assert!((norm - step["norm"].as_f64().unwrap()).abs() < 1e-12);
        assert!(optimizer.update(&config, &named, &gradients, rate).unwrap());
        for (name, var) in &vars {
            let expected = values(&tensor(case, name, &step["values"]));
            for (own, torch) in values(var).iter().zip(expected) {
                assert!((own - torch).abs() < 1e-12, "{name}: {own} against {torch}");
            }
        }
    }
    assert_eq!(optimizer.updates, 6);
}

#[test]
fn a_limit_of_zero_or_above_the_norm_does_not_scale_gradients() {
    let gradient = Tensor::new(&[3.0_f64, 4.0], &Device::Cpu).unwrap();
    for limit in [0.0, 6.0] {
        let mut gradients = BTreeMap::from([("x".to_owned(), gradient.clone())]);
        assert!((clip_global_norm(&mut gradients, limit).unwrap() - 5.0).abs() < 1e-12);
        assert_eq!(values(&gradients["x"]), vec![3.0, 4.0]);
    }
}

fn reference() -> Value {
    let text = std::fs::read(test_file("reference/learning/optimizer_cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn config(eight_bit: bool) -> TrainConfig {
    let kind = if eight_bit { OptimizerKind::AdamW8bit } else { OptimizerKind::AdamW };
    let optimizer = OptimizerConfig { beta2: 0.99, ..kind.into() };
    TrainConfig { optimizer, weight_decay: 0.0, ..TrainConfig::default() }
}

fn variable(list: Vec<f32>) -> Var {
    let len = list.len();
    Var::from_tensor(&Tensor::from_vec(list, len, &Device::Cpu).unwrap()).unwrap()
}

/// An optimizer with moments of eight bits, or not, and updates of a variable under the name `x`.
struct Optimizer(AdamW, TrainConfig);

impl Optimizer {
    fn new(eight_bit: bool) -> Self {
        Self(AdamW::default(), config(eight_bit))
    }

    fn update(&mut self, var: &Var, gradient: Vec<f32>, rate: f64) -> bool {
        let gradient = Tensor::from_vec(gradient, var.shape(), &Device::Cpu).unwrap();
        let gradients = BTreeMap::from([("x".to_owned(), gradient)]);
        self.0.update(&self.1, &[("x".to_owned(), var)], &gradients, rate).unwrap()
    }

    fn tensors(&self) -> BTreeMap<String, Tensor> {
        self.0.tensors().unwrap()
    }

    fn restore(
        &mut self,
        updates: u64,
        var: &Var,
        tensors: BTreeMap<String, Tensor>,
    ) -> Result<()> {
        self.0.restore(updates, &[("x".to_owned(), var)], tensors)
    }

    fn bytes(&self) -> usize {
        self.tensors().values().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
    }
}

#[test]
fn code_books_equal_those_of_bitsandbytes() {
    let reference = reference();
    for (key, book) in [("signed", &*SIGNED), ("unsigned", &*UNSIGNED)] {
        let expected: Vec<f32> = serde_json::from_value(reference[key].clone()).unwrap();
        assert_eq!(expected.len(), 256);
        for (own, expected) in book.values.iter().zip(expected) {
            assert!((own - expected).abs() <= 1e-6 * expected.abs(), "{own} against {expected}");
        }
    }
}

#[test]
fn eight_bit_updates_equal_those_of_pytorch_with_rounded_moments() {
    let reference = reference();
    let case = &reference["eight_bit"];
    let n = case["count"].as_u64().unwrap() as usize;
    let every = case["every"].as_u64().unwrap() as usize;
    let start = (0..n).map(|i| (-1.0 + 2.0 * i as f64 / (n - 1) as f64) as f32).collect();
    let var = variable(start);
    let mut optimizer = Optimizer::new(true);
    let rate = case["settings"]["lr"].as_f64().unwrap();
    let steps: Vec<Vec<f64>> = serde_json::from_value(case["values"].clone()).unwrap();
    assert_eq!(steps.len(), 12);
    for (t, expected) in steps.iter().enumerate() {
        let gradient = (0..n)
            .map(|i| {
                let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
                let size = 1.2 + (0.37 * i as f64 + t as f64).sin();
                (sign * size * 10_f64.powi(-(i as i32 % 3))) as f32
            })
            .collect();
        assert!(optimizer.update(&var, gradient, rate));
        let own: Vec<f64> = values(&var).into_iter().step_by(every).collect();
        for (i, (own, torch)) in own.iter().zip(expected).enumerate() {
            // A quotient near the midpoint of two codes may be rounded to either.
            assert!((own - torch).abs() < 1e-3 * rate, "step {t}, {i}: {own} against {torch}");
        }
    }
    // One byte per value and a four-byte scale per block, for both moments.
    assert_eq!(optimizer.bytes(), 2 * (n + 4 * n / 256));
}

#[test]
fn eight_bit_moments_are_saved_exactly_and_small_tensors_are_not_quantized() {
    let gradient = |n: usize, t: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 31 + t * 7) as f32).sin()).collect()
    };
    for n in [4095, 4096, 5000] {
        let (one, two) = (variable(vec![0.5; n]), variable(vec![0.5; n]));
        let mut uninterrupted = Optimizer::new(true);
        for t in 0..3 {
            assert!(uninterrupted.update(&one, gradient(n, t), 0.01));
        }
        two.set(&one).unwrap();
        let mut resumed = Optimizer::new(true);
        let tensors = uninterrupted.tensors();
        assert_eq!(tensors.contains_key("x.first.codes"), n >= 4096);
        resumed.restore(3, &two, tensors).unwrap();
        for t in 3..6 {
            assert!(uninterrupted.update(&one, gradient(n, t), 0.01));
            assert!(resumed.update(&two, gradient(n, t), 0.01));
        }
        assert_eq!(values(&one), values(&two));
        let blocks = n.div_ceil(256);
        let expected = if n < 4096 { 8 * n } else { 2 * (n + 4 * blocks) };
        assert_eq!(resumed.bytes(), expected);
    }
}

#[test]
fn restored_moments_are_converted_to_the_configured_width() {
    let n = 4096;
    let var = variable(vec![0.5; n]);
    let mut eight = Optimizer::new(true);
    assert!(eight.update(&var, vec![0.25; n], 0.01));
    let mut full = Optimizer::new(false);
    full.restore(1, &var, eight.tensors()).unwrap();
    assert!(full.update(&var, vec![0.25; n], 0.01));
    assert_eq!((full.bytes(), full.0.updates), (8 * n, 2));
    eight.restore(2, &var, full.tensors()).unwrap();
    assert!(eight.update(&var, vec![0.25; n], 0.01));
    assert_eq!(eight.bytes(), 2 * (n + 4 * 16));
}

#[test]
fn moments_that_do_not_fit_a_variable_are_errors() {
    let var = variable(vec![0.0; 4096]);
    let mut optimizer = Optimizer::new(true);
    assert!(optimizer.update(&var, vec![0.1; 4096], 0.01));
    let good = optimizer.tensors();
    let short = Tensor::zeros(15, DType::F32, &Device::Cpu).unwrap();
    for change in ["x.first.maxima", "x.second.codes", "y.first"] {
        let mut tensors = good.clone();
        tensors.insert(change.to_owned(), short.clone());
        let error = optimizer.restore(1, &var, tensors).unwrap_err().to_string();
        assert!(error.contains("do not fit"), "{error}");
    }
    let mut half = good.clone();
    half.retain(|name, _| name.starts_with("x.first"));
    assert!(optimizer.restore(1, &var, half).is_err());
    assert_eq!(optimizer.tensors().len(), 4);
}

#[test]
fn an_update_that_is_not_finite_changes_nothing() {
    for eight_bit in [false, true] {
        let var = variable(vec![1.0; 4096]);
        let mut optimizer = Optimizer::new(eight_bit);
        assert!(optimizer.update(&var, vec![0.1; 4096], 0.01));
        let before = (values(&var), optimizer.tensors());
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let mut gradient = vec![0.1; 4096];
            gradient[7] = bad;
            assert!(!optimizer.update(&var, gradient, 0.01), "{bad}");
        }
        assert!(!optimizer.update(&var, vec![0.1; 4096], 1e45));
        assert_eq!((values(&var), optimizer.0.updates), (before.0, 1));
        for (name, tensor) in optimizer.tensors() {
            assert_eq!(values(&tensor), values(&before.1[&name]));
        }
    }
}

proptest! {
    #[test]
    fn quantization_errors_are_bounded_by_the_spacing_of_the_codes(list in prop::collection::vec(-1e3_f32..1e3, 1..600), power in -20_i32..10) {
        let list: Vec<f32> = list.iter().map(|x| x * 10_f32.powi(power)).collect();
        let blocks = QuantizedBlocks::encode(&list, &SIGNED, false);
        let decoded = blocks.decode(&SIGNED);
        prop_assert_eq!(decoded.len(), list.len());
        for (block, values) in list.chunks(256).zip(decoded.chunks(256)) {
            let max = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            for (x, y) in block.iter().zip(values) {
                // The spacing of codes in a decade is 0.9 / 2^e times the end of the decade.
                let relative = x.abs() / max;
                let decade = if relative > 0.0 { relative.log10().floor().max(-7.0) } else { -7.0 };
                let step = 10_f32.powf(decade + 1.0) * 0.9 / 2_f32.powf(6.0 + decade + 1.0).max(1.0);
                prop_assert!((x - y).abs() <= max * step * 0.76, "{} {} of {}", x, y, max);
            }
        }
    }

    #[test]
    fn second_moments_never_become_zero_or_negative(list in prop::collection::vec(0.0_f32..1.0, 1..300)) {
        let list: Vec<f32> = list.iter().map(|x| x.powi(12)).collect();
        let decoded = QuantizedBlocks::encode(&list, &UNSIGNED, true).decode(&UNSIGNED);
        for (x, y) in list.iter().zip(decoded) {
            let same_sign = if *x > 0.0 { y > 0.0 } else { y == 0.0 };
            prop_assert!(same_sign, "{} became {}", x, y);
        }
    }
}
