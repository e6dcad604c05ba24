//! The metrics of a step: collected for its record, then exported to Prometheus and the log.

use std::collections::BTreeMap;
use std::time::Duration;

use hone_core::metrics::Metrics;
use hone_core::types::StepRecord;

use super::prepared::PreparedBatch;
use crate::data::adaptive_weights::AdaptiveWeights;
use crate::data::advantage::Advantages;
use crate::learning::step_stats::completion_metrics;

/// Adds the batch's metrics to those of the learner. A metric that cannot be computed is absent.
pub(super) fn collect(
    mut metrics: BTreeMap<String, f64>,
    prepared: &PreparedBatch,
    weights: &AdaptiveWeights,
    elapsed: Duration,
) -> BTreeMap<String, f64> {
    let advantages = &prepared.advantages;
    for (name, value) in [
        ("reward_mean", advantages.reward_mean),
        ("reward_std", advantages.reward_std),
        ("reward_batch_std", advantages.reward_batch_std),
        ("zero_std_groups_ratio", advantages.zero_std_groups_ratio),
        ("staleness_versions", Some(prepared.staleness)),
        ("dropped_groups", Some(advantages.dropped_groups as f64)),
        ("step_seconds", Some(elapsed.as_secs_f64())),
        ("replay/samples", (prepared.replayed > 0).then_some(prepared.replayed as f64)),
    ] {
        metrics.extend(value.map(|v| (name.to_owned(), v)));
    }
    let means = prepared.batch.mean_rewards();
    metrics.extend(means.map(|(kind, mean)| (format!("reward_mean/{kind}"), mean)));
    // Replaces the learner's values, which leave out completions without an advantage.
    metrics.extend(completion_metrics(prepared.batch.lengths()));
    metrics.extend(advantages.part_metrics());
    metrics.extend(weights.all().map(|(_, part, weight)| (format!("weight/{part}"), weight)));
    metrics
}

/// Exports a recorded step to Prometheus and the log. `elapsed` includes the checkpoint.
pub(super) fn export(
    metrics: &Metrics,
    record: &StepRecord,
    advantages: &Advantages,
    elapsed: Duration,
) {
    let train = &metrics.train;
    train.steps.inc();
    train.step_duration.observe(elapsed.as_secs_f64());
    for (baseline, count) in
        [("group", advantages.group_count), ("running", advantages.running_count)]
    {
        train.advantages.with_label_values(&[baseline]).inc_by(count);
    }
    for (gauge, values) in [
        (&train.reward_part, &advantages.part_means),
        (&train.reward_part_std, &advantages.part_stds),
    ] {
        for ((route, part), value) in values {
            gauge.with_label_values(&[route, part]).set(*value);
        }
    }
    let metric = |name: &str| record.metrics.get(name).copied();
    for (name, gauge) in [
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
        ("correction/nll", &train.correction_nll),
    ] {
        if let Some(value) = metric(name) {
            gauge.set(value);
        }
    }
    let spread = ["min", "mean", "max"];
    let clip_labels = ["low", "high", "region", "low_min", "high_max"];
    for (vector, prefix, labels) in [
        (&train.clip_ratio, "clip", &clip_labels[..]),
        (&train.importance_ratio, "ratio", &spread),
        (&train.sampler_ratio, "sampler_ratio", &spread),
        (&train.sampler_difference, "sampler_difference", &spread[1..]),
        (&train.completion_length, "completion_length", &spread),
        (&train.terminated_length, "terminated_length", &spread),
    ] {
        for label in labels {
            // Some means have the prefix itself as their name.
            let value = metric(&format!("{prefix}_{label}"))
                .or_else(|| metric(prefix).filter(|_| *label == "mean"));
            if let Some(value) = value {
                vector.with_label_values(&[label]).set(value);
            }
        }
    }
    for kind in ["graded", "rated"] {
        if let Some(mean) = metric(&format!("reward_mean/{kind}")) {
            train.reward_mean.with_label_values(&[kind]).set(mean);
        }
    }
    for (name, counter) in [("tokens", &train.tokens), ("replay/samples", &train.replayed)] {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
        counter.inc_by(metric(name).unwrap_or_default() as u64);
    }
    let metric = |name: &str| metric(name).unwrap_or(f64::NAN);
    tracing::info!(
        step = record.step,
        reward = metric("reward_mean"),
        kl = metric("kl"),
        entropy = metric("entropy"),
        grad_norm = metric("grad_norm"),
        groups = record.groups.len(),
        seconds = elapsed.as_secs_f64(),
        "optimizer step taken"
    );
}
