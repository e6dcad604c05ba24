//! A step's figures: from the record to Prometheus and the log, in one place.

use std::time::Duration;

use prometheus::{Gauge, GaugeVec};

use hone_core::metrics::{Metrics, TrainMetrics};
use hone_core::types::StepRecord;

use crate::data::advantage::Advantages;

/// Publishes one step's figures.
pub(crate) fn step(
    metrics: &Metrics,
    record: &StepRecord,
    advantages: &Advantages,
    elapsed: Duration,
) {
    metrics.train.steps.inc();
    metrics.train.step_duration.observe(elapsed.as_secs_f64());
    for (baseline, count) in
        [("group", advantages.group_count), ("running", advantages.running_count)]
    {
        metrics.train.advantages.with_label_values(&[baseline]).inc_by(count);
    }
    for (gauge, figures) in [
        (&metrics.train.reward_part, &advantages.part_means),
        (&metrics.train.reward_part_std, &advantages.part_stds),
    ] {
        for ((route, part), value) in figures {
            gauge.with_label_values(&[route, part]).set(*value);
        }
    }
    let figure = |name: &str| record.metrics.get(name).copied();
    for (name, gauge) in gauges(&metrics.train) {
        if let Some(value) = figure(name) {
            gauge.set(value);
        }
    }
    for (vector, prefix, labels) in vectors(&metrics.train) {
        for label in labels {
            // The mean has a name of its own where it was there first.
            let value = figure(&format!("{prefix}_{label}"))
                .or_else(|| figure(prefix).filter(|_| *label == "mean"));
            if let Some(value) = value {
                vector.with_label_values(&[label]).set(value);
            }
        }
    }
    if let Some(tokens) = figure("tokens") {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of tokens"
        )]
        metrics.train.tokens.inc_by(tokens as u64);
    }
    let figure = |name: &str| figure(name).unwrap_or(f64::NAN);
    tracing::info!(
        step = record.step,
        reward = figure("reward_mean"),
        kl = figure("kl"),
        entropy = figure("entropy"),
        grad_norm = figure("grad_norm"),
        groups = record.groups.len(),
        seconds = elapsed.as_secs_f64(),
        "optimiser step taken"
    );
}

/// Gauges by the names of a step's figures.
fn gauges(train: &TrainMetrics) -> [(&'static str, &Gauge); 16] {
    [
        ("reward_mean", &train.reward_mean),
        ("reward_std", &train.reward_std),
        ("reward_batch_std", &train.reward_batch_std),
        ("zero_std_groups_ratio", &train.zero_std_groups),
        ("staleness_versions", &train.staleness),
        ("off_policy_ratio", &train.off_policy),
        ("kl", &train.kl),
        ("beta", &train.beta),
        ("entropy", &train.entropy),
        ("entropy_coef", &train.entropy_coefficient),
        ("loss", &train.loss),
        ("grad_norm", &train.grad_norm),
        ("learning_rate", &train.learning_rate),
        ("truncated_ratio", &train.truncated),
        ("num_tokens", &train.seen_tokens),
        ("loss_token_fraction", &train.loss_token_fraction),
    ]
}

/// Gauges whose label is what follows a common beginning of the names of a step's figures.
fn vectors(train: &TrainMetrics) -> [(&GaugeVec, &'static str, &'static [&'static str]); 6] {
    const SPREAD: &[&str] = &["min", "mean", "max"];
    [
        (&train.clip_ratio, "clip", &["low", "high", "region", "low_min", "high_max"]),
        (&train.importance_ratio, "ratio", SPREAD),
        (&train.sampler_ratio, "sampler_ratio", SPREAD),
        (&train.sampler_difference, "sampler_difference", &["mean", "max"]),
        (&train.completion_length, "completion_length", SPREAD),
        (&train.terminated_length, "terminated_length", SPREAD),
    ]
}
