use std::collections::BTreeMap;

use proptest::prelude::*;

use hone_core::types::StepRecord;

use super::*;

fn record(step: u64, metrics: &[(&str, f64)]) -> StepRecord {
    let metrics: BTreeMap<String, f64> =
        metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    StepRecord { step, groups: Vec::new(), metrics, created: step * 1000 }
}

fn roles() -> RewardRoles {
    RewardRoles::of([("right", "numeric_match"), ("form", "format_strict"), ("brief", "length")])
}

fn monitor() -> HealthMonitor {
    with(WarningConfig::default(), MonitorState::default())
}

fn with(config: WarningConfig, state: MonitorState) -> HealthMonitor {
    HealthMonitor { config, roles: roles(), state }
}

fn active(monitor: &HealthMonitor) -> Vec<WarningKind> {
    WarningKind::ALL.iter().copied().filter(|kind| monitor.is_active(*kind)).collect()
}

/// Observes the steps that `metrics` describes; returns the warnings raised.
fn run(
    monitor: &mut HealthMonitor,
    steps: std::ops::Range<u64>,
    metrics: impl Fn(u64) -> Vec<(&'static str, f64)>,
) -> Vec<Warning> {
    steps.flat_map(|step| monitor.detect(&record(step, &metrics(step)))).collect()
}

fn healthy(step: u64) -> Vec<(&'static str, f64)> {
    let x = step as f64;
    vec![
        ("reward_mean", 0.5 + 0.01 * x),
        ("reward_std", 0.3),
        ("zero_std_groups_ratio", 0.1),
        ("kl", 0.001 * x),
        ("entropy", 1.0 - 0.002 * x),
        ("clip_low", 0.01),
        ("clip_high", 0.02),
        ("completion_length", 30.0 + 0.1 * x),
        ("truncated_ratio", 0.02),
        ("part/right", 0.3 + 0.005 * x),
        ("part/form", 0.2 + 0.005 * x),
    ]
}

fn healthy_except(step: u64, changed: &[(&'static str, f64)]) -> Vec<(&'static str, f64)> {
    let mut metrics = healthy(step);
    for (name, value) in changed {
        metrics.retain(|(n, _)| n != name);
        metrics.push((name, *value));
    }
    metrics
}

#[test]
fn healthy_and_isolated_steps_raise_no_warning_and_oscillating_ones_raise_one() {
    assert_eq!(run(&mut monitor(), 1..150, healthy), []);
    let kl = |s, is_high, high, low| healthy_except(s, &[("kl", if is_high { high } else { low })]);
    assert_eq!(run(&mut monitor(), 1..100, |s| kl(s, s % 5 == 0, 3e6, 0.01)), []);
    let oscillating = |s: u64| kl(s, s < 6 || s.is_multiple_of(2), 0.52, 0.48);
    assert_eq!(run(&mut monitor(), 1..100, oscillating).len(), 1);
}

/// Each kind with the step at which it is raised, and the metrics that raise it.
#[test]
fn every_kind_is_raised_once_ends_and_can_be_raised_again() {
    type StepMetrics = fn(u64) -> Vec<(&'static str, f64)>;
    let cases: [(WarningKind, u64, StepMetrics); 9] = [
        (WarningKind::Collapse, 5, |s| healthy_except(s, &[("reward_std", 0.01)])),
        (WarningKind::Collapse, 5, |s| healthy_except(s, &[("zero_std_groups_ratio", 0.9)])),
        (WarningKind::KlExplosion, 5, |s| healthy_except(s, &[("kl", 0.51)])),
        (WarningKind::KlExplosion, 1, |s| healthy_except(s, &[("kl", f64::INFINITY)])),
        (WarningKind::FlatReward, 44, |s| healthy_except(s, &[("reward_mean", 0.5)])),
        (WarningKind::FormatIgnored, 20, |s| healthy_except(s, &[("part/form", 0.01)])),
        (WarningKind::LengthHacking, 5, |s| healthy_except(s, &[("truncated_ratio", 0.6)])),
        (WarningKind::LengthHacking, 44, |s| {
            healthy_except(s, &[("completion_length", 30.0 + s as f64), ("part/right", 0.3)])
        }),
        (WarningKind::ClipRatioHigh, 5, |s| {
            healthy_except(s, &[("clip_low", 0.2), ("clip_high", 0.15)])
        }),
    ];
    for (kind, at, metrics) in cases {
        let mut monitor = monitor();
        let raised = run(&mut monitor, 1..100, metrics);
        assert_eq!(raised.len(), 1, "{kind}: {raised:?}");
        assert_eq!((raised[0].kind, raised[0].step), (kind, at), "{raised:?}");
        assert_eq!(active(&monitor), [kind]);
        // Healthy steps end the episode; unhealthy ones begin another.
        assert_eq!(run(&mut monitor, 100..260, healthy), []);
        assert_eq!(active(&monitor), [], "{kind}");
        assert_eq!(run(&mut monitor, 260..360, metrics).len(), 1, "{kind}");
    }
}

/// `train.zero_variance_groups = "keep"` takes steps with zero advantages on such batches.
#[test]
fn batches_without_different_rewards_raise_one_warning_with_their_count() {
    let equal = |s| {
        let share = if s == 3 { 0.5 } else { 1.0 };
        let std = if s == 3 { 0.01 } else { 1e-17 };
        healthy_except(s, &[("zero_std_groups_ratio", share), ("reward_std", std)])
    };
    let raised = run(&mut monitor(), 4..100, equal);
    assert_eq!(raised.len(), 1);
    assert_eq!(raised[0].message, "5 batches in a row had no group with different rewards");
    let keys = ["`rollout.temperature`", "`rollout.group_size`", "prompts", "reward part"];
    assert!(keys.iter().all(|key| raised[0].advice.contains(key)), "{}", raised[0].advice);
    // Step 3 had a signal, too small to end the streak of bad steps.
    let raised = run(&mut monitor(), 1..100, equal);
    assert_eq!(raised[0].message, "2 batches in a row had no group with different rewards");
}

/// Steps of users' feedback alone have neither groups nor their metrics.
#[test]
fn feedback_on_single_completions_can_collapse_and_be_flat() {
    let single = |s, std: f64, mean: f64| {
        let mut metrics = healthy_except(s, &[("reward_mean", mean), ("reward_batch_std", std)]);
        metrics.retain(|(name, _)| !["reward_std", "zero_std_groups_ratio"].contains(name));
        metrics
    };
    assert_eq!(run(&mut monitor(), 1..100, |s| single(s, 0.4, 0.5 + 0.01 * s as f64)), []);
    let collapsed = run(&mut monitor(), 1..10, |s| single(s, 0.0, 0.5));
    let flat = run(&mut monitor(), 1..60, |s| single(s, 0.5, 0.5));
    let text: Vec<&str> = collapsed.iter().chain(&flat).map(|w| w.message.as_str()).collect();
    insta::assert_snapshot!(text.join("\n"), @r"
    the reward's standard deviation over single completions fell to 0.000
    the reward changed by +0.000 in 40 steps, at a standard deviation over single completions of 0.500
    ");
    // Where a step has groups, the deviation over its completions does not count.
    let groups = |s| healthy_except(s, &[("reward_batch_std", 0.0)]);
    assert_eq!(run(&mut monitor(), 1..100, groups), []);
}

#[test]
fn entropy_is_compared_with_the_first_steps() {
    let mut monitor = monitor();
    let raised = run(&mut monitor, 1..60, |s| {
        healthy_except(s, &[("entropy", if s < 30 { 1.0 } else { 0.05 })])
    });
    assert_eq!(raised.len(), 1);
    assert_eq!((raised[0].kind, raised[0].step), (WarningKind::EntropyCollapse, 34));
    // A model whose entropy was low from the start has not collapsed.
    assert_eq!(
        run(&mut super::tests::monitor(), 1..60, |s| healthy_except(s, &[("entropy", 0.05)])),
        []
    );
}

/// Ratings alone do not show whether longer answers are better.
#[test]
fn longer_and_longer_answers_are_noticed_without_a_part_for_correctness() {
    let growing = |s: u64, to: f64| {
        let length = 30.0 + (to - 30.0) * s as f64 / 400.0;
        let mut metrics = healthy_except(s, &[("completion_length", length)]);
        metrics.retain(|(name, _)| !name.starts_with("part/"));
        metrics
    };
    for (to, warnings) in [(40.0, 0), (60.0, 1)] {
        let roles = RewardRoles::of([("thumbs", "feedback")]);
        let mut monitor = HealthMonitor { roles, ..monitor() };
        let raised = run(&mut monitor, 1..400, |s| growing(s, to));
        assert_eq!(raised.len(), warnings, "{raised:?}");
        if let Some(warning) = raised.first() {
            assert_eq!(warning.kind, WarningKind::LengthHacking);
            let message = "completions grew from 30 tokens in the first steps to 46";
            assert_eq!(warning.message, message);
        }
    }
}

#[test]
fn a_missing_format_part_raises_format_ignored() {
    let metrics = |s| {
        let mut all = healthy(s);
        all.retain(|(name, _)| *name != "part/form");
        all
    };
    let raised = run(&mut monitor(), 1..60, metrics);
    insta::assert_debug_snapshot!(raised.iter().map(|w| (w.kind, w.step, &w.message)).collect::<Vec<_>>(), @r#"
    [
        (
            FormatIgnored,
            20,
            "the part \"form\" had no value for 20 steps",
        ),
    ]
    "#);
}

#[test]
fn missing_metrics_neither_raise_nor_end_warnings() {
    assert_eq!(run(&mut monitor(), 1..100, |_| Vec::new()), []);
    assert_eq!(run(&mut monitor(), 1..100, |_| vec![("loss", 1.0)]), []);
    let mut monitor = monitor();
    run(&mut monitor, 1..6, |s| healthy_except(s, &[("kl", 0.9)]));
    run(&mut monitor, 6..50, |_| Vec::new());
    assert_eq!(active(&monitor), [WarningKind::KlExplosion]);
}

#[test]
fn a_reward_near_its_maximum_is_neither_flat_nor_collapsed() {
    let config = WarningConfig { reward_max: Some(1.5), ..WarningConfig::default() };
    for (mean, warnings) in [(1.4, 0), (1.3, 1)] {
        let mut monitor = with(config.clone(), MonitorState::default());
        let solved = |s| {
            healthy_except(
                s,
                &[("reward_mean", mean), ("reward_std", 0.0), ("zero_std_groups_ratio", 1.0)],
            )
        };
        assert_eq!(run(&mut monitor, 1..100, solved).len(), warnings, "{mean}");
    }
    let mut monitor = with(config, MonitorState::default());
    assert_eq!(run(&mut monitor, 1..100, |s| healthy_except(s, &[("reward_mean", 1.4)])), []);
}

#[test]
fn messages_contain_the_numbers() {
    type Changed = fn(u64) -> Vec<(&'static str, f64)>;
    let changes: [Changed; 6] = [
        |_| vec![("reward_std", 0.0123)],
        |_| vec![("kl", 0.734)],
        |_| vec![("reward_mean", 0.5)],
        |_| vec![("part/form", 0.0)],
        |_| vec![("truncated_ratio", 0.75)],
        |s| vec![("completion_length", 30.0 + s as f64), ("part/right", 0.3)],
    ];
    let warned = |change: Changed| run(&mut monitor(), 1..60, |s| healthy_except(s, &change(s)));
    let all: Vec<Warning> = changes.into_iter().flat_map(warned).collect();
    let text: Vec<&str> = all.iter().map(|w| w.message.as_str()).collect();
    insta::assert_snapshot!(text.join("\n"), @r#"
    the reward's standard deviation within groups fell to 0.012
    KL to the reference reached 0.734 nats per token, above 0.5
    the reward changed by +0.000 in 40 steps, at a standard deviation within groups of 0.300
    the part "form" stayed near 0 for 20 steps (0.000)
    75 % of completions ended at the token limit
    in 40 steps completions grew by 39 tokens and the reward by 0.390, but correctness by +0.000
    "#);
}

#[test]
fn roles_come_from_the_kind_or_else_the_name() {
    assert_eq!(roles().format, ["form"]);
    assert_eq!(roles().correctness, ["right"]);
    let own = RewardRoles::of([("xml_tags", "python"), ("accuracy", "webhook"), ("tone", "judge")]);
    let code = RewardRoles::of([("runs", "code"), ("compiles", "code_syntax"), ("a", "python")]);
    assert_eq!((code.format, code.correctness), (vec!["compiles".into()], vec!["runs".into()]));
    assert_eq!((own.format, own.correctness), (vec!["xml_tags".into()], vec!["accuracy".into()]));
}

fn metrics() -> impl Strategy<Value = Vec<(&'static str, f64)>> {
    let names = healthy(0).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let value = prop_oneof![8 => -1.0..2.0f64, 1 => Just(f64::NAN), 1 => Just(0.0)];
    prop::collection::vec((prop::sample::select(names), value), 0..11)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn resuming_at_any_step_changes_nothing(
        steps in prop::collection::vec(metrics(), 1..120), cut in 0usize..120,
    ) {
        let mut whole = monitor();
        let mut resumed = whole.clone();
        for (i, metrics) in steps.iter().enumerate() {
            let record = record(i as u64 + 1, metrics);
            if i == cut {
                let text = serde_json::to_string(resumed.state()).unwrap();
                resumed = with(WarningConfig::default(), serde_json::from_str(&text).unwrap());
            }
            let before = active(&whole);
            let raised = whole.detect(&record);
            prop_assert_eq!(&raised, &resumed.detect(&record));
            prop_assert_eq!(whole.detect(&record), []);
            for warning in raised {
                prop_assert!(!before.contains(&warning.kind));
                prop_assert!(whole.is_active(warning.kind));
            }
        }
    }
}
