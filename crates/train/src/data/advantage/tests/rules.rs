//! The configured rules against TRL's code (`tests/reference/learning/make_loss_cases.py`) and worked examples.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::{
    any_group, any_scale, assert_near, close, graded, group, lone, moderate, part, scaled,
};
use crate::config::{AdvantageScale, RewardAggregation, TrainConfig, ZeroVariance};
use crate::data::advantage::{Advantages, Baselines, GroupRewards, Moments};

fn run(groups: &[GroupRewards], config: &TrainConfig) -> Advantages {
    Baselines::new(100.0).advantages(groups, config)
}

#[derive(Deserialize)]
struct Case {
    aggregation: RewardAggregation,
    scale: AdvantageScale,
    size: usize,
    weights: Vec<f64>,
    /// By part, then by sample.
    rewards: Vec<Vec<f64>>,
    advantages: Vec<f64>,
    #[serde(rename = "figures")]
    metrics: BTreeMap<String, f64>,
}

#[test]
fn advantages_and_metrics_equal_those_of_trl() {
    let path = hone_model::testing::test_file("reference/learning/loss_cases.json");
    let mut file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases: Vec<Case> = serde_json::from_value(file["advantages"].take()).unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let count = case.advantages.len();
        let groups: Vec<GroupRewards> = (0..count / case.size)
            .map(|g| {
                let parts = ["a", "b", "c"].iter().enumerate().map(|(p, name)| {
                    let own = &case.rewards[p][g * case.size..(g + 1) * case.size];
                    part(name, case.weights[p], &own.iter().map(|x| Some(*x)).collect::<Vec<_>>())
                });
                group(parts.collect())
            })
            .collect();
        let config = TrainConfig { reward_aggregation: case.aggregation, ..scaled(case.scale) };
        let out = run(&groups, &config);
        for (own, trl) in out.values.iter().flatten().zip(&case.advantages) {
            assert!((own.unwrap() - trl).abs() < 1e-8, "{own:?} is not {trl}");
        }
        let mut own: BTreeMap<String, f64> = out.part_metrics().collect();
        own.insert("reward".to_owned(), out.reward_mean.unwrap());
        own.insert("reward_std".to_owned(), out.reward_batch_std.unwrap());
        own.insert("frac_reward_zero_std".to_owned(), out.zero_std_groups_ratio.unwrap());
        for (name, trl) in &case.metrics {
            let mapped = match name.strip_prefix("rewards/").and_then(|n| n.split_once('/')) {
                Some((part, "mean")) => format!("part/{part}"),
                Some((part, _)) => format!("part_std/{part}"),
                None => name.clone(),
            };
            // At batch scale TRL checks the deviation of the batch, not those of the groups.
            let by_group = case.scale != AdvantageScale::Batch
                && case.aggregation == RewardAggregation::SumThenNormalize;
            if name != "frac_reward_zero_std" || by_group {
                assert!((own[&mapped] - trl).abs() < 1e-8, "{name} is {}, not {trl}", own[&mapped]);
            }
        }
        assert_eq!(case.metrics.len(), 9);
    }
}

#[test]
fn the_sum_covers_the_parts_that_all_members_have() {
    let config = TrainConfig {
        reward_aggregation: RewardAggregation::SumThenNormalize,
        ..scaled(AdvantageScale::Group)
    };
    let groups = [group(vec![
        part("right", 2.0, &[Some(1.0), Some(0.0), None]),
        part("short", 1.0, &[Some(0.5), Some(1.5), None]),
        part("thumbs", 1.0, &[None, Some(1.0), None]),
    ])];
    let out = run(&groups, &config);
    // The sums are 2.5 and 1.5. The single thumbs has no past, and is not 0 for the other member.
    let gain = 0.5 / (0.5_f64.sqrt() + 1e-4);
    assert_near(out.values[0][0].unwrap(), gain);
    assert_near(out.values[0][1].unwrap(), -gain);
    assert_eq!(out.values[0][2], None);
    assert_eq!((out.group_count, out.running_count), (4, 1));
    // The smallest cap weight of a member's parts applies.
    let mut capped = groups[0].clone();
    capped.parts[1].cap_weights[0] = 0.25;
    assert_near(run(&[capped], &config).values[0][0].unwrap(), 0.25 * gain);
}

/// A judge that fails once must not replace the comparison within the group by the difficulty of the prompt.
#[test]
fn a_part_that_a_member_lacks_is_compared_among_the_others() {
    let config = |reward_aggregation| TrainConfig { reward_aggregation, ..TrainConfig::default() };
    let mut judged = [Some(0.8); 8];
    judged[3] = None;
    for config in [
        config(RewardAggregation::SumThenNormalize),
        config(RewardAggregation::NormalizeThenSum),
        config(RewardAggregation::Gdpo),
    ] {
        let mut baselines = Baselines::new(100.0);
        let past: Vec<_> =
            [0.3, 0.7, 0.5].map(|x| group(vec![part("judge", 1.0, &[Some(x)])])).into();
        baselines.advantages(&past, &config);
        let groups = [group(vec![part("judge", 1.0, &judged), part("form", 1.0, &[Some(1.0); 8])])];
        let out = baselines.advantages(&groups, &config);
        assert_eq!((&out.values[0], out.running_count), (&vec![Some(0.0); 8], 0));
        // The member without a value has the mean of the others.
        let mut values = judged;
        values[0] = Some(0.1);
        let groups = [group(vec![part("judge", 1.0, &values), part("form", 1.0, &[Some(1.0); 8])])];
        let out = baselines.advantages(&groups, &config);
        let advantage = |member: usize| out.values[0][member].unwrap();
        assert!(advantage(0) < -1.0 && advantage(1) > 0.1 && advantage(3).abs() < 1e-12);
    }
}

#[test]
fn a_small_deduction_does_not_outweigh_a_right_answer() {
    let right = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0].map(Some);
    let mut form = [Some(1.0); 8];
    form[0] = Some(0.995);
    let groups = [group(vec![part("right", 2.0, &right), part("form", 1.0, &form)])];
    let advantage = |config: &TrainConfig| run(&groups, config).values[0][0].unwrap();
    // Sums of 2.995, 3 and 1: mean 1.999, deviation 1.068.
    assert!((advantage(&TrainConfig::default()) - 0.9318).abs() < 1e-4);
    let each = TrainConfig {
        reward_aggregation: RewardAggregation::NormalizeThenSum,
        ..TrainConfig::default()
    };
    assert!((advantage(&each) + 0.4719).abs() < 1e-4);
}

#[test]
fn groups_without_a_difference_are_dropped_if_configured() {
    let config = TrainConfig { zero_variance_groups: ZeroVariance::Drop, ..TrainConfig::default() };
    let groups = [graded(&[1.0, 1.0]), graded(&[0.0, 1.0]), lone(3.0)];
    let out = run(&groups, &config);
    assert_eq!(out.values[0], vec![None, None]);
    assert!(out.values[1].iter().all(Option::is_some));
    // A single member is not a group, and there is no past to compare it with.
    assert_eq!(out.values[2], vec![Some(0.0)]);
    assert_eq!(out.dropped_groups, 1);
    // Metrics include dropped groups.
    let kept = run(&groups, &TrainConfig::default());
    assert_eq!(
        (out.reward_mean, out.zero_std_groups_ratio),
        (kept.reward_mean, kept.zero_std_groups_ratio)
    );
    assert_eq!(kept.dropped_groups, 0);
    // Feedback on one member distinguishes it from the others.
    let mut baselines = Baselines::new(10.0);
    baselines.advantages(&[lone(0.0), lone(1.0)], &config);
    let mixed = group(vec![
        part("graded", 1.0, &[Some(1.0), Some(1.0)]),
        part("thumbs", 1.0, &[None, Some(1.0)]),
    ]);
    let out = baselines.advantages(&[mixed], &config);
    assert!(out.values[0][0].is_none() && out.values[0][1].unwrap() > 0.1);
    assert_eq!(out.dropped_groups, 0);
    let gdpo = TrainConfig { reward_aggregation: RewardAggregation::Gdpo, ..config };
    assert_eq!(run(&[graded(&[0.1; 3]), graded(&[0.0, 0.7])], &gdpo).values[0], vec![None; 3]);
}

fn any_rules() -> impl Strategy<Value = TrainConfig> {
    let aggregation = prop::sample::select(vec![
        RewardAggregation::NormalizeThenSum,
        RewardAggregation::SumThenNormalize,
        RewardAggregation::Gdpo,
    ]);
    (any_scale(), aggregation, any::<bool>()).prop_map(|(scale, reward_aggregation, drops)| {
        TrainConfig {
            reward_aggregation,
            zero_variance_groups: [ZeroVariance::Keep, ZeroVariance::Drop][usize::from(drops)],
            ..scaled(scale)
        }
    })
}

proptest! {
    #[test]
    fn members_without_values_have_no_advantage_and_the_others_a_finite_one(
        groups in prop::collection::vec(any_group(moderate()), 1..6),
        config in any_rules(),
    ) {
        let out = run(&groups, &config);
        for (group, values) in groups.iter().zip(&out.values) {
            for (member, value) in values.iter().enumerate() {
                let scored = group.parts.iter().any(|p| p.values[member].is_some());
                prop_assert!(scored || value.is_none());
                prop_assert!(value.is_none_or(f64::is_finite));
                prop_assert!(!scored || value.is_some() || config.zero_variance_groups == ZeroVariance::Drop);
            }
        }
    }

    #[test]
    fn with_one_part_summing_first_changes_nothing(values in prop::collection::vec(moderate(), 2..9), config in any_rules()) {
        prop_assume!(config.reward_aggregation != RewardAggregation::Gdpo);
        let with = |reward_aggregation| {
            run(&[graded(&values)], &TrainConfig { reward_aggregation, ..config.clone() }).values
        };
        let (parts, sum) =
            (with(RewardAggregation::NormalizeThenSum), with(RewardAggregation::SumThenNormalize));
        prop_assert!(close(&parts, &sum, 1e-8));
    }
}

fn cases(function: &str) -> Vec<[Value; 2]> {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/guides/guide_cases.json"
    ));
    let mut all: Value = serde_json::from_str(text).unwrap();
    let cases: Vec<_> = serde_json::from_value(all["functions"][function]["cases"].take()).unwrap();
    assert!(cases.len() > 20);
    cases
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Cases with one completion are left out: there is nothing to compare it with.
#[test]
fn advantages_of_a_sum_of_parts_are_those_of_trl() {
    for [_, expected] in cases("multi_objective") {
        let sums = numbers(&expected["sums"]);
        if sums.len() > 1 {
            let found = super::run(&[graded(&sums)], AdvantageScale::Group).remove(0);
            for (found, wanted) in found.into_iter().zip(numbers(&expected["advantages"])) {
                assert_near(found, wanted);
            }
        }
    }
}

/// The documented difference from `compute_advantages`, which divides by the deviation with divisor n.
#[test]
fn advantages_differ_from_the_first_guide_by_the_divisor_only() {
    for [rewards, expected] in cases("group_advantages") {
        let rewards = numbers(&rewards);
        if rewards.len() > 1 {
            let n = rewards.len() as f64;
            let deviation = Moments::of(rewards.iter().copied()).deviation().unwrap();
            let of_guide = (deviation * ((n - 1.0) / n).sqrt()).max(1e-8);
            let found = super::run(&[graded(&rewards)], AdvantageScale::Group).remove(0);
            for (found, wanted) in found.into_iter().zip(numbers(&expected)) {
                assert_near(found * (deviation + 1e-4), wanted * of_guide);
            }
        }
    }
}

fn is_rated(groups: &[GroupRewards]) -> Vec<bool> {
    groups.iter().map(|group| group.is_rated).collect()
}

fn rated(values: &[f64]) -> Vec<GroupRewards> {
    values.iter().map(|value| GroupRewards { is_rated: true, ..lone(*value) }).collect()
}

/// Of 90 thumbs up and 10 down, a step that computes 32.
#[test]
fn a_selection_of_ratings_is_unbiased_and_prefers_what_is_rare() {
    let values: Vec<f64> = (0..100).map(|n| f64::from(u8::from(n % 10 != 0))).collect();
    let groups: Vec<_> =
        [graded(&[1.0, 2.0, 3.0, 4.0])].into_iter().chain(rated(&values)).collect();
    let all = Baselines::new(100.0).advantages(&groups, &TrainConfig::default());
    // Any quantity of the samples, such as a coordinate of their gradients.
    let gradient = |index: usize| 1.0 + (index as f64).sin();
    let mean = |selected: &Advantages, count: f64| {
        let rated = selected.values.iter().enumerate().skip(1);
        rated.map(|(i, a)| a[0].unwrap_or(0.0) * gradient(i)).sum::<f64>() / count
    };
    let (expected, draws) = (mean(&all, 100.0), 4000);
    let (mut sum, mut down) = (0.0, 0);
    for draw in 0..draws {
        let mut selected = all.clone();
        let random = (f64::from(draw) + 0.5) / f64::from(draws);
        selected.select(&is_rated(&groups), &surprises(&groups, |_| 1.0), 32, random);
        assert_eq!(selected.values[0], all.values[0], "graded members stay");
        let kept: Vec<usize> = (1..101).filter(|i| selected.values[*i][0].is_some()).collect();
        assert!((27..=29).contains(&kept.len()), "{}", kept.len());
        assert_eq!(selected.represented as usize, 100 - kept.len());
        sum += mean(&selected, 28.0);
        down += kept.iter().filter(|i| values[**i - 1] == 0.0).count();
    }
    let found = sum / f64::from(draws);
    assert!((found - expected).abs() < 1e-3 * expected.abs().max(1.0), "{found} is not {expected}");
    // Each of the ten in nearly every draw; a uniform choice would keep 2.8 of them.
    let down = down as f64 / f64::from(draws);
    assert!(down > 9.0, "{down}");
}

fn surprises(groups: &[GroupRewards], of: impl Fn(usize) -> f64) -> Vec<Vec<f64>> {
    groups.iter().enumerate().map(|(index, group)| vec![of(index); group.members]).collect()
}

#[test]
fn answers_that_the_policy_hardly_gives_are_nearly_always_computed() {
    let groups = rated(&[1.0, 0.0].repeat(50));
    let all = Baselines::new(100.0).advantages(&groups, &TrainConfig::default());
    let is_rare = |index: usize| index % 10 == 3;
    let surprises = surprises(&groups, |index| if is_rare(index) { 1.0 } else { 0.02 });
    let (mut rare, draws) = (0, 100);
    for draw in 0..draws {
        let mut selected = all.clone();
        selected.select(&is_rated(&groups), &surprises, 16, f64::from(draw) / f64::from(draws));
        rare += (0..100).filter(|i| is_rare(*i) && selected.values[*i][0].is_some()).count();
    }
    assert!(rare >= 950, "{rare} of 1000");
}

#[test]
fn few_ratings_are_all_kept_and_many_graded_members_leave_them_a_quarter() {
    let groups: Vec<_> = [graded(&[1.0; 60]), graded(&[2.0; 4])]
        .into_iter()
        .chain(rated(&[1.0, 0.0].repeat(20)))
        .collect();
    let all = Baselines::new(100.0).advantages(&groups, &TrainConfig::default());
    let select = |most| {
        let mut selected = all.clone();
        selected.select(&is_rated(&groups), &surprises(&groups, |_| 1.0), most, 0.5);
        selected
    };
    assert_eq!(select(104), all);
    let selected = select(64);
    assert_eq!((selected.represented, &selected.values[..2]), (24, &all.values[..2]));
}
