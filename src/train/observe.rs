//! A step's figures: from the record to Prometheus and the log, in one place.

use std::time::Duration;

use super::advantage::Advantages;
use crate::telemetry::Metrics;
use crate::types::StepRecord;

/// Publishes one step's figures.
pub(super) fn step(
    metrics: &Metrics,
    record: &StepRecord,
    advantages: &Advantages,
    elapsed: Duration,
) {
    metrics.train_steps.inc();
    metrics.train_step_duration.observe(elapsed.as_secs_f64());
    for (baseline, count) in
        [("group", advantages.group_count), ("running", advantages.running_count)]
    {
        metrics.train_advantages.with_label_values(&[baseline]).inc_by(count);
    }
    for ((route, part), mean) in &advantages.part_means {
        metrics.train_reward_part.with_label_values(&[route, part]).set(*mean);
    }
    for (name, gauge) in [
        ("reward_mean", &metrics.train_reward_mean),
        ("reward_std", &metrics.train_reward_std),
        ("zero_std_groups_ratio", &metrics.train_zero_std_groups),
        ("staleness_versions", &metrics.train_staleness),
        ("kl", &metrics.train_kl),
        ("entropy", &metrics.train_entropy),
        ("loss", &metrics.train_loss),
        ("grad_norm", &metrics.train_grad_norm),
        ("learning_rate", &metrics.train_learning_rate),
        ("completion_length", &metrics.train_completion_length),
    ] {
        if let Some(value) = record.metrics.get(name) {
            gauge.set(*value);
        }
    }
    for (vector, prefix, labels) in [
        (&metrics.train_clip_ratio, "clip", &["low", "high"][..]),
        (&metrics.train_importance_ratio, "ratio", &["min", "mean", "max"]),
        (&metrics.train_sampler_difference, "sampler_difference", &["mean", "max"]),
    ] {
        for label in labels {
            if let Some(value) = record.metrics.get(&format!("{prefix}_{label}")) {
                vector.with_label_values(&[label]).set(*value);
            }
        }
    }
    if let Some(tokens) = record.metrics.get("tokens") {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of tokens"
        )]
        metrics.train_tokens.inc_by(*tokens as u64);
    }
    let figure = |name: &str| record.metrics.get(name).copied().unwrap_or(f64::NAN);
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
