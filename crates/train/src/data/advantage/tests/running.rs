//! Running baselines: their divisor, a stationary stream, and what decays.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{assert_near, group, lone, part, scaled};
use crate::config::{AdvantageScale, TrainConfig};
use crate::data::advantage::{Baselines, GroupRewards, MOST_RATERS, Moments};

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
        let [down, up] = [0.0, 1.0].map(|value| next(&mut baselines.clone(), value));
        assert!(down < 0.0 && up > 0.0, "{down} and {up} after {outlier}");
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

/// The squared correlation of advantages with the quality of answers, by whether raters are known, and the last
/// advantages of a rater who always posts thumbs-down, of whom the same is known. A thumb is up if quality, difficulty of the prompt, severity of the
/// rater and noise have a positive sum.
fn efficiency(severity: f64, seed: u64) -> [[f64; 2]; 2] {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut normal = |deviation: f64| {
        let of_twelve: f64 = (0..12).map(|_| rng.random_range(0.0..1.0)).sum();
        deviation * (of_twelve - 6.0)
    };
    let severities: Vec<f64> = (0..200).map(|_| normal(severity)).collect();
    let mut ratings = Vec::new();
    for index in 0..8_000 {
        let (rater, quality) = (index * 7_919 % 200, normal(0.5));
        let up = rater != 0 && quality + normal(0.7) + severities[rater] + normal(1.0) > 0.0;
        ratings.push((rater, quality, f64::from(u8::from(up))));
    }
    let mut of_grump = [0.0; 2];
    let found = [true, false].map(|is_known| {
        let (mut baselines, mut all) = (Baselines::default(), Vec::new());
        for batch in ratings.chunks(64) {
            let rated = |(rater, _, value): &(usize, f64, f64)| {
                let mut group = lone(*value);
                group.parts[0].raters = vec![is_known.then(|| rater.to_string())];
                group
            };
            let groups: Vec<_> = batch.iter().map(rated).collect();
            let out = baselines.advantages(&groups, &TrainConfig::default());
            for ((rater, quality, _), advantage) in batch.iter().zip(out.values) {
                let advantage = advantage[0].unwrap();
                if *rater == 0 {
                    of_grump[usize::from(!is_known)] = advantage;
                }
                all.push((*quality, advantage));
            }
        }
        let product = |f: fn(&(f64, f64)) -> f64| all[4_000..].iter().map(f).sum::<f64>();
        product(|(q, a)| q * a).powi(2) / (product(|(q, _)| q * q) * product(|(_, a)| a * a))
    });
    [found, of_grump]
}

#[test]
fn the_severity_of_raters_is_little_signal() {
    for (severity, least) in [(0.0, 0.97), (1.0, 1.05), (2.0, 1.3)] {
        let (mut gain, mut of_grump) = (0.0, 0.0);
        for seed in 0..4 {
            let [[known, unknown], [with, without]] = efficiency(severity, seed);
            gain += 0.25 * known / unknown;
            of_grump += 0.25 * with / without;
        }
        println!(
            "severity {severity}: {gain:.2} times the ratings, the grump counts {of_grump:.2}"
        );
        assert!(gain > least, "{severity}: {gain}");
        // Half of the difference from the others is left.
        assert!((0.4..0.8).contains(&of_grump), "{of_grump}");
    }
}

#[test]
fn the_best_known_raters_are_kept() {
    let mut baselines = Baselines::default();
    let rated = |rater: usize| {
        let mut group = lone(1.0);
        group.parts[0].raters = vec![Some(format!("{rater:04}"))];
        group
    };
    let mut groups: Vec<_> = (0..2_000).map(rated).collect();
    groups.extend((0..500).map(|rater| rated(2 * rater)));
    baselines.advantages(&groups, &TrainConfig::default());
    let kept = &baselines.raters["default"]["thumbs"];
    assert_eq!(kept.len(), MOST_RATERS);
    assert!((0..500).all(|rater| kept.contains_key(&format!("{:04}", 2 * rater))));
}
