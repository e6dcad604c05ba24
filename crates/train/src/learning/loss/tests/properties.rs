//! Properties of every loss for random sequences.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use strum::VariantNames;

use crate::config::{
    CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig, KlEstimator, LossKind, RatioLevel,
    TrainConfig,
};
use crate::learning::loss::adapted_beta;
use crate::learning::loss::clipped;
use crate::learning::loss::{LossCoefficients, LossSequence, SequenceLoss, sequence_loss};
use crate::learning::loss::{active_entropy_coef, adapted_coef, entropy_threshold};

fn any_config() -> impl Strategy<Value = TrainConfig> {
    let estimator = prop::sample::select(vec![
        KlEstimator::K1,
        KlEstimator::K2,
        KlEstimator::K3,
        KlEstimator::Corrected,
    ]);
    let mode = prop::sample::select(vec![
        CorrectionMode::None,
        CorrectionMode::TokenTruncate,
        CorrectionMode::TokenMask,
        CorrectionMode::SequenceTruncate,
        CorrectionMode::SequenceMask,
    ]);
    let level = prop::sample::select(vec![RatioLevel::Token, RatioLevel::Sequence]);
    let bounds = prop::sample::select(vec![(0.0, 0.0), (1.5, 0.0), (0.0, 1.2)]);
    let kind = prop::sample::select(LossKind::VARIANTS);
    let kind = kind.prop_map(|name| name.parse::<LossKind>().unwrap());
    (kind, level, estimator, mode, bounds, 0.0..0.5_f64, 0.0..0.2_f64).prop_map(
        |(loss, level, estimator, mode, (delta, dual_clip), beta, off_policy_mask_threshold)| {
            TrainConfig {
                loss: loss.into(),
                importance_sampling_level: level,
                delta,
                dual_clip,
                kl: KlConfig { estimator, ..KlConfig::default() },
                off_policy_mask_threshold,
                sampler_correction: CorrectionConfig { kind: mode, clip_min: 0.6, clip_max: 1.7 },
                ..super::config(0.2, 0.3, beta)
            }
        },
    )
}

/// Log-probability, entropy, recorded, old, reference.
type Token = (f64, f64, f64, f64, f64);

fn any_tokens() -> impl Strategy<Value = Vec<Token>> {
    // Ratios from 0.25 to 4 to the recorded policy, beyond every bound of `any_config`.
    let token = (-4.0..-0.1_f64, 0.0..2.0_f64, -1.4..1.4_f64, -0.8..0.8_f64, -0.8..0.8_f64);
    prop::collection::vec(token, 1..7).prop_map(|tokens| {
        let shifted = |(l, h, s, o, f): Token| (l, h, l + s, l + o, l + f);
        tokens.into_iter().map(shifted).collect()
    })
}

/// Coefficients of a sequence whose tokens have weight 1 and no bonus.
fn plain(config: &TrainConfig) -> LossCoefficients {
    LossCoefficients { token: 1.0, entropy: 0.0, entropy_threshold: None, beta: config.beta }
}

fn run(
    tokens: &[Token],
    advantage: f64,
    coefficients: &LossCoefficients,
    config: &TrainConfig,
) -> SequenceLoss {
    let column = |f: fn(&Token) -> f64| tokens.iter().map(f).collect::<Vec<_>>();
    let old = column(|t| t.3);
    let sequence = LossSequence {
        logprobs: &column(|t| t.0),
        entropies: &column(|t| t.1),
        recorded: &column(|t| t.2),
        old: (config.sampler_correction.kind != CorrectionMode::None).then_some(&old),
        reference: Some(&column(|t| t.4)),
        advantage,
    };
    sequence_loss(&sequence, coefficients, config)
}

/// The properties are of no use for bounds that no random ratio reaches.
#[test]
fn random_ratios_reach_every_bound() {
    let mut runner = TestRunner::deterministic();
    let mut reached = BTreeMap::new();
    for _ in 0..2000 {
        let advantage = -1.0;
        let config = any_config().new_tree(&mut runner).unwrap().current();
        let tokens = any_tokens().new_tree(&mut runner).unwrap().current();
        let changes = |without: TrainConfig| {
            let weights = plain(&config);
            run(&tokens, advantage, &weights, &config)
                != run(&tokens, advantage, &weights, &without)
        };
        let mut count = |bound, changes| *reached.entry(bound).or_insert(0) += u32::from(changes);
        count("delta", changes(TrainConfig { delta: 0.0, ..config.clone() }));
        count("dual clip", changes(TrainConfig { dual_clip: 0.0, ..config.clone() }));
        count("lower bound", changes(TrainConfig { clip_low: 0.999, ..config.clone() }));
        let unbounded =
            CorrectionConfig { clip_min: 0.0, clip_max: 0.0, ..config.sampler_correction };
        count(
            "correction",
            changes(TrainConfig { sampler_correction: unbounded, ..config.clone() }),
        );
    }
    assert!(reached.len() == 4 && reached.values().all(|n| *n > 50), "{reached:?}");
}

/// The central difference at 0, and the jump of the one-sided differences, which is large at kinks.
fn derivative(at: impl Fn(f64) -> f64) -> (f64, f64) {
    let over = |step: f64| (at(step) - at(-step)) / (2.0 * step);
    let jump = (at(1e-5) - 2.0 * at(0.0) + at(-1e-5)) / 1e-5;
    (over(1e-5), jump.abs())
}

proptest! {
    #[test]
    fn gradients_are_derivatives_away_from_kinks(
        tokens in any_tokens(),
        advantage in prop_oneof![-2.0..2.0_f64, Just(0.0)],
        config in any_config(),
        entropy in 0.0..0.3_f64,
        least in prop::option::of(0.0..2.0_f64),
    ) {
        // These treat the ratio as a constant; the reference cases cover them.
        prop_assume!(!matches!(config.loss.kind, LossKind::Cispo | LossKind::Vespo));
        let weights = LossCoefficients {
            token: 0.7,
            entropy,
            entropy_threshold: least,
            beta: config.beta,
        };
        let out = run(&tokens, advantage, &weights, &config);
        for t in 0..tokens.len() {
            let moved = |column: usize| {
                let (tokens, weights, config) = (&tokens, &weights, &config);
                move |step: f64| {
                    let mut tokens = tokens.clone();
                    if column == 0 { tokens[t].0 += step } else { tokens[t].1 += step }
                    run(&tokens, advantage, weights, config).loss
                }
            };
            let (measured, jump) = derivative(moved(0));
            if jump < 1e-3 {
                prop_assert!((measured - out.dloss_dlogp[t]).abs() < 1e-3 * (1.0 + measured.abs()));
            }
            let (measured, jump) = derivative(moved(1));
            if jump < 1e-3 {
                prop_assert!((measured - out.dloss_dentropy[t]).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn unselected_tokens_have_no_gradient(
        tokens in any_tokens(),
        advantage in -2.0..2.0_f64,
        config in any_config(),
        least in 0.0..2.0_f64,
    ) {
        let config = TrainConfig { beta: 0.0, ..config };
        let weights =
            LossCoefficients { entropy: 0.1, entropy_threshold: Some(least), ..plain(&config) };
        let out = run(&tokens, advantage, &weights, &config);
        for (t, token) in tokens.iter().enumerate() {
            if token.1 < least {
                prop_assert_eq!(out.dloss_dentropy[t], 0.0);
                // All tokens change the one ratio of a sequence.
                let by_token = config.importance_sampling_level == RatioLevel::Token;
                if by_token && config.loss.kind != LossKind::Gspo {
                    prop_assert_eq!(out.dloss_dlogp[t], 0.0);
                }
            }
        }
        let nothing = LossCoefficients { entropy_threshold: Some(3.0), ..weights };
        let out = run(&tokens, advantage, &nothing, &config);
        prop_assert_eq!(out.loss, 0.0);
        prop_assert!(out.dloss_dlogp.iter().all(|d| *d == 0.0));
        prop_assert_eq!((out.selected_tokens, out.selected_entropy), (0, 0.0));
    }

    /// With old equal to recorded, the correction has weight 1 and both definitions of the ratio
    /// agree.
    #[test]
    fn without_a_difference_a_correction_changes_nothing(
        tokens in any_tokens(),
        advantage in -2.0..2.0_f64,
        config in any_config(),
    ) {
        let same: Vec<Token> = tokens.iter().map(|t| (t.0, t.1, t.2, t.2, t.4)).collect();
        let weights = plain(&config);
        let uncorrected =
            TrainConfig { sampler_correction: CorrectionConfig::default(), ..config.clone() };
        let a = run(&same, advantage, &weights, &config);
        let b = run(&same, advantage, &weights, &uncorrected);
        prop_assert_eq!(a.loss, b.loss);
        prop_assert_eq!(a.dloss_dlogp, b.dloss_dlogp);
    }

    /// Above the upper bound, delta and the dual clip are the same bound.
    #[test]
    fn delta_is_a_dual_clip(ratio in 0.01..6.0_f64, advantage in -2.0..2.0_f64, bound in 1.4..4.0_f64) {
        let plain = super::config(0.2, 0.3, 0.0);
        let delta = clipped(ratio, advantage, &TrainConfig { delta: bound, ..plain.clone() });
        let dual = clipped(ratio, advantage, &TrainConfig { dual_clip: bound, ..plain });
        prop_assert!((delta.value - dual.value).abs() < 1e-12);
        prop_assert!((delta.d_log_ratio - dual.d_log_ratio).abs() < 1e-12);
        prop_assert!(-delta.value * advantage.signum() <= bound * advantage.abs() + 1e-12);
    }

    /// The default dual clip needs no change where delta is set or the loss does not clip.
    #[test]
    fn the_dual_clip_applies_only_to_clipped_losses_without_delta(
        tokens in any_tokens(),
        advantage in -2.0..0.0_f64,
        config in any_config(),
    ) {
        prop_assume!(config.delta > 0.0 || !config.loss.kind.clips());
        let weights = plain(&config);
        let dual = TrainConfig { dual_clip: 1.2, ..config.clone() };
        let without = TrainConfig { dual_clip: 0.0, ..config };
        prop_assert_eq!(
            run(&tokens, advantage, &weights, &dual),
            run(&tokens, advantage, &weights, &without)
        );
    }

    /// The threshold selects at least the requested fraction and at most one token more.
    #[test]
    fn the_entropy_threshold_selects_its_fraction(
        entropies in prop::collection::hash_set(0_u32..10_000, 1..60),
        fraction in 0.01..0.999_f64,
    ) {
        let entropies: Vec<f64> = entropies.into_iter().map(f64::from).collect();
        let least = entropy_threshold(&entropies, fraction).unwrap();
        let selected = entropies.iter().filter(|h| **h >= least).count() as f64;
        let wanted = fraction * (entropies.len() - 1) as f64;
        prop_assert!(
            selected >= wanted.floor() && selected <= wanted.floor() + 1.0 + 1e-9,
            "{selected} of {wanted}"
        );
        prop_assert_eq!(entropy_threshold(&entropies, 1.0), None);
    }
}

#[test]
fn a_masked_off_policy_sequence_has_only_its_kl() {
    let config = TrainConfig { off_policy_mask_threshold: 0.1, ..super::config(0.2, 0.2, 0.5) };
    let weights = plain(&config);
    // The recorded log-probabilities exceed the policy's by 0.2 in the mean.
    let tokens = [(-1.0, 1.0, -0.7, -1.0, -1.5), (-2.0, 1.0, -1.9, -2.0, -1.0)];
    let out = run(&tokens, -1.0, &weights, &config);
    let only_kl = run(&tokens, 0.0, &weights, &config);
    assert!(out.off_policy && !only_kl.off_policy);
    assert_eq!((out.loss, &out.dloss_dlogp), (only_kl.loss, &only_kl.dloss_dlogp));
    assert!(!run(&tokens, 1.0, &weights, &config).off_policy);
    let wider = TrainConfig { off_policy_mask_threshold: 0.21, ..config.clone() };
    assert!(!run(&tokens, -1.0, &weights, &wider).off_policy);
}

#[test]
fn adaptive_coefficients_follow_their_targets() {
    let kl = KlConfig { target: 0.1, ..Default::default() };
    // Twice the target is an error of 1, clamped to 0.2: a factor of 1 + 0.2 * 1000 / 10000.
    assert!((adapted_beta(0.5, 0.2, 1000.0, &kl) - 0.51).abs() < 1e-12);
    assert!((adapted_beta(0.5, 0.0, 1000.0, &kl) - 0.49).abs() < 1e-12);
    assert!((adapted_beta(0.5, 0.11, 1000.0, &kl) - 0.505).abs() < 1e-12);
    assert!((adapted_beta(0.5, 0.0, 1e6, &kl) - 0.4).abs() < 1e-12);
    assert_eq!(adapted_beta(0.5, f64::NAN, 100.0, &kl), 0.5);
    let fixed = KlConfig { target: 0.0, ..kl };
    assert_eq!(adapted_beta(0.5, 9.0, 100.0, &fixed), 0.5);
    let entropy = EntropyConfig { coef: 0.01, target: 0.2 };
    // As in TRL: 0 before the first entropy is known, and above the target.
    assert_eq!(active_entropy_coef(0.01, f64::INFINITY, &entropy), 0.0);
    assert_eq!(active_entropy_coef(0.01, 0.21, &entropy), 0.0);
    assert_eq!(active_entropy_coef(0.01, 0.2, &entropy), 0.01);
    assert!((adapted_coef(0.01, 0.2, &entropy) - 0.015).abs() < 1e-15);
    assert_eq!(adapted_coef(0.998, 0.2, &entropy), 1.0);
    assert!((adapted_coef(0.01, 0.3, &entropy) - 0.005).abs() < 1e-15);
    assert_eq!(adapted_coef(0.001, 0.3, &entropy), 0.0);
    let fixed = EntropyConfig { target: 0.0, ..entropy };
    assert_eq!(
        (active_entropy_coef(0.01, 9.0, &fixed), adapted_coef(0.01, 0.1, &fixed)),
        (0.01, 0.01)
    );
}
