//! Every loss against TRL's implementation, or autograd of the formula where TRL has none.
//! `tests/reference/learning/make_loss_cases.py` writes the cases.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};
use serde::Deserialize;
use serde_json::Value;

use hone_model::testing::{test_file, token_stats, values};

use crate::config::{CorrectionMode, TrainConfig};
use crate::learning::loss::LossSequence;
use crate::learning::objective::{AdaptiveCoefficients, Objective, StepTotals};

#[derive(Deserialize)]
struct File {
    max_tokens: usize,
    data: Vec<Data>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Data {
    lengths: Vec<usize>,
    advantages: Vec<f64>,
    logits: Vec<Vec<f64>>,
    targets: Vec<u32>,
    recorded: Vec<f32>,
    old: Vec<f64>,
    reference: Vec<f64>,
}

#[derive(Deserialize)]
struct Case {
    data: usize,
    train: Value,
    trl: bool,
    loss: f64,
    #[serde(rename = "figures")]
    metrics: BTreeMap<String, f64>,
    gradient: Vec<Vec<f64>>,
}

/// Loss, gradient with respect to the logits, and totals, as in a forward/backward pass.
fn compute(data: &Data, config: &TrainConfig, max_tokens: usize) -> (f64, Vec<f64>, StepTotals) {
    let vocab = data.logits[0].len();
    let logits = Tensor::from_vec(data.logits.concat(), (data.logits.len(), vocab), &Device::Cpu);
    let logits = Var::from_tensor(&logits.unwrap()).unwrap();
    let temperatures = vec![1.0; data.targets.len()];
    let stats = token_stats(logits.as_tensor(), &data.targets, &temperatures);
    let (logprobs, entropies): (Vec<f64>, Vec<f64>) =
        values(&stats).chunks(2).map(|row| (row[0], row[1])).unzip();
    let recorded: Vec<f64> = data.recorded.iter().map(|l| f64::from(*l)).collect();
    let adaptive = AdaptiveCoefficients::new(config);
    let sequences: Vec<usize> = (0..data.lengths.len()).collect();
    let objective =
        Objective::new(config, &adaptive, &data.lengths, &sequences, max_tokens, &entropies, 0);
    let corrected = config.sampler_correction.kind != CorrectionMode::None;
    let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
    let mut start = 0;
    for (index, length) in data.lengths.iter().enumerate() {
        let rows = start..start + length;
        start = rows.end;
        let sequence = LossSequence {
            logprobs: &logprobs[rows.clone()],
            entropies: &entropies[rows.clone()],
            recorded: &recorded[rows.clone()],
            old: corrected.then(|| &data.old[rows.clone()]),
            reference: (config.beta != 0.0).then(|| &data.reference[rows]),
            advantage: data.advantages[index],
        };
        objective.add_sequence(index, &sequence, &mut gradients, &mut totals);
    }
    let gradients = Tensor::from_vec(gradients.concat(), stats.dims(), &Device::Cpu).unwrap();
    let store = (&stats * gradients).unwrap().sum_all().unwrap().backward().unwrap();
    (totals.loss, values(store.get(logits.as_tensor()).unwrap()), totals)
}

/// Hone's name of a metric of TRL.
fn own_name(name: &str) -> String {
    let renamed = [
        ("clip_ratio/low_mean", "clip_low"),
        ("clip_ratio/low_min", "clip_low_min"),
        ("clip_ratio/high_mean", "clip_high"),
        ("clip_ratio/high_max", "clip_high_max"),
        ("clip_ratio/region_mean", "clip_region"),
        ("cispo_clip_ratio", "clip_high"),
        ("vespo/phi_seq_mean", "vespo_phi"),
        ("importance_sampling_ratio/min", "sampler_ratio_min"),
        ("importance_sampling_ratio/mean", "sampler_ratio_mean"),
        ("importance_sampling_ratio/max", "sampler_ratio_max"),
    ];
    renamed.iter().find(|(trl, _)| *trl == name).map_or(name, |(_, own)| own).to_owned()
}

#[test]
fn losses_gradients_and_metrics_equal_those_of_trl() {
    let text = std::fs::read(test_file("reference/learning/loss_cases.json")).unwrap();
    let file: File = serde_json::from_slice(&text).unwrap();
    let mut compared = BTreeMap::<String, usize>::new();
    for case in &file.cases {
        let config: TrainConfig = serde_json::from_value(case.train.clone()).unwrap();
        config.check().unwrap();
        let (loss, gradient, totals) = compute(&file.data[case.data], &config, file.max_tokens);
        assert!((loss - case.loss).abs() < 1e-8, "{loss} against {}: {}", case.loss, case.train);
        let expected = case.gradient.concat();
        assert_eq!(gradient.len(), expected.len());
        for (own, trl) in gradient.iter().zip(&expected) {
            assert!((own - trl).abs() < 1e-8, "{own} against {trl}: {}", case.train);
        }
        assert!(gradient.iter().any(|g| g.abs() > 1e-3), "{}", case.train);
        let mut metrics = BTreeMap::new();
        totals.insert_metrics(&config, &mut metrics);
        for (name, trl) in &case.metrics {
            let own = metrics[&own_name(name)];
            assert!((own - trl).abs() < 1e-7, "{name} is {own}, not {trl}: {}", case.train);
            *compared.entry(own_name(name)).or_default() += usize::from(*trl != 0.0);
        }
    }
    assert!(file.cases.iter().filter(|case| case.trl).count() >= 70);
    assert!(file.cases.len() >= 90);
    // Every metric differs from 0 in some case.
    assert_eq!(compared.len(), 11, "{compared:?}");
    assert!(compared.values().all(|count| *count > 0), "{compared:?}");
}
