//! AdamW and gradient clipping against PyTorch.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;

use super::optim::{AdamW, AdamWConfig, clip_global_norm};
use super::testing::{test_file, values};

fn tensor(case: &Value, name: &str, list: &Value) -> Tensor {
    let shape: Vec<usize> = serde_json::from_value(case["shapes"][name].clone()).unwrap();
    let list: Vec<f64> = serde_json::from_value(list[name].clone()).unwrap();
    Tensor::from_vec(list, shape, &Device::Cpu).unwrap()
}

#[test]
fn updates_equal_those_of_pytorch() {
    let text = std::fs::read(test_file("reference/learning_cases.json")).unwrap();
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
fn a_limit_of_zero_and_a_small_norm_leave_gradients_alone() {
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
    let mut optimizer = AdamW::new(AdamWConfig {
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.0,
        eight_bit: false,
    });
    let gradients = BTreeMap::from([("x".to_owned(), gradient)]);
    let error = optimizer.update(&[("x".to_owned(), &var)], &gradients, 1.0).unwrap_err();
    assert!(error.to_string().contains("`x`"));
    assert_eq!((values(&var), optimizer.updates()), (vec![1.0, 1.0], 0));
}
