use std::collections::BTreeMap;

use proptest::prelude::*;

use hone_core::types::StepRecord;

use super::*;

fn record(step: u64, figures: &[(&str, f64)]) -> StepRecord {
    let metrics: BTreeMap<String, f64> =
        figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    StepRecord { step, groups: Vec::new(), metrics, created: step * 1000 }
}

fn roles() -> Roles {
    Roles::of([("right", "numeric_match"), ("form", "format_strict"), ("brief", "length")])
}

fn watch() -> Watch {
    Watch::new(WarningConfig::default(), roles(), WatchState::default())
}

/// Feeds steps made by `figures` and returns what was raised.
fn run(
    watch: &mut Watch,
    steps: std::ops::Range<u64>,
    figures: impl Fn(u64) -> Vec<(&'static str, f64)>,
) -> Vec<Warning> {
    steps.flat_map(|step| watch.observe(&record(step, &figures(step)))).collect()
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

/// A healthy step with some figures changed.
fn but(step: u64, changed: &[(&'static str, f64)]) -> Vec<(&'static str, f64)> {
    let mut figures = healthy(step);
    for (name, value) in changed {
        figures.retain(|(n, _)| n != name);
        figures.push((name, *value));
    }
    figures
}

#[test]
fn a_healthy_run_is_left_alone() {
    assert_eq!(run(&mut watch(), 1..150, healthy), []);
}

/// Each kind with the figures that raise it, and the step at which it is told.
#[test]
fn every_kind_is_raised_once_and_lifted() {
    type Figures = fn(u64) -> Vec<(&'static str, f64)>;
    let cases: [(WarningKind, u64, Figures); 9] = [
        (WarningKind::Collapse, 5, |s| but(s, &[("reward_std", 0.01)])),
        (WarningKind::Collapse, 5, |s| but(s, &[("zero_std_groups_ratio", 0.9)])),
        (WarningKind::KlExplosion, 5, |s| but(s, &[("kl", 0.51)])),
        (WarningKind::KlExplosion, 1, |s| but(s, &[("kl", f64::INFINITY)])),
        (WarningKind::FlatReward, 44, |s| but(s, &[("reward_mean", 0.5)])),
        (WarningKind::FormatIgnored, 20, |s| but(s, &[("part/form", 0.01)])),
        (WarningKind::LengthHacking, 5, |s| but(s, &[("truncated_ratio", 0.6)])),
        (WarningKind::LengthHacking, 44, |s| {
            but(s, &[("completion_length", 30.0 + s as f64), ("part/right", 0.3)])
        }),
        (WarningKind::ClipRatioHigh, 5, |s| but(s, &[("clip_low", 0.2), ("clip_high", 0.15)])),
    ];
    for (kind, at, figures) in cases {
        let mut watch = watch();
        let raised = run(&mut watch, 1..100, figures);
        assert_eq!(raised.len(), 1, "{kind}: {raised:?}");
        assert_eq!((raised[0].kind, raised[0].step), (kind, at), "{raised:?}");
        assert_eq!(watch.active().collect::<Vec<_>>(), [kind]);
        // Well again for long enough: over; then raised anew.
        assert_eq!(run(&mut watch, 100..260, healthy), []);
        assert_eq!(watch.active().count(), 0, "{kind}");
        assert_eq!(run(&mut watch, 260..360, figures).len(), 1, "{kind}");
    }
}

#[test]
fn single_steps_of_a_high_kl_are_no_explosion() {
    let spikes = |s| but(s, &[("kl", if s % 5 == 0 { 3e6 } else { 0.01 })]);
    assert_eq!(run(&mut watch(), 1..100, spikes), []);
}

#[test]
fn entropy_is_compared_with_the_first_steps() {
    let mut watch = watch();
    let raised =
        run(&mut watch, 1..60, |s| but(s, &[("entropy", if s < 30 { 1.0 } else { 0.05 })]));
    assert_eq!(raised.len(), 1);
    assert_eq!((raised[0].kind, raised[0].step), (WarningKind::EntropyCollapse, 34));
    // A model that was certain from the start has not collapsed.
    assert_eq!(run(&mut super::tests::watch(), 1..60, |s| but(s, &[("entropy", 0.05)])), []);
}

#[test]
fn a_format_part_that_is_missing_is_ignored_too() {
    let figures = |s| {
        let mut all = healthy(s);
        all.retain(|(name, _)| *name != "part/form");
        all
    };
    let raised = run(&mut watch(), 1..60, figures);
    insta::assert_debug_snapshot!(raised.iter().map(|w| (w.kind, w.step, &w.message)).collect::<Vec<_>>(), @r#"
    [
        (
            FormatIgnored,
            20,
            "the part \"form\" has had no value for long",
        ),
    ]
    "#);
}

#[test]
fn figures_that_are_missing_raise_nothing() {
    assert_eq!(run(&mut watch(), 1..100, |_| Vec::new()), []);
    assert_eq!(run(&mut watch(), 1..100, |_| vec![("loss", 1.0)]), []);
    // And do not end an episode either.
    let mut watch = watch();
    run(&mut watch, 1..6, |s| but(s, &[("kl", 0.9)]));
    run(&mut watch, 6..50, |_| Vec::new());
    assert_eq!(watch.active().collect::<Vec<_>>(), [WarningKind::KlExplosion]);
}

#[test]
fn a_figure_around_its_limit_is_told_once() {
    let high = |s: u64| s < 6 || s.is_multiple_of(2);
    let wobble = |s: u64| but(s, &[("kl", if high(s) { 0.52 } else { 0.48 })]);
    assert_eq!(run(&mut watch(), 1..100, wobble).len(), 1);
}

#[test]
fn a_reward_near_its_maximum_is_not_flat() {
    let config = WarningConfig { reward_max: Some(1.5), ..WarningConfig::default() };
    let mut watch = Watch::new(config, roles(), WatchState::default());
    assert_eq!(run(&mut watch, 1..100, |s| but(s, &[("reward_mean", 1.4)])), []);
}

#[test]
fn messages_tell_the_figures() {
    let mut all = Vec::new();
    all.extend(run(&mut watch(), 1..10, |s| but(s, &[("reward_std", 0.0123)])));
    all.extend(run(&mut watch(), 1..6, |s| but(s, &[("kl", 0.734)])));
    all.extend(run(&mut watch(), 1..60, |s| but(s, &[("reward_mean", 0.5)])));
    all.extend(run(&mut watch(), 1..60, |s| but(s, &[("part/form", 0.0)])));
    all.extend(run(&mut watch(), 1..10, |s| but(s, &[("truncated_ratio", 0.75)])));
    all.extend(run(&mut watch(), 1..60, |s| {
        but(s, &[("completion_length", 30.0 + s as f64), ("part/right", 0.3)])
    }));
    let text: Vec<&str> = all.iter().map(|w| w.message.as_str()).collect();
    insta::assert_snapshot!(text.join("\n"), @r#"
    the reward's standard deviation within groups fell to 0.012
    KL to the reference reached 0.734 nats a token, above 0.5
    the reward went by +0.000 in 40 steps, from completions that differ by 0.300
    the part "form" stayed near 0 for 20 steps (0.000)
    75 % of completions were cut at the token limit
    completions grew by 39 tokens in 40 steps and the reward by 0.390, but right answers by +0.000
    "#);
}

#[test]
fn roles_come_from_the_kind_then_the_name() {
    assert_eq!(roles().format, ["form"]);
    assert_eq!(roles().correctness, ["right"]);
    let scripts = Roles::of([("xml_tags", "script"), ("accuracy", "webhook"), ("tone", "judge")]);
    assert_eq!(
        (scripts.format, scripts.correctness),
        (vec!["xml_tags".into()], vec!["accuracy".into()])
    );
}

fn figures() -> impl Strategy<Value = Vec<(&'static str, f64)>> {
    let names = healthy(0).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let value = prop_oneof![8 => -1.0..2.0f64, 1 => Just(f64::NAN), 1 => Just(0.0)];
    prop::collection::vec((prop::sample::select(names), value), 0..11)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn resuming_anywhere_changes_nothing(
        steps in prop::collection::vec(figures(), 1..60), cut in 0usize..60,
    ) {
        let config = WarningConfig { window: 6, patience: 2, format_patience: 3, ..WarningConfig::default() };
        let mut whole = Watch::new(config.clone(), roles(), WatchState::default());
        let mut resumed = whole.clone();
        for (i, figures) in steps.iter().enumerate() {
            let record = record(i as u64 + 1, figures);
            if i == cut {
                let text = serde_json::to_string(resumed.state()).unwrap();
                resumed = Watch::new(config.clone(), roles(), serde_json::from_str(&text).unwrap());
            }
            let before: Vec<WarningKind> = whole.active().collect();
            let raised = whole.observe(&record);
            prop_assert_eq!(&raised, &resumed.observe(&record));
            prop_assert_eq!(whole.observe(&record), []);
            for warning in raised {
                prop_assert!(!before.contains(&warning.kind));
                prop_assert!(whole.active().any(|kind| kind == warning.kind));
            }
        }
    }
}
