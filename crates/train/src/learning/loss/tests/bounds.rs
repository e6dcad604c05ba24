//! Log-ratios far from 0: finite values, gradients that do not vanish, and NaN.

use super::{config, sampler_weights, token_loss};
use crate::config::{
    CorrectionConfig, CorrectionMode, KlConfig, KlEstimator, Loss, LossKind, TrainConfig,
};

/// The losses whose gradient passes through the ratio or the KL, with and without bounds on the ratio.
fn settings() -> Vec<TrainConfig> {
    let estimators = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Corrected];
    let losses = [LossKind::Grpo, LossKind::Gspo, LossKind::Sapo, LossKind::Reinforce];
    let with = |loss: LossKind, estimator| TrainConfig {
        loss: loss.into(),
        kl: KlConfig { estimator, ..KlConfig::default() },
        ..config(0.2, 0.2, 0.1)
    };
    losses.into_iter().flat_map(|loss| estimators.map(|estimator| with(loss, estimator))).collect()
}

#[test]
fn the_gradient_is_the_derivative_across_the_bounds() {
    for config in settings() {
        for logprob in [-25.0, -20.0, -2.611, -2.61, 0.0, 10.0, 19.9, 20.0, 20.1, 25.0, 800.0] {
            let at = |l: f64| token_loss(l, 0.0, Some(0.0), -1.0, &config);
            let (step, here) = (1e-4, at(logprob));
            let measured = (at(logprob + step).loss - at(logprob - step).loss) / (2.0 * step);
            let gradient = here.dloss_dlogp[0];
            // Rounding of the loss, and the jump of the second derivative at a bound.
            let tolerance = 1e-4 * (1.0 + measured.abs()) + 1e-15 * here.loss.abs() / step;
            assert!(
                (measured - gradient).abs() < tolerance,
                "{:?} {:?} at {logprob}: {measured} against {gradient}",
                config.loss,
                config.kl.estimator
            );
        }
    }
}

#[test]
fn every_finite_logprob_has_a_finite_loss_and_gradient() {
    for config in settings() {
        for logprob in [-1e30, -1e3, 1e3, 1e30] {
            for advantage in [-1.0, 1.0] {
                let token = token_loss(logprob, 0.0, Some(0.0), advantage, &config);
                assert!(token.loss.is_finite() && token.dloss_dlogp[0].is_finite(), "{config:?}");
            }
        }
    }
}

/// A clamp, as in verl, would leave these tokens without a gradient.
#[test]
fn tokens_beyond_the_bounds_are_pulled_back() {
    let plain = config(0.2, 0.2, 0.0);
    let gradient = |logprob| token_loss(logprob, 0.0, None, -1.0, &plain).dloss_dlogp[0];
    assert!((gradient(30.0) - 20.0_f64.exp()).abs() < 1.0);
    // The policy's probability is exp(-15) of the reference's.
    let kl = config(0.2, 0.2, 1.0);
    let token = token_loss(-15.0, -15.0, Some(0.0), 0.0, &kl);
    assert!((token.dloss_dlogp[0] + 12.610_868_638).abs() < 1e-6);
    assert!((token.kl - (10.0 + 12.610_868_638 * (15.0 - 2.610_868_638))).abs() < 1e-6);
    // The exponential itself would be 3.3 million.
    assert!(token.kl < 170.0);
    let below = token_loss(-2.6, -2.6, Some(0.0), 0.0, &kl).kl;
    assert!((below - (2.6_f64.exp_m1() - 2.6)).abs() < 1e-12 && below < 10.0);
}

#[test]
fn by_default_a_negative_advantage_has_no_gradient_above_a_ratio_of_three() {
    let default = TrainConfig { beta: 0.0, ..TrainConfig::default() };
    let token = |ratio: f64| token_loss(ratio.ln(), 0.0, None, -1.0, &default);
    assert!((token(2.9).dloss_dlogp[0] - 2.9).abs() < 1e-12);
    assert_eq!((token(3.1).loss, token(3.1).dloss_dlogp[0]), (3.0, 0.0));
}

#[test]
fn weights_of_the_sampler_and_of_vespo_are_finite() {
    for mode in [CorrectionMode::TokenMask, CorrectionMode::SequenceTruncate] {
        let bounds = CorrectionConfig { kind: mode, clip_min: 0.1, clip_max: 0.0 };
        let weights = sampler_weights(&bounds, &[-1.0, -1.0], &[-900.0, -900.0]);
        assert!(weights.iter().all(|rho| *rho == 20.0_f64.exp()), "{weights:?}");
    }
    let steep = Loss { k_pos: 1e3, lambda_pos: 1e-4, ..Loss::default() };
    assert!(super::super::vespo_weight(&[-1.0], &[-17.0], &[], 1.0, &steep).is_finite());
}

#[test]
fn a_logprob_that_is_not_a_number_makes_the_loss_not_a_number() {
    for config in settings() {
        assert!(token_loss(f64::NAN, 0.0, Some(0.0), -1.0, &config).loss.is_nan(), "{config:?}");
    }
    for mode in [
        CorrectionMode::TokenMask,
        CorrectionMode::TokenTruncate,
        CorrectionMode::SequenceMask,
        CorrectionMode::SequenceTruncate,
    ] {
        let bounds = CorrectionConfig { kind: mode, clip_min: 0.1, clip_max: 2.0 };
        assert!(sampler_weights(&bounds, &[f64::NAN], &[-1.0])[0].is_nan());
    }
}
