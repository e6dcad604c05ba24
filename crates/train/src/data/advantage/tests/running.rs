//! Running baselines: their divisor, a stationary stream, and what decays.

use super::{assert_near, group, lone, part, scaled};
use crate::config::AdvantageScale;
use crate::data::advantage::{Baselines, GroupRewards, Moments};

fn after(past: &[f64]) -> Baselines {
    let mut baselines = Baselines::new(1e12);
    let past: Vec<_> = past.iter().map(|x| lone(*x)).collect();
    baselines.advantages(&past, &scaled(AdvantageScale::Group));
    baselines
}

/// The advantage of one value in a step of its own.
fn next(baselines: &mut Baselines, value: f64) -> f64 {
    baselines.advantages(&[lone(value)], &scaled(AdvantageScale::Group)).values[0][0].unwrap()
}

#[test]
fn values_of_two_kinds_are_standardized() {
    let mut baselines = after(&[1.0; 100]);
    assert_eq!(next(&mut baselines, 1.0), 0.0);
    assert_near(next(&mut baselines, 0.0), -1.0 / (0.5 + 1e-4));
    // The same after it, although the deviation is no longer 0.
    assert_near(next(&mut baselines, 0.0), -(101.0 / 102.0) / (0.5 + 1e-4));
    assert_near(next(&mut baselines, 1.0), (2.0 / 103.0) / (0.5 + 1e-4));
    let mut baselines = after(&[[0.0; 50], [1.0; 50]].concat());
    assert!((next(&mut baselines, 1.0) - 1.0).abs() < 0.02);
    assert!((next(&mut baselines, 0.0) + 1.0).abs() < 0.02);
}

#[test]
fn stars_are_divided_by_half_of_their_range() {
    let mut stars = vec![5.0; 40];
    stars.extend([4.0; 35]);
    stars.extend([3.0; 15]);
    stars.extend([2.0; 5]);
    stars.extend([1.0; 5]);
    let mean = stars.iter().sum::<f64>() / 100.0;
    assert_near(mean, 4.0);
    let baselines = after(&stars);
    for x in [1.0, 2.0, 3.0, 4.0, 5.0] {
        assert_near(next(&mut baselines.clone(), x), (x - mean) / (2.0 + 1e-4));
    }
}

/// A rating counts alike alone and beside another answer to the same prompt, and so does the part's weight.
#[test]
fn ratings_of_one_prompt_are_compared_by_the_divisor_of_single_ones() {
    for weight in [0.1, 2.0] {
        let rated = |values: &[f64]| {
            let values: Vec<_> = values.iter().copied().map(Some).collect();
            GroupRewards { is_rated: true, ..group(vec![part("thumbs", weight, &values)]) }
        };
        let baselines = after(&[[0.0; 50], [1.0; 50]].concat());
        let run = |groups: &[GroupRewards]| {
            baselines.clone().advantages(groups, &scaled(AdvantageScale::Group)).values
        };
        let alone = run(&[rated(&[0.0])])[0][0].unwrap();
        let found = run(&[rated(&[0.0, 1.0])]).remove(0);
        assert!((found[0].unwrap() / alone - 2.0).abs() < 0.1, "{found:?} {alone}");
        assert!((alone + weight).abs() < 0.05 * weight, "{alone}");
        // The difficulty of a prompt cancels.
        assert_eq!(run(&[rated(&[0.0, 0.0])])[0], [Some(0.0); 2]);
    }
}

#[test]
fn a_turn_is_not_compared_with_other_turns_of_its_conversation() {
    let turn = |value, conversation: u8| GroupRewards {
        conversations: vec![Some([conversation; 16])],
        ..lone(value)
    };
    // A session of three turns, one of two turns, and one turn.
    let groups =
        [turn(1.0, 1), turn(1.0, 1), turn(0.0, 2), turn(1.0, 1), turn(0.0, 2), turn(0.0, 3)];
    let mut baselines = Baselines::new(1e12);
    let out = baselines.advantages(&groups, &scaled(AdvantageScale::None)).values;
    let advantages: Vec<f64> = out.into_iter().map(|group| group[0].unwrap()).collect();
    for (advantage, expected) in advantages.iter().zip([1.0, 1.0, -0.75, 1.0, -0.75, -0.6]) {
        assert_near(*advantage, expected);
    }
    // All values are remembered.
    assert_near(next(&mut baselines, 0.5), 0.0);
}

/// A generator of uniform numbers in [0, 1) (Knuth's constants).
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[test]
fn the_advantages_of_a_stationary_stream_have_mean_zero() {
    for share_down in [0.5, 0.1, 0.01] {
        let mut uniform = Uniform(7);
        let mut baselines = Baselines::new(256.0);
        let count = 40_000;
        let (mut sum, mut least) = (0.0, 0.0_f64);
        for _ in 0..count {
            let value = f64::from(u8::from(uniform.next() >= share_down));
            let advantage = next(&mut baselines, value);
            sum += advantage;
            least = least.min(advantage);
        }
        let mean: f64 = sum / f64::from(count);
        assert!(mean.abs() < 0.005, "{share_down}: {mean}");
        assert!(least >= -2.0, "{share_down}: {least}");
    }
}

#[test]
fn an_outlier_does_not_reduce_later_advantages_forever() {
    let mut baselines = Baselines::new(16.0);
    let alternate = |baselines: &mut Baselines, count: u32| {
        (0..count).map(|i| next(baselines, f64::from(i % 2)).abs()).fold(0.0, |_, last| last)
    };
    let before = alternate(&mut baselines, 200);
    for outlier in [1000.0, 1e308, -1e6] {
        let mut baselines = baselines.clone();
        next(&mut baselines, outlier);
        assert!(alternate(&mut baselines, 4) > 0.4 * before, "{outlier}");
    }
    next(&mut baselines, 1000.0);
    let later = alternate(&mut baselines, 2000);
    assert!((later - before).abs() < 0.01, "{later} instead of {before}");
}

#[test]
fn a_restored_range_is_limited_to_the_bounds() {
    let mut baselines = Baselines::new(256.0);
    for i in 0..6 {
        next(&mut baselines, f64::from(i % 2));
    }
    // As an older version recorded it: fewer values than have a known range.
    next(&mut baselines, 1e6);
    let difference = |baselines: &Baselines| {
        let advantage = |value| next(&mut baselines.clone(), value);
        advantage(1.0) - advantage(0.0)
    };
    assert!(difference(&baselines) < 0.01);
    baselines.limit(|_, _| None);
    assert!(difference(&baselines) < 0.01);
    baselines.limit(|_, _| Some([0.0, 1.0]));
    assert!(difference(&baselines) > 0.5);
}

#[test]
fn decay_keeps_the_mean_and_the_population_variance() {
    let moments = Moments::of([1.0, 2.0, 6.0].into_iter()).decayed(0.5);
    assert_eq!((moments.count, moments.mean, moments.squares), (1.5, 3.0, 7.0));
    // The distances of the extremes from the mean halve in eight times as many samples.
    let half = (0..7).fold(moments, |moments, _| moments.decayed(0.5));
    assert_near(half.min, 2.0);
    assert_near(half.max, 4.5);
    let empty = Moments::default().decayed(0.5);
    assert_eq!(empty, Moments::default());
}
