//! The loss against PyTorch's autograd, its definition, and an exact KL.

mod bounds;
mod properties;
mod trl;

use candle_core::{Device, Tensor, Var};
use serde_json::Value;

use hone_model::testing::{test_file, token_stats, values};

use super::{
    LEAST_WEIGHT, LONGEST, LossCoefficients, LossSequence, SequenceLoss, clipped, late_weight,
    sampler_weights, sequence_loss, sequence_weights,
};
use crate::config::{
    CorrectionConfig, CorrectionMode, KlConfig, KlEstimator, Loss, LossKind, TrainConfig,
};

fn cases() -> Value {
    let text = std::fs::read(test_file("reference/learning/learning_cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().unwrap()],
    }
}

/// Settings without the dual clip, which neither TRL nor the reference cases have.
fn config(clip_low: f64, clip_high: f64, beta: f64) -> TrainConfig {
    TrainConfig { clip_low, clip_high, dual_clip: 0.0, beta, ..TrainConfig::default() }
}

fn token_loss(
    logprob: f64,
    recorded: f64,
    reference: Option<f64>,
    advantage: f64,
    config: &TrainConfig,
) -> SequenceLoss {
    let sequence = LossSequence {
        logprobs: &[logprob],
        entropies: &[1.0],
        recorded: &[recorded],
        old: None,
        reference: reference.as_ref().map(std::slice::from_ref),
        advantage,
    };
    let coefficients =
        LossCoefficients { token: 1.0, entropy: 0.0, entropy_threshold: None, beta: config.beta };
    sequence_loss(&sequence, &coefficients, config)
}

#[test]
fn values_and_gradients_equal_those_of_pytorch() {
    for case in cases()["losses"].as_array().unwrap() {
        let kind = serde_json::from_value::<Loss>(case["kind"].clone()).unwrap().kind;
        let number = |key: &str| case[key].as_f64().unwrap();
        let config = config(number("clip_low"), number("clip_high"), number("beta"));
        let lengths: Vec<usize> = serde_json::from_value(case["lengths"].clone()).unwrap();
        let targets: Vec<u32> = serde_json::from_value(case["targets"].clone()).unwrap();
        let per_token = |values: &Value| -> Vec<f64> {
            let values = numbers(values);
            lengths.iter().zip(values).flat_map(|(n, x)| std::iter::repeat_n(x, *n)).collect()
        };
        let temperatures: Vec<f32> =
            per_token(&case["temperatures"]).into_iter().map(|t| t as f32).collect();
        let advantages = per_token(&case["advantages"]);
        let max_tokens = case["max_tokens"].as_u64().unwrap() as usize;
        let sequences: Vec<usize> = (0..lengths.len()).collect();
        let weights: Vec<f64> = lengths
            .iter()
            .zip(sequence_weights(kind, &lengths, &sequences, max_tokens))
            .flat_map(|(n, w)| std::iter::repeat_n(w, *n))
            .collect();
        let logits = |key: &str| {
            let flat = numbers(&case[key]);
            let shape = (targets.len(), flat.len() / targets.len());
            Tensor::from_vec(flat, shape, &Device::Cpu).unwrap()
        };
        let var = Var::from_tensor(&logits("logits")).unwrap();
        let stats = token_stats(var.as_tensor(), &targets, &temperatures);
        let reference = token_stats(&logits("reference_logits"), &targets, &temperatures);
        let (own, reference) = (values(&stats), values(&reference));
        let recorded = numbers(&case["behaviour"]);
        let (entropy, kl) = (numbers(&case["entropy"]), numbers(&case["kl"]));
        let (mut loss, mut dloss_dlogp) = (0.0, Vec::new());
        for t in 0..targets.len() {
            let token =
                token_loss(own[2 * t], recorded[t], Some(reference[2 * t]), advantages[t], &config);
            loss += weights[t] * token.loss;
            dloss_dlogp.push(weights[t] * token.dloss_dlogp[0]);
            assert!((own[2 * t + 1] - entropy[t]).abs() < 1e-10);
            assert!((token.kl - kl[t]).abs() < 1e-10);
            let cut = token.clipped_low + token.clipped_high > 0.0;
            assert_eq!(cut, case["cut"][t], "token {t}");
        }
        assert!((loss - case["loss"].as_f64().unwrap()).abs() < 1e-10);
        let dloss_dlogp = Tensor::from_vec(dloss_dlogp, targets.len(), &Device::Cpu).unwrap();
        let sum = (stats.narrow(1, 0, 1).unwrap().squeeze(1).unwrap() * dloss_dlogp).unwrap();
        let store = sum.sum_all().unwrap().backward().unwrap();
        let gradient = values(store.get(var.as_tensor()).unwrap());
        for (own, torch) in gradient.iter().zip(numbers(&case["gradient"])) {
            assert!((own - torch).abs() < 1e-10, "{own} against {torch}");
        }
        assert!(gradient.iter().any(|g| g.abs() > 1e-3));
    }
}

#[test]
fn only_ratios_whose_gradient_is_cut_count_as_clipped() {
    let config = config(0.2, 0.2, 0.0);
    let token = |ratio: f64, advantage| token_loss(ratio.ln(), 0.0, None, advantage, &config);
    let high = token(1.5, 1.0);
    assert_eq!((high.clipped_low, high.clipped_high, high.dloss_dlogp[0]), (0.0, 1.0, 0.0));
    assert!((high.loss + 1.2).abs() < 1e-12);
    let low = token(0.5, -1.0);
    assert_eq!((low.clipped_low, low.clipped_high, low.dloss_dlogp[0]), (1.0, 0.0, 0.0));
    assert!((low.loss - 0.8).abs() < 1e-12);
    // Bounds limit changes away from ratio 1, never changes toward it.
    for (ratio, advantage) in [(1.5, -1.0), (0.5, 1.0), (1.1, 1.0)] {
        let token = token(ratio, advantage);
        assert_eq!(token.clipped_high + token.clipped_low, 0.0);
        assert!((token.loss + ratio * advantage).abs() < 1e-12);
        assert!((token.dloss_dlogp[0] + ratio * advantage).abs() < 1e-12);
    }
}

#[test]
fn a_ratio_at_its_bound_is_not_clipped() {
    let config = config(0.2, 0.2, 0.0);
    let (low, high) = (clipped(1.0 - 0.2, -1.0, &config), clipped(1.0 + 0.2, 1.0, &config));
    assert!(!low.clipped_low && !high.clipped_high);
    assert_eq!((low.d_log_ratio, high.d_log_ratio), (0.8, -1.2));
    for mode in [CorrectionMode::TokenMask, CorrectionMode::SequenceMask] {
        let bounds = CorrectionConfig { kind: mode, clip_min: 1.0, clip_max: 1.0 };
        assert_eq!(sampler_weights(&bounds, &[-2.0], &[-2.0]), [1.0]);
    }
}

#[test]
fn a_sequence_without_tokens_has_no_clipped_ones() {
    let empty = LossSequence {
        logprobs: &[],
        entropies: &[],
        recorded: &[],
        old: None,
        reference: None,
        advantage: 1.0,
    };
    let coefficients =
        LossCoefficients { token: 1.0, entropy: 0.0, entropy_threshold: None, beta: 0.0 };
    let loss = sequence_loss(&empty, &coefficients, &TrainConfig::default());
    assert_eq!((loss.clipped_low, loss.clipped_high), (0.0, 0.0));
}

#[test]
fn vespo_treats_an_advantage_of_zero_as_a_positive_one() {
    let config = Loss::default();
    let weight = |advantage| super::vespo_weight(&[-1.0], &[-1.5], &[], advantage, &config);
    assert_eq!(weight(0.0), weight(1.0));
    assert_ne!(weight(0.0), weight(-1.0));
}

/// Uses expectations over a whole vocabulary instead of samples.
#[test]
fn the_mean_gradients_of_k3_and_corrected_are_those_of_reverse_and_forward_kl() {
    let (logits, reference) = ([0.3, -1.0, 0.9, 0.1], [0.5, 0.2, -0.4, 0.0]);
    let log_softmax = |x: &[f64]| -> Vec<f64> {
        let sum: f64 = x.iter().map(|x| x.exp()).sum();
        x.iter().map(|x| x - sum.ln()).collect()
    };
    let policy = log_softmax(&logits);
    let reference = log_softmax(&reference);
    let config = config(0.2, 0.2, 1.0);
    let p: Vec<f64> = policy.iter().map(|l| l.exp()).collect();
    let token = |k: usize| token_loss(policy[k], policy[k], Some(reference[k]), 0.0, &config);
    let kl = KlConfig { estimator: KlEstimator::Corrected, ..config.kl.clone() };
    let by_ratio = TrainConfig { kl, ..config.clone() };
    let corrected = |k: usize| token_loss(policy[k], policy[k], Some(reference[k]), 0.0, &by_ratio);
    // In the mean, k3 is KL(policy || reference).
    let mean: f64 = (0..4).map(|k| p[k] * token(k).kl).sum();
    let kl: f64 = (0..4).map(|k| p[k] * (policy[k] - reference[k])).sum();
    assert!((mean - kl).abs() < 1e-12);
    for j in 0..4 {
        // d ln p_k / d x_j = 1[k = j] - p_j
        let d_logp = |k: usize| f64::from(u8::from(k == j)) - p[j];
        // On tokens of the policy, its mean gradient is that of KL(reference || policy) ...
        let plain: f64 = (0..4).map(|k| p[k] * token(k).dloss_dlogp[0] * d_logp(k)).sum();
        let reverse: f64 = (0..4).map(|k| -reference[k].exp() * d_logp(k)).sum();
        assert!((plain - reverse).abs() < 1e-12);
        // ... and that of r k3, which is weighted by the ratio, that of KL(policy || reference).
        let weighted: f64 = (0..4).map(|k| p[k] * corrected(k).dloss_dlogp[0] * d_logp(k)).sum();
        let exact: f64 = (0..4).map(|k| p[k] * (policy[k] - reference[k]) * d_logp(k)).sum();
        assert!((weighted - exact).abs() < 1e-12);
    }
}

#[test]
fn weights_are_the_published_normalizers() {
    let lengths = [3, 0, 1, 4];
    let weights = |kind| -> Vec<f64> { sequence_weights(kind, &lengths, &[0, 1, 2, 3], 10) };
    for kind in [LossKind::Grpo, LossKind::Sapo, LossKind::Gspo] {
        assert_eq!(weights(kind), vec![1.0 / 9.0, 0.0, 1.0 / 3.0, 1.0 / 12.0]);
    }
    assert_eq!(weights(LossKind::DrGrpo), vec![1.0 / 30.0, 0.0, 1.0 / 30.0, 1.0 / 30.0]);
    for kind in [LossKind::Bnpo, LossKind::Dapo, LossKind::Cispo, LossKind::Reinforce] {
        assert_eq!(weights(kind), vec![1.0 / 8.0, 0.0, 1.0 / 8.0, 1.0 / 8.0]);
    }
    assert_eq!(weights(LossKind::Luspo), vec![1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0]);
    assert_eq!(sequence_weights(LossKind::Dapo, &[], &[], 10), Vec::<f64>::new());
    // The first and the last completion are turns of one conversation.
    let turns = |kind| -> Vec<f64> { sequence_weights(kind, &lengths, &[3, 1, 2, 3], 10) };
    assert_eq!(turns(LossKind::Grpo), vec![1.0 / 14.0, 0.0, 1.0 / 2.0, 1.0 / 14.0]);
    assert_eq!(turns(LossKind::Luspo), vec![1.0 / 2.0, 0.0, 1.0 / 2.0, 1.0 / 2.0]);
    assert_eq!(turns(LossKind::DrGrpo), weights(LossKind::DrGrpo));
    assert_eq!(turns(LossKind::Dapo), weights(LossKind::Dapo));
}

/// The weight of `count` tokens whose log-probabilities changed by `change` each.
fn weight(count: usize, change: f64) -> f64 {
    let recorded: Vec<f64> = (0..count).map(|t| -1.0 - (t % 3) as f64).collect();
    let old: Vec<f64> = recorded.iter().map(|r| r + change).collect();
    let liked = late_weight(&old, &recorded, 1.0);
    let weight = late_weight(&old, &recorded, -1.0);
    assert_eq!(liked, weight.max(0.3), "a liked completion that became rare is still learned");
    weight
}

#[test]
fn a_late_completion_has_the_truncated_weight_of_its_sequence() {
    assert!((weight(8, -0.1) - (-0.8_f64).exp()).abs() < 1e-12);
    assert!((weight(64, -0.1) - (-6.4_f64).exp()).abs() < 1e-12);
    assert_eq!(weight(8, 0.1), 1.0, "it never counts more");
    assert_eq!(weight(0, 0.0), 1.0);
    let bounded = weight(4096, -0.05);
    assert!((bounded - (-0.05 * LONGEST).exp()).abs() < 1e-12);
    assert!(bounded > LEAST_WEIGHT && (-0.05_f64 * 4096.0).exp() < LEAST_WEIGHT);
    assert!(weight(4096, -0.2) < LEAST_WEIGHT);
}
