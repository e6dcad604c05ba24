//! Worked examples and properties.

mod rules;
mod running;

use proptest::prelude::*;

use super::{Baselines, GroupRewards, Moments, PartRewards};
use crate::config::{AdvantageScale, RewardAggregation, TrainConfig};

fn scaled(advantage_scale: AdvantageScale) -> TrainConfig {
    TrainConfig { advantage_scale, ..TrainConfig::default() }
}

fn part(name: &str, weight: f64, values: &[Option<f64>]) -> PartRewards {
    let cap_weights = vec![1.0; values.len()];
    let values = values.to_vec();
    PartRewards { name: name.to_owned(), weight, values, cap_weights, raters: Vec::new() }
}

fn group(parts: Vec<PartRewards>) -> GroupRewards {
    let members = parts[0].values.len();
    let route = "default".to_owned();
    GroupRewards { route, members, parts, conversations: Vec::new(), is_rated: false }
}

fn graded(values: &[f64]) -> GroupRewards {
    group(vec![part("graded", 1.0, &values.iter().map(|x| Some(*x)).collect::<Vec<_>>())])
}

fn lone(value: f64) -> GroupRewards {
    group(vec![part("thumbs", 1.0, &[Some(value)])])
}

fn run(groups: &[GroupRewards], scale: AdvantageScale) -> Vec<Vec<f64>> {
    let out = Baselines::new(100.0).advantages(groups, &scaled(scale));
    out.values.into_iter().map(|g| g.into_iter().map(|a| a.unwrap()).collect()).collect()
}

fn assert_near(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * (1.0 + b.abs()), "{a} is not {b}");
}

#[test]
fn members_of_a_complete_group_are_compared_with_each_other() {
    // Mean 2, sample deviation sqrt((1 + 0 + 1) / 2) = 1.
    let out = run(&[graded(&[1.0, 2.0, 3.0])], AdvantageScale::Group);
    assert_near(out[0][0], -1.0 / 1.0001);
    assert_near(out[0][1], 0.0);
    assert_near(out[0][2], 1.0 / 1.0001);
    assert_eq!(run(&[graded(&[1.0, 2.0, 3.0])], AdvantageScale::None)[0], vec![-1.0, 0.0, 1.0]);
}

#[test]
fn batch_scale_divides_by_the_deviation_of_the_route() {
    let groups = [graded(&[0.0, 2.0]), graded(&[4.0, 6.0])];
    let out = run(&groups, AdvantageScale::Batch);
    // 0, 2, 4, 6: sum of squares 20 over 3.
    let divisor = (20.0_f64 / 3.0).sqrt() + 1e-4;
    assert_near(out[0][0], -1.0 / divisor);
    assert_near(out[1][1], 1.0 / divisor);
}

#[test]
fn equal_values_give_zero_and_are_counted() {
    for scale in [AdvantageScale::Group, AdvantageScale::Batch, AdvantageScale::None] {
        let groups = [graded(&[0.1; 5]), graded(&[0.0, 1.0])];
        let out = Baselines::new(10.0).advantages(&groups, &scaled(scale));
        assert!(out.values[0].iter().all(|a| *a == Some(0.0)));
        assert_eq!(out.zero_std_groups_ratio, Some(0.5));
        assert_near(out.reward_std.unwrap(), 0.5_f64.sqrt() / 2.0);
    }
}

#[test]
fn advantages_of_parts_are_summed_by_weight() {
    let groups = [group(vec![
        part("right", 2.0, &[Some(1.0), Some(0.0)]),
        part("short", -0.5, &[Some(3.0), Some(1.0)]),
    ])];
    let out = run(&groups, AdvantageScale::None);
    assert_near(out[0][0], 2.0 * 0.5 - 0.5 * 1.0);
    assert_near(out[0][1], -2.0 * 0.5 + 0.5 * 1.0);
}

#[test]
fn a_part_that_only_some_have_uses_the_running_baseline() {
    let mut baselines = Baselines::new(1e12);
    let first = [lone(0.0), lone(1.0), lone(1.0)];
    let out = baselines.advantages(&first, &scaled(AdvantageScale::None));
    assert_eq!((out.group_count, out.running_count), (0, 3));
    assert_eq!(out.zero_std_groups_ratio, None);
    // Each is compared with the mean of the other two.
    assert_near(out.values[0][0].unwrap(), -1.0);
    assert_near(out.values[1][0].unwrap(), 0.5);
    // Mixed group: graded is compared within the group, the single thumbs with the past 0, 1, 1.
    let mixed = group(vec![
        part("graded", 1.0, &[Some(1.0), Some(0.0)]),
        part("thumbs", 1.0, &[None, Some(1.0)]),
    ]);
    let out = baselines.advantages(&[mixed], &scaled(AdvantageScale::Group));
    assert_eq!((out.group_count, out.running_count), (2, 1));
    let graded = 0.5 / (0.5_f64.sqrt() + 1e-4);
    let thumbs = (1.0 - 2.0 / 3.0) / ((1.0_f64 / 3.0).sqrt() + 1e-4);
    assert_near(out.values[0][0].unwrap(), graded);
    assert!((out.values[0][1].unwrap() - (thumbs - graded)).abs() < 1e-6);
    assert_near(out.part_means[&("default".to_owned(), "thumbs".to_owned())], 1.0);
    assert_near(out.reward_mean.unwrap(), 1.5);
}

#[test]
fn missing_is_not_zero() {
    let values = [Some(1.0), None, Some(0.0)];
    let out = Baselines::new(10.0)
        .advantages(&[group(vec![part("right", 1.0, &values)])], &scaled(AdvantageScale::None));
    // The member without any value leaves the group; the other two are compared with each other.
    assert_eq!(out.values[0], vec![Some(0.5), None, Some(-0.5)]);
    assert_near(out.reward_mean.unwrap(), 0.5);
    let nothing = group(vec![part("right", 1.0, &[None, Some(f64::NAN)])]);
    let out = Baselines::new(10.0).advantages(&[nothing], &scaled(AdvantageScale::Group));
    assert_eq!(out.values[0], vec![None, None]);
    assert_eq!((out.reward_mean, out.reward_std), (None, None));
}

#[test]
fn without_other_values_the_advantage_is_zero() {
    let mut baselines = Baselines::new(10.0);
    for scale in [AdvantageScale::None, AdvantageScale::Group] {
        let out = Baselines::new(10.0).advantages(&[lone(3.0)], &scaled(scale));
        assert_eq!(out.values[0], vec![Some(0.0)]);
    }
    let out = Baselines::new(10.0).advantages(&[lone(3.0)], &TrainConfig::default());
    assert_eq!(out.reward_mean, Some(3.0));
    // One value of the past has a mean but no deviation.
    baselines.advantages(&[lone(3.0)], &scaled(AdvantageScale::Group));
    let out = baselines.clone().advantages(&[lone(5.0)], &scaled(AdvantageScale::Group));
    assert_eq!(out.values[0], vec![Some(0.0)]);
    let out = baselines.advantages(&[lone(5.0)], &scaled(AdvantageScale::None));
    assert_near(out.values[0][0].unwrap(), 2.0);
}

#[test]
fn the_past_decays_and_routes_and_parts_have_separate_baselines() {
    assert_eq!(Baselines::new(0.0), Baselines::new(1.0));
    let mut baselines = Baselines::new(4.0);
    for _ in 0..50 {
        baselines.advantages(&[lone(10.0)], &scaled(AdvantageScale::None));
    }
    let past = *baselines.get("default", "thumbs").unwrap();
    assert!((past.count - 4.0).abs() < 1e-4, "count {}", past.count);
    for _ in 0..50 {
        baselines.advantages(&[lone(0.0)], &scaled(AdvantageScale::None));
    }
    assert!(baselines.get("default", "thumbs").unwrap().mean < 1e-4);
    let mut other = lone(7.0);
    other.route = "other".to_owned();
    let out = baselines.advantages(&[other], &scaled(AdvantageScale::None));
    assert_eq!(out.values[0], vec![Some(0.0)]);
    assert!(baselines.get("other", "graded").is_none());
}

fn any_scale() -> impl Strategy<Value = AdvantageScale> {
    prop::sample::select(vec![AdvantageScale::Group, AdvantageScale::Batch, AdvantageScale::None])
}

/// A group of two parts with missing values.
fn any_group(value: BoxedStrategy<f64>) -> impl Strategy<Value = GroupRewards> {
    let member = (prop::option::of(value.clone()), prop::option::weighted(0.8, value));
    (prop::collection::vec(member, 1..7), -2.0..2.0_f64).prop_map(|(members, weight)| {
        let (a, b): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        group(vec![part("a", 1.0, &a), part("b", weight, &b)])
    })
}

fn moderate() -> BoxedStrategy<f64> {
    prop_oneof![(-3.0..3.0_f64), Just(0.0), Just(1.0)].boxed()
}

fn any_finite() -> BoxedStrategy<f64> {
    prop::num::f64::ANY.prop_filter("finite", |x| x.is_finite()).boxed()
}

fn map_values(groups: &[GroupRewards], f: impl Fn(f64) -> f64) -> Vec<GroupRewards> {
    let mut groups = groups.to_vec();
    for value in groups.iter_mut().flat_map(|g| &mut g.parts).flat_map(|p| &mut p.values) {
        *value = value.map(&f);
    }
    groups
}

fn close(a: &[Vec<Option<f64>>], b: &[Vec<Option<f64>>], tolerance: f64) -> bool {
    a.iter().flatten().zip(b.iter().flatten()).all(|pair| match pair {
        (Some(x), Some(y)) => (x - y).abs() <= tolerance,
        (x, y) => x == y,
    })
}

proptest! {
    #[test]
    fn adding_a_constant_to_every_reward_changes_nothing(
        groups in prop::collection::vec(any_group(moderate()), 1..5),
        past in prop::collection::vec(any_group(moderate()), 0..3),
        shift in -3.0..3.0_f64,
        scale in any_scale(),
    ) {
        let mut config = scaled(scale);
        if scale == AdvantageScale::Batch {
            // A shift moves the sums of groups with different weights by different amounts, which
            // changes the deviation of all sums.
            config.reward_aggregation = RewardAggregation::NormalizeThenSum;
        }
        let with = |shift: f64| {
            let mut baselines = Baselines::new(20.0);
            baselines.advantages(&map_values(&past, |x| x + shift), &config);
            baselines.advantages(&map_values(&groups, |x| x + shift), &config).values
        };
        // Rounding of a deviation of 0 is magnified by 1 / 1e-4.
        prop_assert!(close(&with(0.0), &with(shift), 1e-8));
    }

    #[test]
    fn finite_rewards_have_finite_advantages_and_metrics(
        groups in prop::collection::vec(any_group(any_finite()), 1..6),
        scale in any_scale(),
    ) {
        let mut baselines = Baselines::new(8.0);
        for _ in 0..3 {
            let out = baselines.advantages(&groups, &scaled(scale));
            prop_assert!(out.values.iter().flatten().flatten().all(|a| a.is_finite()));
            prop_assert!(out.part_means.values().all(|m| m.is_finite()));
            prop_assert!(out.reward_mean.is_none_or(f64::is_finite));
            prop_assert!(out.reward_std.is_none_or(f64::is_finite));
        }
    }

    #[test]
    fn advantages_do_not_depend_on_the_order_of_groups_and_members(
        groups in prop::collection::vec(any_group(moderate()), 2..6),
        scale in any_scale(),
    ) {
        let (mut forward, mut backward) = (Baselines::new(9.0), Baselines::new(9.0));
        let out = forward.advantages(&groups, &scaled(scale));
        let mut reversed: Vec<_> = groups.iter().rev().cloned().collect();
        for part in reversed.iter_mut().flat_map(|group| &mut group.parts) {
            part.values.reverse();
        }
        let mut other = backward.advantages(&reversed, &scaled(scale));
        other.values.reverse();
        other.values.iter_mut().for_each(|group| group.reverse());
        prop_assert!(close(&out.values, &other.values, 1e-8));
        prop_assert_eq!(out.group_count, other.group_count);
        prop_assert_eq!(out.running_count, other.running_count);
    }

    /// The running baseline does not depend on the sample itself, nor does its divisor for a sample
    /// within the range of the others.
    #[test]
    fn a_running_baseline_is_independent_of_the_sample(
        others in prop::collection::vec(moderate(), 2..8),
        a in -1.0..1.0_f64,
        b in -1.0..1.0_f64,
    ) {
        let at = |x: f64| {
            let mut groups: Vec<_> = others.iter().map(|y| lone(*y)).collect();
            groups.insert(1, lone(x));
            Baselines::new(9.0).advantages(&groups, &scaled(AdvantageScale::Group)).values[1][0].unwrap()
        };
        let values = Moments::of(others.iter().copied());
        let expected = |x: f64| {
            let least = others.iter().copied().fold(x, f64::min);
            let most = others.iter().copied().fold(x, f64::max);
            (x - values.mean) / (values.deviation().unwrap().max(0.5 * (most - least)) + 1e-4)
        };
        prop_assert!((at(a) - expected(a)).abs() < 1e-6);
        prop_assert!((at(b) - expected(b)).abs() < 1e-6);
    }

    #[test]
    fn advantages_of_a_complete_group_sum_to_zero(
        values in prop::collection::vec(moderate(), 2..9),
        scale in any_scale(),
    ) {
        let out = run(&[graded(&values)], scale);
        prop_assert!(out[0].iter().sum::<f64>().abs() < 1e-6);
    }
}

#[test]
fn a_cap_weight_scales_the_advantage_and_the_weight_in_the_baseline() {
    let mut capped = lone(4.0);
    capped.parts[0].cap_weights = vec![0.25];
    let out = Baselines::new(1e9)
        .advantages(&[lone(0.0), lone(2.0), capped.clone()], &scaled(AdvantageScale::None));
    // The mean of the others is 1; the advantage of the capped value is multiplied by 0.25.
    assert_near(out.values[2][0].unwrap(), 0.25 * 3.0);
    // The baseline is 2 with weight 1 and 4 with weight 0.25: (2 + 1) / 1.25.
    assert_near(out.values[0][0].unwrap(), -2.4);
    // Without weights all values count fully.
    let mut group = graded(&[0.0, 1.0]);
    let weighted = run(std::slice::from_ref(&group), AdvantageScale::None);
    group.parts[0].cap_weights.clear();
    assert_eq!(run(&[group], AdvantageScale::None), weighted);
    let mut baselines = Baselines::new(1e9);
    baselines.advantages(&[lone(0.0), capped], &scaled(AdvantageScale::None));
    let past = baselines.get("default", "thumbs").unwrap();
    assert_near(past.count, 1.25);
    assert_near(past.mean, 0.8);
}
