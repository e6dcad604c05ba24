//! AdamW and gradient clipping against PyTorch, eight-bit moments against PyTorch with moments
//! rounded to the code books of bitsandbytes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;
use serde_json::Value;

use hone_model::testing::{test_file, values};

use super::{AdamW, AdamWConfig, clip_global_norm};
use super::{QuantizedBlocks, SIGNED, UNSIGNED};

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
    let mut optimizer = AdamW::new(AdamWConfig {
        beta1: settings["betas"][0].as_f64().unwrap(),
        beta2: settings["betas"][1].as_f64().unwrap(),
        eps: settings["eps"].as_f64().unwrap(),
        weight_decay: settings["weight_decay"].as_f64().unwrap(),
        eight_bit: false,
    });
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
        assert!(optimizer.update(&named, &gradients, settings["lr"].as_f64().unwrap()).unwrap());
        for (name, var) in &vars {
            let expected = values(&tensor(case, name, &step["values"]));
            for (own, torch) in values(var).iter().zip(expected) {
                assert!((own - torch).abs() < 1e-12, "{name}: {own} against {torch}");
            }
        }
    }
    assert_eq!(optimizer.updates(), 6);
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

#[test]
fn a_gradient_of_the_wrong_shape_changes_nothing() {
    let var = Var::ones(2, DType::F64, &Device::Cpu).unwrap();
    let gradient = Tensor::ones(3, DType::F64, &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(config(false));
    let gradients = BTreeMap::from([("x".to_owned(), gradient)]);
    let error = optimizer.update(&[("x".to_owned(), &var)], &gradients, 1.0).unwrap_err();
    assert!(error.to_string().contains("`x`"));
    assert_eq!((values(&var), optimizer.updates()), (vec![1.0, 1.0], 0));
}

fn reference() -> Value {
    let text = std::fs::read(test_file("reference/learning/optimizer_cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn config(eight_bit: bool) -> AdamWConfig {
    AdamWConfig { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0, eight_bit }
}

/// Bytes of the moments.
fn bytes(optimizer: &AdamW) -> usize {
    let tensors = optimizer.tensors().unwrap();
    tensors.values().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
}

/// An `f32` variable.
fn variable(list: Vec<f32>) -> Var {
    let len = list.len();
    Var::from_tensor(&Tensor::from_vec(list, len, &Device::Cpu).unwrap()).unwrap()
}

/// Updates a variable under the name `x`.
fn update(optimizer: &mut AdamW, var: &Var, gradient: Vec<f32>, rate: f64) -> bool {
    let gradient = Tensor::from_vec(gradient, var.shape(), &Device::Cpu).unwrap();
    let gradients = BTreeMap::from([("x".to_owned(), gradient)]);
    optimizer.update(&[("x".to_owned(), var)], &gradients, rate).unwrap()
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
    let mut optimizer = AdamW::new(config(true));
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
        assert!(update(&mut optimizer, &var, gradient, rate));
        let own: Vec<f64> = values(&var).into_iter().step_by(every).collect();
        for (i, (own, torch)) in own.iter().zip(expected).enumerate() {
            // A quotient near the midpoint of two codes may be rounded to either.
            assert!((own - torch).abs() < 1e-3 * rate, "step {t}, {i}: {own} against {torch}");
        }
    }
    // One byte per value and a four-byte scale per block, for both moments.
    assert_eq!(bytes(&optimizer), 2 * (n + 4 * n / 256));
}

/// Minimizes `sum h (x - c)^2 / 2` with curvatures h over three decades; returns the final loss over
/// the first.
fn quadratic(eight_bit: bool) -> f64 {
    let n = 8192;
    let curvature = |i: usize| 10_f64.powf(-3.0 * i as f64 / n as f64);
    let center = |i: usize| (i as f64 * 0.7).sin();
    let var = variable(vec![0.0; n]);
    let mut optimizer = AdamW::new(config(eight_bit));
    let loss = |x: &[f64]| -> f64 {
        x.iter().enumerate().map(|(i, x)| curvature(i) * (x - center(i)).powi(2) / 2.0).sum()
    };
    let first = loss(&values(&var));
    let steps = 300;
    for t in 0..steps {
        let x = values(&var);
        let gradient =
            x.iter().enumerate().map(|(i, x)| (curvature(i) * (x - center(i))) as f32).collect();
        assert!(update(
            &mut optimizer,
            &var,
            gradient,
            0.05 * (1.0 - f64::from(t) / f64::from(steps))
        ));
    }
    loss(&values(&var)) / first
}

#[test]
fn eight_bit_moments_converge_on_a_quadratic() {
    let (full, eight) = (quadratic(false), quadratic(true));
    assert!(full < 1e-6, "{full}");
    assert!(eight < 1e-5, "{eight}");
}

/// Fits `B A` to a matrix of rank 8; returns the final squared error over the first.
fn regression(eight_bit: bool) -> f64 {
    let (r, width) = (8, 512);
    let matrix = |rows: usize, cols: usize, phase: f64, size: f64| {
        let list: Vec<f32> = (0..rows * cols)
            .map(|i| ((i as f64 * 12.9898 + phase).sin() * 43758.547).fract() as f32 * size as f32)
            .collect();
        Tensor::from_vec(list, (rows, cols), &Device::Cpu).unwrap()
    };
    let target = matrix(width, r, 1.0, 0.3).matmul(&matrix(r, width, 2.0, 0.3)).unwrap();
    let a = Var::from_tensor(&matrix(r, width, 3.0, 0.1)).unwrap();
    let b = Var::zeros((width, r), DType::F32, &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(config(eight_bit));
    let error = || (b.matmul(&a).unwrap() - &target).unwrap();
    let size = |t: &Tensor| values(&t.sqr().unwrap().sum_all().unwrap())[0];
    let first = size(&error());
    let steps = 200;
    for t in 0..steps {
        let e = error();
        let gradients = BTreeMap::from([
            ("a".to_owned(), b.t().unwrap().matmul(&e).unwrap()),
            ("b".to_owned(), e.matmul(&a.t().unwrap()).unwrap()),
        ]);
        let rate = 0.02 * (1.0 - f64::from(t) / f64::from(steps));
        let named = [("a".to_owned(), &a), ("b".to_owned(), &b)];
        assert!(optimizer.update(&named, &gradients, rate).unwrap());
    }
    size(&error()) / first
}

#[test]
fn eight_bit_moments_fit_a_low_rank_matrix() {
    let (full, eight) = (regression(false), regression(true));
    assert!(full < 1e-3, "{full}");
    assert!(eight < 2e-3, "{eight}");
}

#[test]
fn eight_bit_moments_are_saved_exactly_and_small_tensors_are_not_quantized() {
    let gradient = |n: usize, t: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 31 + t * 7) as f32).sin()).collect()
    };
    for n in [4095, 4096, 5000] {
        let (one, two) = (variable(vec![0.5; n]), variable(vec![0.5; n]));
        let mut uninterrupted = AdamW::new(config(true));
        for t in 0..3 {
            assert!(update(&mut uninterrupted, &one, gradient(n, t), 0.01));
        }
        two.set(&one).unwrap();
        let mut resumed = AdamW::new(config(true));
        let tensors = uninterrupted.tensors().unwrap();
        assert_eq!(tensors.contains_key("x.first.codes"), n >= 4096);
        resumed.restore(3, &[("x".to_owned(), &two)], tensors).unwrap();
        for t in 3..6 {
            assert!(update(&mut uninterrupted, &one, gradient(n, t), 0.01));
            assert!(update(&mut resumed, &two, gradient(n, t), 0.01));
        }
        assert_eq!(values(&one), values(&two));
        let blocks = n.div_ceil(256);
        let expected = if n < 4096 { 8 * n } else { 2 * (n + 4 * blocks) };
        assert_eq!(bytes(&resumed), expected);
    }
}

#[test]
fn restored_moments_are_converted_to_the_configured_width() {
    let n = 4096;
    let var = variable(vec![0.5; n]);
    let mut eight = AdamW::new(config(true));
    assert!(update(&mut eight, &var, vec![0.25; n], 0.01));
    let mut full = AdamW::new(config(false));
    full.restore(1, &[("x".to_owned(), &var)], eight.tensors().unwrap()).unwrap();
    assert!(update(&mut full, &var, vec![0.25; n], 0.01));
    assert_eq!((bytes(&full), full.updates()), (8 * n, 2));
    eight.restore(2, &[("x".to_owned(), &var)], full.tensors().unwrap()).unwrap();
    assert!(update(&mut eight, &var, vec![0.25; n], 0.01));
    assert_eq!(bytes(&eight), 2 * (n + 4 * 16));
}

#[test]
fn moments_that_do_not_fit_a_variable_are_errors() {
    let var = variable(vec![0.0; 4096]);
    let named = [("x".to_owned(), &var)];
    let mut optimizer = AdamW::new(config(true));
    assert!(update(&mut optimizer, &var, vec![0.1; 4096], 0.01));
    let good = optimizer.tensors().unwrap();
    let short = Tensor::zeros(15, DType::F32, &Device::Cpu).unwrap();
    for change in ["x.first.maxima", "x.second.codes", "y.first"] {
        let mut tensors = good.clone();
        tensors.insert(change.to_owned(), short.clone());
        let error = optimizer.restore(1, &named, tensors).unwrap_err().to_string();
        assert!(error.contains("do not fit"), "{error}");
    }
    let mut half = good.clone();
    half.retain(|name, _| name.starts_with("x.first"));
    assert!(optimizer.restore(1, &named, half).is_err());
    assert_eq!(optimizer.tensors().unwrap().len(), 4);
}

#[test]
fn an_update_that_is_not_finite_changes_nothing() {
    for eight_bit in [false, true] {
        let var = variable(vec![1.0; 4096]);
        let mut optimizer = AdamW::new(config(eight_bit));
        assert!(update(&mut optimizer, &var, vec![0.1; 4096], 0.01));
        let before = (values(&var), optimizer.tensors().unwrap());
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let mut gradient = vec![0.1; 4096];
            gradient[7] = bad;
            assert!(!update(&mut optimizer, &var, gradient, 0.01), "{bad}");
        }
        assert!(!update(&mut optimizer, &var, vec![0.1; 4096], 1e45));
        assert_eq!((values(&var), optimizer.updates()), (before.0, 1));
        for (name, tensor) in optimizer.tensors().unwrap() {
            assert_eq!(values(&tensor), values(&before.1[&name]));
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let names: Vec<String> = (0..40).map(|i| format!("x{i:02}")).collect();
    let run = |threads: usize| {
        let vars: Vec<Var> = (0..40).map(|i| variable(vec![i as f32; 300 + i])).collect();
        let named: Vec<(String, &Var)> = names.iter().cloned().zip(&vars).collect();
        let gradient = |var: &Var| (var.as_tensor() * 0.3).unwrap();
        let mut gradients: BTreeMap<_, _> =
            named.iter().map(|(name, var)| (name.clone(), gradient(var))).collect();
        let mut optimizer = AdamW::new(config(false));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let norm = pool.install(|| {
            let norm = clip_global_norm(&mut gradients, 1.0).unwrap();
            assert!(optimizer.update(&named, &gradients, 0.1).unwrap());
            norm
        });
        (norm.to_bits(), vars.iter().map(|var| values(var)).collect::<Vec<_>>())
    };
    assert_eq!(run(1), run(3));
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
