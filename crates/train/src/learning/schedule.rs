//! How the learning rate moves.

use crate::config::{ScheduleKind, TrainConfig};

/// The learning rate of the optimiser step that follows `done` steps.
///
/// Warm-up rises in a line, `peak * (done + 1) / warmup`, and reaches the peak with its last step
/// (transformers starts from a step with rate 0, which learns nothing). After it, as transformers
/// has them, with `x = (done - warmup) / (total - warmup)` held within 0 and 1 and `low` the
/// `train.min_learning_rate`:
///
/// - constant: `peak`
/// - linear: `peak (1 - x)`
/// - cosine: `low + (peak - low) (1 + cos(pi x)) / 2`
/// - polynomial: `low + (peak - low) (1 - x)^power`
/// - inverse_sqrt: `peak / sqrt((done + t - warmup) / t)`, `t` the warm-up's steps, 10 000 without
pub fn learning_rate(config: &TrainConfig, done: u64) -> f64 {
    let peak = config.learning_rate;
    // A stage of a curriculum may peak lower.
    let low = config.min_learning_rate.min(peak);
    let warmup = warmup_steps(config);
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
            let t = if warmup == 0 { 10_000.0 } else { warmup as f64 };
            peak / ((past + t) / t).sqrt()
        }
    }
}

/// Steps of warm-up: `train.warmup_steps`, or `train.warmup_ratio` of the schedule's steps,
/// rounded up.
pub fn warmup_steps(config: &TrainConfig) -> u64 {
    if config.warmup_ratio > 0.0 {
        (config.schedule_steps() as f64 * config.warmup_ratio).ceil() as u64
    } else {
        config.warmup_steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: ScheduleKind, warmup_steps: u64, total_steps: u64) -> Vec<f64> {
        let config = TrainConfig {
            learning_rate: 2.0,
            schedule,
            warmup_steps,
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
    fn linear_falls_to_zero_at_the_end_and_stays() {
        let rates = rates(ScheduleKind::Linear, 2, 6);
        assert_eq!(rates, vec![1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn cosine_is_half_way_at_half_time() {
        let rates = rates(ScheduleKind::Cosine, 0, 8);
        assert!((rates[0] - 2.0).abs() < 1e-12);
        assert!((rates[4] - 1.0).abs() < 1e-12);
        assert!(rates[8].abs() < 1e-12 && rates[10].abs() < 1e-12);
        assert!(rates.windows(2).all(|w| w[1] <= w[0]));
    }

    #[test]
    fn rates_are_those_of_transformers() {
        let path = hone_model::testing::test_file("reference/optimiser_cases.json");
        let text = std::fs::read(path).unwrap();
        let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
        for case in cases["schedules"].as_array().unwrap() {
            let config: TrainConfig = serde_json::from_value(case["settings"].clone()).unwrap();
            let rates: Vec<f64> = serde_json::from_value(case["rates"].clone()).unwrap();
            let warmup = config.warmup_steps;
            for done in 0..rates.len() as u64 - 1 {
                // Ours leaves out their first step of warm-up, whose rate is 0.
                let theirs = rates[(done + u64::from(done < warmup)) as usize];
                let own = learning_rate(&config, done);
                let shown = &case["settings"];
                assert!((own - theirs).abs() < 1e-12, "{shown} {done}: {own} against {theirs}");
            }
        }
    }

    #[test]
    fn a_share_of_the_steps_warms_up_as_their_number_does() {
        let config = TrainConfig { warmup_ratio: 0.1, total_steps: 42, ..TrainConfig::default() };
        assert_eq!(warmup_steps(&config), 5);
        let counted = TrainConfig { warmup_ratio: 0.0, warmup_steps: 5, ..config.clone() };
        assert!((0..50).all(|done| learning_rate(&config, done) == learning_rate(&counted, done)));
    }

    #[test]
    fn a_lower_peak_lowers_the_floor() {
        let config = TrainConfig {
            schedule: ScheduleKind::Cosine,
            learning_rate: 1e-6,
            min_learning_rate: 1e-5,
            ..TrainConfig::default()
        };
        assert!((0..2000).all(|done| learning_rate(&config, done) <= 1e-6));
    }

    #[test]
    fn a_total_below_the_warm_up_does_not_divide_by_zero() {
        assert!(rates(ScheduleKind::Cosine, 5, 3).iter().all(|r| r.is_finite()));
    }
}
