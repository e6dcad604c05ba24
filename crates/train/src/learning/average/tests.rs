//! Averages against PyTorch's.

use candle_core::{DType, Device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use hone_model::adapter::weights::LoraWeights;
use hone_model::testing::{test_file, tiny_spec, values};

use super::Average;
use crate::config::TrainConfig;
use crate::testing::tiny_config;

fn averages(config: &TrainConfig, steps: u64) -> Vec<[f64; 2]> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let (spec, device) = (tiny_spec(), Device::Cpu);
    let lora = LoraWeights::fresh(&spec, &config.lora, &mut rng, DType::F64, &device).unwrap();
    let mut average = Average::new(config).unwrap();
    let mut found = Vec::new();
    for step in 1..=steps {
        for (name, var) in lora.parameters() {
            let value =
                if name.contains("lora_A") { (step * step) as f64 } else { 1.0 / step as f64 };
            var.set(&(var.ones_like().unwrap() * value).unwrap()).unwrap();
        }
        average.observe(&lora, step).unwrap();
        if let Some(average) = average.lora() {
            let parameters = average.parameters();
            found.push([values(parameters[0].1)[0], values(parameters[1].1)[0]]);
        }
    }
    assert_eq!(average.count(), found.len() as u64);
    found
}

#[test]
fn averages_are_those_of_pytorch() {
    let text = std::fs::read(test_file("reference/optimiser_cases.json")).unwrap();
    let reference: Value = serde_json::from_slice(&text).unwrap();
    let expected = |key: &str| -> Vec<[f64; 2]> {
        serde_json::from_value(reference[key]["values"].clone()).unwrap()
    };
    let decay = reference["ema"]["decay"].as_f64().unwrap();
    let start = reference["swa"]["start"].as_u64().unwrap();
    let ema = averages(&TrainConfig { ema_decay: decay, ..tiny_config() }, 5);
    let swa = averages(&TrainConfig { swa_start: start, ..tiny_config() }, 6);
    for (own, theirs) in [(ema, expected("ema")), (swa, expected("swa"))] {
        assert_eq!(own.len(), theirs.len());
        for (own, theirs) in own.iter().flatten().zip(theirs.iter().flatten()) {
            assert!((own - theirs).abs() < 1e-12 * theirs.abs().max(1.0), "{own} against {theirs}");
        }
    }
    assert!(Average::new(&tiny_config()).is_none());
}
