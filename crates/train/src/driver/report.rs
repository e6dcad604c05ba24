//! What the trainer reports: its state and status, skipped batches, and the metrics of steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{IntCounterVec, IntGauge};
use schemars::JsonSchema;
use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};

use hone_core::metrics::Metrics;
use hone_core::types::{GroupId, StepRecord};

use super::progress::PreparedBatch;
use crate::data::AdaptiveWeights;
use crate::data::advantage::Advantages;
use crate::learning::learner::{NO_SAMPLE, completion_metrics};
use crate::monitoring::warnings::{EQUAL_REWARDS, WarningKind};

/// The trainer's current activity.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema, IntoStaticStr, VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum TrainState {
    /// `train.enabled` is false.
    Disabled,
    /// Waiting for enough ready groups.
    #[default]
    Waiting,
    /// Computing a step.
    Training,
    /// Waiting for a publication to finish. A publication during a step does not count.
    Publishing,
    /// Paused by an operator, or at the step limit of `hone train`.
    Paused,
    /// `train.when` or `train.max_steps_per_day` permits no step now.
    Scheduled,
    /// `train.max_steps` is reached.
    Finished,
    /// Waiting to restart after an error, which is in [`TrainStatus::last_error`].
    Failed,
}

impl TrainState {
    /// The name in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The response of `GET /admin/train`.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct TrainStatus {
    /// The current activity.
    pub state: TrainState,
    /// Optimizer steps in the ledger. A step that may still be undone does not count.
    pub step: u64,
    /// Prompts that no group has been formed for yet.
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    pub in_flight_groups: u64,
    /// Groups waiting for a step, including those of the step being computed.
    pub ready_groups: u64,
    /// The last published version that the trainer's weights descend from.
    pub policy_version: u64,
    /// The pause that an operator's activation of a version began, with its end; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Why the state is `scheduled`; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Longest sample in tokens that can be trained on; 0 until the trainer has started.
    pub max_sample_tokens: usize,
    /// Metrics of the last step.
    pub metrics: BTreeMap<String, f64>,
    /// The last failure, rejection or reason for a skipped batch; kept when training continues.
    pub last_error: Option<String>,
    /// Restarts from a checkpoint since the process started.
    pub restarts: u64,
    /// Batches without a step since the process started, the sum of `hone_train_skipped_steps_total`.
    pub skipped_batches: u64,
    /// Groups that expired or were left out without having been trained on since the process started, by reason: the
    /// values of `hone_train_dropped_groups_total`.
    pub dropped_groups: BTreeMap<String, u64>,
}

/// The values of a counter with one label.
fn by_label(counter: &IntCounterVec) -> BTreeMap<String, u64> {
    let families = counter.collect();
    let metrics = families.iter().flat_map(|family| family.get_metric());
    let named = metrics.filter_map(|metric| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let count = metric.get_counter().get_value() as u64;
        Some((metric.get_label().first()?.value().to_owned(), count))
    });
    named.collect()
}

#[derive(Clone)]
pub(super) struct StatusCell {
    status: Arc<Mutex<TrainStatus>>,
    metrics: Arc<Metrics>,
}

impl StatusCell {
    pub(super) fn new(state: TrainState, metrics: Arc<Metrics>) -> Self {
        let cell = Self { status: Arc::default(), metrics };
        cell.set_state(state);
        cell
    }

    /// The status, with the current values of the gauges that other tasks maintain.
    pub(super) fn read(&self) -> TrainStatus {
        let count = |gauge: &IntGauge| u64::try_from(gauge.get()).unwrap_or_default();
        TrainStatus {
            queued_prompts: count(&self.metrics.rollout_queue),
            in_flight_groups: count(&self.metrics.rollout_in_flight),
            ready_groups: count(&self.metrics.train.ready_groups),
            dropped_groups: by_label(&self.metrics.train.dropped_groups),
            ..self.status.lock().clone()
        }
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut TrainStatus)) {
        change(&mut self.status.lock());
    }

    pub(super) fn set_state(&self, state: TrainState) {
        self.update(|s| s.state = state);
        for each in TrainState::VARIANTS {
            let gauge = self.metrics.train.state.with_label_values(&[each.as_str()]);
            gauge.set(i64::from(*each == state));
        }
    }
}

// Batches without a step, and what the log reports of them.

/// Consecutive batches of equal rewards after which the log advises what to change.
const ADVISE_AFTER: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SkipReason {
    /// A sample cannot be trained on. Only its group is dropped.
    Invalid,
    /// The loss, the gradient norm or an updated value is not finite.
    NonFinite,
    /// Every sample was refused, masked or without an advantage.
    NoSample,
    /// `train.zero_variance_groups = "drop"` left no group, because each had equal rewards.
    EqualRewards,
}

impl SkipReason {
    /// The reason of a step skipped with `message`, of `groups` groups of which `dropped` had equal rewards.
    fn of(message: &str, dropped: u64, groups: usize) -> Self {
        if message != NO_SAMPLE {
            Self::NonFinite
        } else if dropped == groups as u64 {
            Self::EqualRewards
        } else {
            Self::NoSample
        }
    }

    /// The label in metrics and the reason of dropped groups in the ledger.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NonFinite => "non_finite",
            Self::NoSample | Self::EqualRewards => "no_sample",
        }
    }
}

/// A batch without a step. The weights have not changed.
#[derive(Debug)]
pub(super) struct SkippedBatch {
    pub(super) reason: SkipReason,
    pub(super) message: String,
    /// The groups to drop: training on them again would fail again.
    pub(super) groups: Vec<GroupId>,
}

impl SkippedBatch {
    /// A whole batch, for the reason that the learner reports.
    pub(super) fn of(prepared: &PreparedBatch, mut message: String) -> Self {
        let groups = prepared.batch.group_ids();
        let reason = SkipReason::of(&message, prepared.advantages.dropped_groups, groups.len());
        if reason == SkipReason::EqualRewards {
            message = format!("all {} groups of the batch have equal rewards", groups.len());
        }
        Self { reason, message, groups }
    }

    pub(super) fn of_sample(prepared: &PreparedBatch, index: usize, message: String) -> Self {
        let groups = prepared.batch.group_of(&prepared.advantages, index);
        Self { reason: SkipReason::Invalid, message, groups }
    }
}

/// What the log says of skipped batches. Those of equal rewards, which a weak model can produce for hours, are logged
/// once, with advice, after [`ADVISE_AFTER`] in a row, and counted when learning resumes.
#[derive(Debug, Default)]
pub(super) struct SkipLog {
    has_warned: bool,
    equal_batches: u64,
}

impl SkipLog {
    /// The text for a skipped batch, if it is logged.
    pub(super) fn skipped(&mut self, reason: SkipReason) -> Option<String> {
        if reason != SkipReason::EqualRewards {
            return Some("optimizer step skipped".to_owned());
        }
        self.equal_batches += 1;
        let is_due = !self.has_warned && self.equal_batches >= ADVISE_AFTER;
        self.has_warned |= is_due;
        let (batches, advice) = (self.equal_batches, WarningKind::Collapse.advice());
        is_due.then(|| {
            format!(
                "{batches} batches in a row {EQUAL_REWARDS}; nothing is learned from them. {advice} Worked \
                 examples (`dataset.few_shot`) help a weak model. Further batches like these are only counted, in \
                 hone_train_skipped_steps_total."
            )
        })
    }

    /// The number of batches with equal rewards that a step ends, if any.
    pub(super) fn stepped(&mut self) -> Option<u64> {
        Some(std::mem::take(&mut self.equal_batches)).filter(|batches| *batches > 0)
    }
}

// The metrics of a step: collected for its record, then exported to Prometheus and the log.

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
        ("represented_samples", Some(advantages.represented as f64).filter(|n| *n > 0.0)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_batch_whose_groups_were_all_dropped_has_equal_rewards() {
        assert_eq!(SkipReason::of(NO_SAMPLE, 8, 8), SkipReason::EqualRewards);
        assert_eq!(SkipReason::of(NO_SAMPLE, 7, 8), SkipReason::NoSample);
        assert_eq!(SkipReason::of("loss NaN, gradient norm 1", 8, 8), SkipReason::NonFinite);
        assert_eq!(SkipReason::EqualRewards.label(), "no_sample");
    }

    #[test]
    fn equal_rewards_are_explained_once_with_their_count() {
        let mut log = SkipLog::default();
        assert_eq!(log.stepped(), None);
        assert_eq!([(); 2].map(|()| log.skipped(SkipReason::EqualRewards)), [None, None]);
        let text = log.skipped(SkipReason::EqualRewards).unwrap();
        assert!(
            text.starts_with("3 batches in a row had no group with different rewards; "),
            "{text}"
        );
        for key in ["`dataset.few_shot`", "reward part", "`rollout.temperature`"] {
            assert!(text.contains(key), "{key}: {text}");
        }
        assert_eq!((log.stepped(), log.stepped()), (Some(3), None));
        assert_eq!(log.skipped(SkipReason::EqualRewards), None);
        assert_eq!(log.stepped(), Some(1));
        // Other reasons are logged for each batch.
        for reason in [SkipReason::Invalid, SkipReason::NonFinite, SkipReason::NoSample] {
            for _ in 0..2 {
                assert_eq!(log.skipped(reason).as_deref(), Some("optimizer step skipped"));
            }
        }
    }
}
