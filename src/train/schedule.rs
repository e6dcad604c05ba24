//! How the learning rate moves.

use crate::config::{ScheduleKind, TrainConfig};

/// The learning rate of the optimiser step that follows `done` steps.
///
/// Warm-up rises in a line, `peak * (done + 1) / warmup_steps`, and reaches the peak with its last
/// step (transformers starts from a step with rate 0, which learns nothing). After it, with
/// `x = (done - warmup) / (total - warmup)` held within 0 and 1: constant `peak`, linear
/// `peak (1 - x)`, cosine `peak (1 + cos(pi x)) / 2`, as transformers has them.
pub fn learning_rate(config: &TrainConfig, done: u64) -> f64 {
    let peak = config.learning_rate;
    if done < config.warmup_steps {
        return peak * (done + 1) as f64 / config.warmup_steps as f64;
    }
    let past = (done - config.warmup_steps) as f64;
    let span = config.total_steps.saturating_sub(config.warmup_steps).max(1) as f64;
    let x = (past / span).min(1.0);
    match config.schedule {
        ScheduleKind::Constant => peak,
        ScheduleKind::Linear => peak * (1.0 - x),
        ScheduleKind::Cosine => peak * 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
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
    fn a_total_below_the_warm_up_does_not_divide_by_zero() {
        assert!(rates(ScheduleKind::Cosine, 5, 3).iter().all(|r| r.is_finite()));
    }
}
