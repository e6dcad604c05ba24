//! `[train]`: errors of the objective's keys.

use hone_train::config::{Loss, LossKind};
use insta::assert_snapshot;

use crate::{Config, parse};

fn error(text: &str) -> String {
    parse(&format!("[train]\n{text}")).unwrap_err().to_string()
}

#[test]
fn the_default_file_contains_every_key_of_the_loss() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/default.toml");
    let text = std::fs::read_to_string(path).unwrap();
    assert_eq!(parse(&text).unwrap(), Config::default());
    for key in ["importance_sampling_level", "reward_aggregation", "estimator", "coef", "loss"] {
        assert!(text.contains(&format!("\n{key} = ")), "{key}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    assert_snapshot!(error("loss = 'ppo'"), @r#"train.loss is "ppo": it must be "grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "gspo", "reinforce" or "vespo""#);
    assert_snapshot!(error("top_entropy_quantile = 0.0"), @"train.top_entropy_quantile is 0: it must be greater than 0 and at most 1");
    assert_snapshot!(error("loss = { kind = 'sapo', tau_pos = 0.0 }"), @"train.loss.tau_pos is 0: it must be greater than 0");
    assert_snapshot!(error("loss = { kind = 'sapo', tau_pos = 'a' }"), @r#"train.loss.tau_pos is "a": it must be a number"#);
    assert_snapshot!(error("loss = { kind = 'sapo', k_pos = 1.0 }"), @"train.loss.k_pos is not a key: did you mean train.loss.tau_pos?");
    assert_snapshot!(error("loss = { kind = 'dapo', tau_pos = 1.0 }"), @"train.loss.tau_pos is not a key: the keys there are kind");
    assert_snapshot!(error("loss = { tau_pos = 1.0 }"), @"train.loss.kind is missing");
    assert_snapshot!(error("loss = 3"), @"train.loss is 3: it must be a name, or a table of a kind and its parameters");
    assert_snapshot!(error("delta = 1.1"), @"train.delta is 1.1: it must be 0 or greater than 1 + train.clip_high (1.2)");
    assert_snapshot!(error("correction_weight = -0.5"), @"train.correction_weight is -0.5: it must be from 0 to 100");
    assert_snapshot!(error("correction_weight = nan"), @"train.correction_weight is NaN: it must be from 0 to 100");
    assert_snapshot!(error("replay.share = 0.6"), @"train.replay.share is 0.6: it must be from 0 to 0.5");
    assert_snapshot!(error("dual_clip = 0.5"), @"train.dual_clip is 0.5: it must be 0 or greater than 1");
    assert_snapshot!(error("kl.estimator = 'k4'"), @r#"train.kl.estimator is "k4": it must be "k1", "k2", "k3" or "corrected""#);
    assert_snapshot!(error("sampler_correction = 'sequence'"), @r#"train.sampler_correction is "sequence": it must be "none", "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask""#);
    assert_snapshot!(error("sampler_correction = { kind = 'token_mask', clip_min = 5.0 }"), @"train.sampler_correction.clip_max is 3: it must be 0 or greater than train.sampler_correction.clip_min (5)");
    assert_snapshot!(error("zero_variance_groups = 'refill'"), @r#"train.zero_variance_groups is "refill": it must be "keep" or "drop""#);
}

#[test]
fn a_loss_or_delta_without_a_dual_clip_needs_no_other_key() {
    assert_eq!(
        parse("[train]\nloss = { kind = 'vespo', k_neg = 1 }").unwrap().train.loss,
        Loss { k_neg: 1.0, ..LossKind::Vespo.into() }
    );
    for loss in ["cispo", "sapo", "reinforce", "vespo"] {
        let config = parse(&format!("[train]\nloss = '{loss}'")).unwrap();
        assert_eq!(config.train.dual_clip, 3.0);
    }
    assert_eq!(parse("[train]\ndelta = 2.0").unwrap().train.delta, 2.0);
}

#[test]
fn every_parameter_of_a_choice_has_a_range() {
    for (key, kind, parameters) in [
        ("schedule", "polynomial", &["min_learning_rate", "power"][..]),
        ("optimizer", "adamw_8bit", &["beta1", "beta2", "eps"]),
        ("average", "ema", &["decay"]),
        ("loss", "sapo", &["tau_pos", "tau_neg"]),
        ("loss", "vespo", &["k_pos", "lambda_pos", "k_neg", "lambda_neg"]),
        ("sampler_correction", "token_mask", &["clip_min", "clip_max"]),
    ] {
        for (parameter, value) in parameters.iter().flat_map(|p| [(p, "nan"), (p, "-1.0")]) {
            let error = error(&format!("{key} = {{ kind = '{kind}', {parameter} = {value} }}"));
            assert!(error.starts_with(&format!("train.{key}.{parameter} is ")), "{error}");
        }
    }
}

#[test]
fn contradicting_values_are_refused() {
    assert_snapshot!(error("loss = 'cispo'\ndelta = 2.0"), @r#"train.delta is 2: it must be 0 with train.loss "cispo", which has no clipped ratio"#);
    assert_snapshot!(error("loss = { kind = 'vespo', k_neg = -1.0 }"), @"train.loss.k_neg is -1: it must be a finite number, 0 or more");
    assert_snapshot!(error("loss = 'vespo'\nimportance_sampling_level = 'sequence'"), @r#"train.importance_sampling_level is "sequence": it must be "token" with train.loss "vespo", which weighs sequences by itself"#);
    assert_snapshot!(error("loss = 'vespo'\nsampler_correction = 'sequence_mask'"), @r#"train.sampler_correction is "sequence_mask": it must be "none", "token_truncate" or "token_mask" with train.loss "vespo""#);
    assert_snapshot!(error("loss = 'reinforce'\nnum_iterations = 2"), @r#"train.num_iterations is 2: it must be 1 with train.loss "reinforce", which has no importance ratio"#);
    assert_snapshot!(error("loss = 'reinforce'\nimportance_sampling_level = 'sequence'"), @r#"train.importance_sampling_level is "sequence": it must be "token" with train.loss "reinforce", which has no importance ratio"#);
    assert_snapshot!(error("beta = 0.0\nkl.target = 0.1"), @"train.kl.target is 0.1: it must be 0 with train.beta 0, which disables the KL term");
    assert_snapshot!(error("beta = 0.0\nkl.sync_steps = 10"), @"train.kl.sync_steps is 10: it must be 0 with train.beta 0, which uses no reference");
    assert_snapshot!(error("schedule = { kind = 'linear', steps = 10 }"), @"train.max_steps is 0: it must be at least 1 with a train.schedule that ends at the rate 0, where nothing is learned");
    assert_snapshot!(error("kl.sync_mixup = 0.0"), @"train.kl.sync_mixup is 0: it must be greater than 0 and at most 1");
    assert_snapshot!(error("entropy = { coef = 2.0, target = 0.3 }"), @"train.entropy.coef is 2: it must be at most 1 with train.entropy.target");
    assert_snapshot!(error("sampler_correction = { kind = 'token_truncate', clip_max = 0.0 }"), @r#"train.sampler_correction.clip_max is 0: it must be greater than 0, or clip_min, with "token_truncate""#);
    assert_snapshot!(error("reward_aggregation = 'gdpo'\nadvantage_scale = 'none'"), @r#"train.advantage_scale is "none": it must be "group" with train.reward_aggregation "gdpo", which divides by the group's deviation"#);
}
