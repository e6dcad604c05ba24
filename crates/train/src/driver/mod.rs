//! The trainer's thread, which turns ready groups in the ledger into served policy versions.
//!
//! The thread `hone-train` runs `Trainer::run`. It sleeps until one of these wakes it: groups became
//! ready, an operator activated a version, a [`TrainHandle`] sent a command, or `POLL_INTERVAL`
//! passed. It then handles all commands, follows the operator's version, and takes one step if there
//! is a batch. It follows once activations have paused for a quarter of a second, or before the next step: each
//! return to a version reads and writes a whole checkpoint. The life of a step:
//!
//! 1. *Prepare*: the oldest ready groups make a batch, and their rewards become advantages.
//! 2. *Optimize*: the learner computes the gradient and updates the adapter.
//! 3. *Wait* for the previous step's publication. If that version is not served, the step is undone
//!    and its groups stay ready.
//! 4. *Record*: a checkpoint, then the ledger's step record, which marks the groups as trained.
//! 5. *Maybe publish*: a thread `hone-publish` writes the version, loads it into the engine, probes
//!    and activates it, while this thread computes the next step.
//!
//! [`OfflineTrainer`] takes steps 1, 2 and 4 alone, on groups that another process recorded.
//!
//! A batch that cannot be stepped on changes nothing but the ledger, where its groups are dropped.
//!
//! Callers may rely on this:
//!
//! - Durable writes have a fixed order: checkpoint, step record, version. A crash between two of
//!   them is repaired at the next start: no recorded step is lost, no group is trained on twice.
//! - The learner is at most one step ahead of the publication in progress, and nothing of that step
//!   is durable before the version is served.
//! - A version that an operator activates is never replaced by weights that do not descend from it. Until the
//!   weights follow it, no step is taken and nothing is published, also after a crash.
//! - Pause and stop take effect after the current step. Errors and panics end the loop, not the
//!   thread: `worker` restarts it from the last checkpoint. Serving never blocks on the trainer.

mod error;
mod markers;
mod progress;
mod publication;
mod restore;
mod setup;
mod status;
mod trainer;
mod worker;

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;

use hone_core::metrics::Metrics;
use hone_core::types::{GroupId, StepRecord};

use crate::data::AdaptiveWeights;
use crate::data::advantage::{Advantages, Baselines};
use crate::data::batch_builder::TrainBatch;
use crate::data::packing::TrainSample;
use crate::learning::learner::NO_SAMPLE;
use crate::learning::step_stats::completion_metrics;
use crate::monitoring::warnings::{EQUAL_REWARDS, WarningKind};

pub use error::{TrainError, TrainFailure};
pub use setup::TrainSetup;
pub use status::{TrainState, TrainStatus};
pub use trainer::{OfflineSetup, OfflineTrainer};
pub use worker::{TrainHandle, TrainWorker};

// A batch that is ready for the optimizer.

/// Groups with their advantages and the samples to train on.
struct PreparedBatch {
    batch: TrainBatch,
    advantages: Advantages,
    /// Every member that has an advantage, the corrections, and then samples of earlier steps.
    samples: Vec<TrainSample>,
    /// Number of the samples of earlier steps.
    replayed: usize,
    /// The running baselines including this batch, which replace the old ones if a step is taken.
    baselines: Baselines,
    /// Mean number of versions between sampling and training.
    staleness: f64,
}

impl PreparedBatch {
    /// The batch as skipped for the reason that the learner reports.
    fn skip(&self, mut message: String) -> SkippedBatch {
        let groups = self.batch.group_ids();
        let reason = SkipReason::of(&message, self.advantages.dropped_groups, groups.len());
        if reason == SkipReason::EqualRewards {
            message = format!("all {} groups of the batch have equal rewards", groups.len());
        }
        SkippedBatch { reason, message, groups }
    }

    /// Takes the samples of earlier steps out, if the sample with this index is one of them.
    fn without_replay_of(&mut self, index: usize) -> bool {
        let fresh = self.samples.len() - self.replayed;
        let is_replayed = index >= fresh;
        if is_replayed {
            self.samples.truncate(fresh);
            self.replayed = 0;
        }
        is_replayed
    }

    /// The group of a sample that cannot be trained on, as skipped.
    fn skip_sample(&self, index: usize, message: String) -> SkippedBatch {
        let groups = self.batch.group_of(&self.advantages, index);
        SkippedBatch { reason: SkipReason::Invalid, message, groups }
    }
}

// Batches without a step, and what the log reports of them.

/// Consecutive batches of equal rewards after which the log advises what to change.
const ADVISE_AFTER: u64 = 3;

/// Why a batch got no step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SkipReason {
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
    /// The reason of a step that the learner skipped with `message`, of a batch of `groups` groups
    /// of which `dropped` had equal rewards.
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
    fn label(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NonFinite => "non_finite",
            Self::NoSample | Self::EqualRewards => "no_sample",
        }
    }
}

/// A batch without a step. The weights have not changed.
#[derive(Debug)]
struct SkippedBatch {
    reason: SkipReason,
    /// The reason in words.
    message: String,
    /// The groups to drop: training on them again would fail again.
    groups: Vec<GroupId>,
}

/// Logs skipped batches. A weak model can produce batches of equal rewards for hours, so these are
/// logged once, with advice, after [`ADVISE_AFTER`] in a row, and counted when learning resumes.
#[derive(Debug, Default)]
struct SkipLog {
    has_warned: bool,
    /// Batches of equal rewards since the last step.
    equal_batches: u64,
}

impl SkipLog {
    fn skipped(&mut self, batch: &SkippedBatch) {
        let (state, reason, groups) = (batch.reason.label(), &batch.message, batch.groups.len());
        if batch.reason != SkipReason::EqualRewards {
            tracing::warn!(state, reason, groups, "optimizer step skipped");
            return;
        }
        self.equal_batches += 1;
        if !self.has_warned && self.equal_batches >= ADVISE_AFTER {
            self.has_warned = true;
            let batches = self.equal_batches;
            let advice = WarningKind::Collapse.advice();
            tracing::warn!(
                state,
                reason,
                groups,
                "{batches} batches in a row {EQUAL_REWARDS}; nothing is learned from them. {advice} \
                 Worked examples (`dataset.few_shot`) help a weak model. Further batches like these are only counted, in hone_train_skipped_steps_total."
            );
        }
    }

    /// Reports the end of a run of batches with equal rewards.
    fn stepped(&mut self) {
        let batches = std::mem::take(&mut self.equal_batches);
        if batches > 0 {
            tracing::info!(batches, "learning resumes after {batches} batches of equal rewards");
        }
    }
}

// Commands to the trainer's thread, and the conditions under which it takes no step on its own.

/// Receives the status after a requested step.
pub(crate) type StepReply = oneshot::Sender<Result<TrainStatus, TrainError>>;

/// A message to the trainer's thread.
pub(crate) enum TrainCommand {
    /// Stop stepping until [`Self::Resume`].
    Pause,
    /// Undo [`Self::Pause`].
    Resume,
    /// Stop stepping after this step; `None` removes the limit.
    SetStepLimit(Option<u64>),
    /// Halve the learning rate until [`Self::Resume`].
    LowerRate,
    /// Take one step now, even if paused.
    Step(StepReply),
    /// Look for ready groups and rollbacks now.
    Wake,
    /// End the thread after the current step.
    Stop,
}

/// Decides whether the trainer may take a step on its own. Outlives restarts of the trainer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepGate {
    pub(crate) paused: bool,
    /// Whether a resume has come that the trainer has not taken yet. It ends a hold too.
    pub(crate) resumed: bool,
    /// The last step that may be taken.
    pub(crate) step_limit: Option<u64>,
}

impl StepGate {
    /// Applies a command that changes the gate; returns any other command.
    pub(crate) fn apply(&mut self, command: TrainCommand) -> Option<TrainCommand> {
        match command {
            TrainCommand::Pause => self.paused = true,
            TrainCommand::Resume => (self.paused, self.resumed) = (false, true),
            TrainCommand::SetStepLimit(limit) => self.step_limit = limit,
            other => return Some(other),
        }
        None
    }

    /// Whether no step may follow step `step`.
    pub(crate) fn is_closed(&self, step: u64) -> bool {
        self.paused || self.step_limit.is_some_and(|limit| step >= limit)
    }
}

// The metrics of a step: collected for its record, then exported to Prometheus and the log.

/// Adds the batch's metrics to those of the learner. A metric that cannot be computed is absent.
fn collect(
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
fn export(metrics: &Metrics, record: &StepRecord, advantages: &Advantages, elapsed: Duration) {
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
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::{Event, Level, Metadata, Subscriber, span};

    use super::*;

    /// Records the level and the message of every event.
    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<(Level, String)>>>);

    impl Subscriber for Recorder {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut message = Message::default();
            event.record(&mut message);
            self.0.lock().unwrap().push((*event.metadata().level(), message.0));
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    #[derive(Default)]
    struct Message(String);

    impl Visit for Message {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}");
            }
        }
    }

    fn logged(calls: impl FnOnce(&mut SkipLog)) -> Vec<(Level, String)> {
        let recorder = Recorder::default();
        tracing::subscriber::with_default(recorder.clone(), || calls(&mut SkipLog::default()));
        let events = recorder.0.lock().unwrap();
        events.clone()
    }

    fn batch(reason: SkipReason) -> SkippedBatch {
        let groups = vec![GroupId::new(), GroupId::new()];
        SkippedBatch { reason, message: "why".to_owned(), groups }
    }

    #[test]
    fn only_a_batch_whose_groups_were_all_dropped_has_equal_rewards() {
        assert_eq!(SkipReason::of(NO_SAMPLE, 8, 8), SkipReason::EqualRewards);
        assert_eq!(SkipReason::of(NO_SAMPLE, 7, 8), SkipReason::NoSample);
        assert_eq!(SkipReason::of("loss NaN, gradient norm 1", 8, 8), SkipReason::NonFinite);
        assert_eq!(SkipReason::EqualRewards.label(), "no_sample");
    }

    #[test]
    fn equal_rewards_are_explained_once_with_their_count() {
        let events = logged(|log| {
            log.stepped();
            for _ in 0..3 {
                log.skipped(&batch(SkipReason::EqualRewards));
            }
            log.stepped();
            log.stepped();
            log.skipped(&batch(SkipReason::EqualRewards));
            log.stepped();
        });
        let few = logged(|log| {
            (1..ADVISE_AFTER).for_each(|_| log.skipped(&batch(SkipReason::EqualRewards)));
        });
        assert_eq!(few, []);
        let levels: Vec<Level> = events.iter().map(|(level, _)| *level).collect();
        assert_eq!(levels, [Level::WARN, Level::INFO, Level::INFO]);
        let expected = "3 batches in a row had no group with different rewards; ";
        assert!(events[0].1.starts_with(expected), "{}", events[0].1);
        for key in ["`dataset.few_shot`", "reward part", "`rollout.temperature`"] {
            assert!(events[0].1.contains(key), "{key}: {}", events[0].1);
        }
        assert_eq!(events[1].1, "learning resumes after 3 batches of equal rewards");
        assert_eq!(events[2].1, "learning resumes after 1 batches of equal rewards");
    }

    #[test]
    fn other_reasons_are_logged_once_for_each_batch() {
        let events = logged(|log| {
            for reason in [SkipReason::Invalid, SkipReason::NonFinite, SkipReason::NoSample] {
                log.skipped(&batch(reason));
                log.skipped(&batch(reason));
            }
            log.stepped();
        });
        let expected = (Level::WARN, "optimizer step skipped".to_owned());
        assert_eq!(events, vec![expected; 6]);
    }
}
