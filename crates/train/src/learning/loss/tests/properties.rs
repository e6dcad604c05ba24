//! Properties of every loss for random sequences.

use proptest::prelude::*;

use crate::config::{CorrectionMode, KlEstimator, LossKind, RatioLevel};
use crate::learning::loss::entropy::{acting, adapted_coef, threshold};
use crate::learning::loss::kl::adapted_beta;
use crate::learning::loss::{
    LossConfig, LossSequence, SequenceLoss, TokenWeights, clipped, sequence_loss,
};

const KINDS: [LossKind; 10] = [
    LossKind::Grpo,
    LossKind::DrGrpo,
    LossKind::Bnpo,
    LossKind::Dapo,
    LossKind::Cispo,
    LossKind::Sapo,
    LossKind::Luspo,
    LossKind::Gspo,
    LossKind::Reinforce,
    LossKind::Vespo,
];

fn any_config() -> impl Strategy<Value = LossConfig> {
    let kl = prop::sample::select(vec![
        KlEstimator::K1,
        KlEstimator::K2,
        KlEstimator::K3,
        KlEstimator::Corrected,
    ]);
    let correction = prop::sample::select(vec![
        CorrectionMode::None,
        CorrectionMode::TokenTruncate,
        CorrectionMode::TokenMask,
        CorrectionMode::SequenceTruncate,
        CorrectionMode::SequenceMask,
    ]);
    let level = prop::sample::select(vec![RatioLevel::Token, RatioLevel::Sequence]);
    let bounds = prop::sample::select(vec![(0.0, 0.0), (2.0, 0.0), (0.0, 1.2)]);
    let kind = prop::sample::select(KINDS.to_vec());
    (kind, level, kl, correction, bounds, 0.0..0.5_f64, 0.0..0.2_f64).prop_map(
        |(kind, level, kl, correction, (delta, dual_clip), beta, off_policy_threshold)| {
            LossConfig {
                kind,
                level: if kind == LossKind::Gspo { RatioLevel::Sequence } else { level },
                delta,
                dual_clip,
                beta,
                kl,
                off_policy_threshold,
                correction,
                correction_min: 0.6,
                correction_max: 1.7,
                ..super::config(0.2, 0.3, beta)
            }
        },
    )
}

/// Log-probability, entropy, recorded, old, reference.
type Token = (f64, f64, f64, f64, f64);

fn any_tokens() -> impl Strategy<Value = Vec<Token>> {
    let token = (-4.0..-0.1_f64, 0.0..2.0_f64, -0.6..0.6_f64, -0.4..0.4_f64, -0.8..0.8_f64);
    prop::collection::vec(token, 1..7).prop_map(|tokens| {
        let shifted = |(l, h, s, o, f): Token| (l, h, l + s, l + o, l + f);
        tokens.into_iter().map(shifted).collect()
    })
}

fn run(
    tokens: &[Token],
    advantage: f64,
    weights: &TokenWeights,
    config: &LossConfig,
) -> SequenceLoss {
    let column = |f: fn(&Token) -> f64| tokens.iter().map(f).collect::<Vec<_>>();
    let old = column(|t| t.3);
    let sequence = LossSequence {
        logprobs: &column(|t| t.0),
        entropies: &column(|t| t.1),
        recorded: &column(|t| t.2),
        old: (config.correction != CorrectionMode::None).then_some(&old),
        reference: Some(&column(|t| t.4)),
        advantage,
    };
    sequence_loss(&sequence, weights, config)
}

/// How far a central difference over a small step is from the one over half of it: large at kinks.
fn derivative(at: impl Fn(f64) -> f64) -> (f64, f64) {
    let over = |step: f64| (at(step) - at(-step)) / (2.0 * step);
    let sided = (at(1e-5) - 2.0 * at(0.0) + at(-1e-5)) / 1e-5;
    (over(1e-5), sided.abs())
}

proptest! {
    #[test]
    fn slopes_are_derivatives_away_from_kinks(
        tokens in any_tokens(),
        advantage in prop_oneof![-2.0..2.0_f64, Just(0.0)],
        config in any_config(),
        entropy in 0.0..0.3_f64,
        least in prop::option::of(0.0..2.0_f64),
    ) {
        // Of these the ratio is held: see the reference cases.
        prop_assume!(!matches!(config.kind, LossKind::Cispo | LossKind::Vespo));
        let weights = TokenWeights { loss: 0.7, entropy, threshold: least };
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
            let (measured, bend) = derivative(moved(0));
            if bend < 1e-3 {
                prop_assert!((measured - out.logprob_slopes[t]).abs() < 1e-3 * (1.0 + measured.abs()));
            }
            let (measured, bend) = derivative(moved(1));
            if bend < 1e-3 {
                prop_assert!((measured - out.entropy_slopes[t]).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn masked_tokens_have_no_slope(
        tokens in any_tokens(),
        advantage in -2.0..2.0_f64,
        config in any_config(),
        least in 0.0..2.0_f64,
    ) {
        let config = LossConfig { beta: 0.0, ..config };
        let weights = TokenWeights { loss: 1.0, entropy: 0.1, threshold: Some(least) };
        let out = run(&tokens, advantage, &weights, &config);
        for (t, token) in tokens.iter().enumerate() {
            if token.1 < least {
                prop_assert_eq!(out.entropy_slopes[t], 0.0);
                // A sequence's one ratio is moved by all of its tokens.
                if config.level == RatioLevel::Token {
                    prop_assert_eq!(out.logprob_slopes[t], 0.0);
                }
            }
        }
        let nothing = TokenWeights { threshold: Some(3.0), ..weights };
        let out = run(&tokens, advantage, &nothing, &config);
        prop_assert_eq!(out.loss, 0.0);
        prop_assert!(out.logprob_slopes.iter().all(|slope| *slope == 0.0));
        prop_assert_eq!(out.open, (0, 0.0));
    }

    /// Where old is recorded, the correction weighs 1 and the two ways to state the ratio agree.
    #[test]
    fn without_a_difference_a_correction_changes_nothing(
        tokens in any_tokens(),
        advantage in -2.0..2.0_f64,
        config in any_config(),
    ) {
        let same: Vec<Token> = tokens.iter().map(|t| (t.0, t.1, t.2, t.2, t.4)).collect();
        let weights = TokenWeights { loss: 1.0, entropy: 0.0, threshold: None };
        let plain = LossConfig { correction: CorrectionMode::None, ..config };
        let (a, b) = (run(&same, advantage, &weights, &config), run(&same, advantage, &weights, &plain));
        prop_assert_eq!(a.loss, b.loss);
        prop_assert_eq!(a.logprob_slopes, b.logprob_slopes);
    }

    /// Beyond the upper bound, delta and the dual clip are the same bound.
    #[test]
    fn delta_is_a_dual_clip(ratio in 0.01..6.0_f64, advantage in -2.0..2.0_f64, bound in 1.4..4.0_f64) {
        let plain = super::config(0.2, 0.3, 0.0);
        let delta = clipped(ratio, advantage, &LossConfig { delta: bound, ..plain });
        let dual = clipped(ratio, advantage, &LossConfig { dual_clip: bound, ..plain });
        prop_assert!((delta.value - dual.value).abs() < 1e-12);
        prop_assert!((delta.by_log_ratio - dual.by_log_ratio).abs() < 1e-12);
        prop_assert!(-delta.value * advantage.signum() <= bound * advantage.abs() + 1e-12);
    }

    /// The threshold takes at least the share asked for and no more than a token beyond it.
    #[test]
    fn the_entropy_threshold_takes_its_share(
        entropies in prop::collection::hash_set(0_u32..10_000, 1..60),
        share in 0.01..0.999_f64,
    ) {
        let entropies: Vec<f64> = entropies.into_iter().map(f64::from).collect();
        let least = threshold(&entropies, share).unwrap();
        let taken = entropies.iter().filter(|h| **h >= least).count() as f64;
        let wanted = share * (entropies.len() - 1) as f64;
        prop_assert!(taken >= wanted.floor() && taken <= wanted.floor() + 1.0 + 1e-9, "{taken} of {wanted}");
        prop_assert_eq!(threshold(&entropies, 1.0), None);
    }
}

#[test]
fn an_off_policy_sequence_of_negative_advantage_keeps_its_kl_alone() {
    let config = LossConfig { off_policy_threshold: 0.1, ..super::config(0.2, 0.2, 0.5) };
    let weights = TokenWeights { loss: 1.0, entropy: 0.0, threshold: None };
    // Recorded 0.2 above the policy's in the mean.
    let tokens = [(-1.0, 1.0, -0.7, -1.0, -1.5), (-2.0, 1.0, -1.9, -2.0, -1.0)];
    let out = run(&tokens, -1.0, &weights, &config);
    let kl_alone = run(&tokens, 0.0, &weights, &config);
    assert!(out.off_policy && !kl_alone.off_policy);
    assert_eq!((out.loss, &out.logprob_slopes), (kl_alone.loss, &kl_alone.logprob_slopes));
    assert!(!run(&tokens, 1.0, &weights, &config).off_policy);
    let wider = LossConfig { off_policy_threshold: 0.21, ..config };
    assert!(!run(&tokens, -1.0, &weights, &wider).off_policy);
}

#[test]
fn adaptive_coefficients_follow_their_targets() {
    let kl = crate::config::KlConfig { target: 0.1, horizon: 1000.0, ..Default::default() };
    // Twice the target is an error of 1, held at 0.2: a factor of 1 + 0.2 * 100 / 1000.
    assert!((adapted_beta(0.5, 0.2, 100.0, &kl) - 0.51).abs() < 1e-12);
    assert!((adapted_beta(0.5, 0.0, 100.0, &kl) - 0.49).abs() < 1e-12);
    assert!((adapted_beta(0.5, 0.11, 100.0, &kl) - 0.505).abs() < 1e-12);
    assert_eq!(adapted_beta(0.5, f64::NAN, 100.0, &kl), 0.5);
    let fixed = crate::config::KlConfig { target: 0.0, ..kl };
    assert_eq!(adapted_beta(0.5, 9.0, 100.0, &fixed), 0.5);
    let entropy = crate::config::EntropyConfig {
        coef: 0.01,
        adaptive: true,
        coef_max: 0.012,
        target: 0.2,
        ..Default::default()
    };
    // As TRL: nothing before the first entropy is known, nor above the target.
    assert_eq!(acting(0.01, f64::INFINITY, &entropy), 0.0);
    assert_eq!(acting(0.01, 0.21, &entropy), 0.0);
    assert_eq!(acting(0.01, 0.2, &entropy), 0.01);
    assert_eq!(adapted_coef(0.01, 0.2, &entropy), 0.012);
    assert!((adapted_coef(0.01, 0.3, &entropy) - 0.005).abs() < 1e-15);
    assert_eq!(adapted_coef(0.001, 0.3, &entropy), 0.0);
    let fixed = crate::config::EntropyConfig { adaptive: false, ..entropy };
    assert_eq!((acting(0.01, 9.0, &fixed), adapted_coef(0.01, 0.1, &fixed)), (0.01, 0.01));
}
