//! The learning-rate schedule.

use crate::config::{ScheduleKind, TrainConfig};

/// The learning rate of the optimizer step that follows `done` steps.
///
/// Warm-up is linear, `peak * (done + 1) / warmup`, and reaches the peak with its last step
/// (transformers starts with a step of rate 0, which learns nothing). The schedules after it equal
/// those of transformers. With `x = (done - warmup) / (total - warmup)`, clamped to 0 to 1, and `low`
/// the `train.min_learning_rate`:
///
/// - constant: `peak`
/// - linear: `peak (1 - x)`
/// - cosine: `low + (peak - low) (1 + cos(pi x)) / 2`
/// - polynomial: `low + (peak - low) (1 - x)^power`
/// - inverse_sqrt: `peak / sqrt((done + t - warmup) / t)`, with `t` the configured warm-up steps, or
///   10 000 without any
pub(crate) fn learning_rate(config: &TrainConfig, done: u64) -> f64 {
    // The learner has resolved an automatic rate.
    let peak = config.learning_rate.fixed().unwrap_or_default();
    // The peak of a curriculum stage may be below the configured minimum.
    let low = config.min_learning_rate.min(peak);
    let warmup = config.warmup();
    if done < warmup {
        return peak * (done + 1) as f64 / warmup as f64;
    }
    let past = (done - warmup) as f64;
    let span = config.schedule_steps().saturating_sub(warmup).max(1) as f64;
    let x = (past / span).min(1.0);
    match config.schedule {
        ScheduleKind::Constant => peak,
        ScheduleKind::Linear => peak * (1.0 - x),
        ScheduleKind::Cosine => low + (peak - low) * 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
        ScheduleKind::Polynomial => low + (peak - low) * (1.0 - x).powf(config.schedule_power),
        ScheduleKind::InverseSqrt => {
            let configured = config.configured_warmup().filter(|steps| *steps > 0);
            let t = configured.map_or(10_000.0, |steps| steps as f64);
            peak / ((past + t) / t).sqrt()
        }
    }
}

/// Steps of the warm-up that follows a reset of the optimizer's moments: those of the schedule's
/// warm-up, or 10 without one. Adam's first updates have the size of the learning rate in every
/// parameter, whatever the gradient's noise, so they must be small also in the middle of a schedule.
pub(crate) fn restart_steps(config: &TrainConfig) -> u64 {
    match config.warmup() {
        0 => 10,
        steps => steps,
    }
}

/// The factor of the scheduled rate with `remaining` steps of that warm-up to go, linear up to 1.
pub(crate) fn restart_factor(config: &TrainConfig, remaining: u64) -> f64 {
    let steps = restart_steps(config);
    (steps + 1 - remaining.clamp(1, steps)) as f64 / steps as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PeakRate;

    fn rates(schedule: ScheduleKind, warmup_steps: u64, total_steps: u64) -> Vec<f64> {
        let config = TrainConfig {
            learning_rate: PeakRate::Fixed(2.0),
            schedule,
            warmup_steps: Some(warmup_steps),
            total_steps,
            ..TrainConfig::default()
        };
        (0..=total_steps + 2).map(|done| learning_rate(&config, done)).collect()
    }

    #[test]
    fn warm_up_reaches_the_peak_with_its_last_step() {
        let rates = rates(ScheduleKind::Constant, 4, 10);
        assert_eq!(&rates[..5], &[0.5, 1.0, 1.5, 2.0, 2.0]);
        assert!(rates[4..].iter().all(|r| *r == 2.0));
    }

    #[test]
    fn linear_falls_to_zero_at_the_end_and_stays_there() {
        let rates = rates(ScheduleKind::Linear, 2, 6);
        assert_eq!(rates, vec![1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn cosine_is_halfway_at_half_of_the_steps() {
        let rates = rates(ScheduleKind::Cosine, 0, 8);
        assert!((rates[0] - 2.0).abs() < 1e-12);
        assert!((rates[4] - 1.0).abs() < 1e-12);
        assert!(rates[8].abs() < 1e-12 && rates[10].abs() < 1e-12);
        assert!(rates.windows(2).all(|w| w[1] <= w[0]));
    }

    #[test]
    fn rates_equal_those_of_transformers() {
        let path = hone_model::testing::test_file("reference/learning/optimizer_cases.json");
        let text = std::fs::read(path).unwrap();
        let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
        for case in cases["schedules"].as_array().unwrap() {
            let config: TrainConfig = serde_json::from_value(case["settings"].clone()).unwrap();
            let rates: Vec<f64> = serde_json::from_value(case["rates"].clone()).unwrap();
            let warmup = config.warmup();
            for done in 0..rates.len() as u64 - 1 {
                // transformers starts warm-up with a step of rate 0, which Hone leaves out.
                let expected = rates[(done + u64::from(done < warmup)) as usize];
                let own = learning_rate(&config, done);
                let shown = &case["settings"];
                assert!((own - expected).abs() < 1e-12, "{shown} {done}: {own} against {expected}");
            }
        }
    }

    #[test]
    fn a_warmup_ratio_equals_the_same_number_of_warmup_steps() {
        let config = TrainConfig { warmup_ratio: 0.1, total_steps: 42, ..TrainConfig::default() };
        assert_eq!(config.warmup(), 5);
        let counted = TrainConfig { warmup_ratio: 0.0, warmup_steps: Some(5), ..config.clone() };
        assert!((0..50).all(|done| learning_rate(&config, done) == learning_rate(&counted, done)));
    }

    #[test]
    fn without_a_key_warm_up_takes_ten_steps_or_a_tenth_of_the_schedule() {
        let warmup = |max_steps, warmup_ratio| {
            let config = TrainConfig { max_steps, warmup_ratio, ..TrainConfig::default() };
            config.check().unwrap();
            config.warmup()
        };
        assert_eq!([0, 5, 40, 100, 1000].map(|steps| warmup(steps, 0.0)), [10, 0, 4, 10, 10]);
        assert_eq!(warmup(40, 0.5), 20);
        // The scale of this schedule is a choice of the user, not a consequence of the default.
        let config = TrainConfig {
            schedule: ScheduleKind::InverseSqrt,
            learning_rate: PeakRate::Fixed(2.0),
            ..TrainConfig::default()
        };
        assert!(learning_rate(&config, 1000) > 0.9 * 2.0);
    }

    #[test]
    fn a_restart_rises_linearly_to_the_schedule() {
        let factors = |config: &TrainConfig| -> Vec<f64> {
            (0..=restart_steps(config)).rev().map(|left| restart_factor(config, left)).collect()
        };
        let config = TrainConfig { warmup_steps: Some(4), ..TrainConfig::default() };
        assert_eq!(factors(&config), [0.25, 0.5, 0.75, 1.0, 1.0]);
        let without = TrainConfig { warmup_steps: Some(0), ..config.clone() };
        assert_eq!(factors(&without)[..3], [0.1, 0.2, 0.3]);
        // A checkpoint of a longer warm-up begins with the first step of this one.
        assert_eq!(restart_factor(&config, 9), 0.25);
    }

    #[test]
    fn a_peak_below_the_minimum_rate_lowers_the_minimum() {
        let config = TrainConfig {
            schedule: ScheduleKind::Cosine,
            learning_rate: PeakRate::Fixed(1e-6),
            min_learning_rate: 1e-5,
            ..TrainConfig::default()
        };
        assert!((0..2000).all(|done| learning_rate(&config, done) <= 1e-6));
    }

    #[test]
    fn fewer_total_steps_than_warmup_steps_have_finite_rates() {
        assert!(rates(ScheduleKind::Cosine, 5, 3).iter().all(|r| r.is_finite()));
    }
}
