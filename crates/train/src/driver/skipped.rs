//! Batches without a step, and what the log reports of them.

use hone_core::types::GroupId;

use crate::learning::learner::NO_SAMPLE;
use crate::monitoring::warnings::{EQUAL_REWARDS, WarningKind};

/// Consecutive batches of equal rewards after which the log advises what to change.
const ADVISE_AFTER: u64 = 3;

/// Why a batch got no step.
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
    /// The reason of a step that the learner skipped with `message`, of a batch of `groups` groups
    /// of which `dropped` had equal rewards.
    pub(super) fn of(message: &str, dropped: u64, groups: usize) -> Self {
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
    /// The reason in words.
    pub(super) message: String,
    /// The groups to drop: training on them again would fail again.
    pub(super) groups: Vec<GroupId>,
}

/// Logs skipped batches. A weak model can produce batches of equal rewards for hours, so these are
/// logged once, with advice, after [`ADVISE_AFTER`] in a row, and counted when learning resumes.
#[derive(Debug, Default)]
pub(super) struct SkipLog {
    has_warned: bool,
    /// Batches of equal rewards since the last step.
    equal_batches: u64,
}

impl SkipLog {
    pub(super) fn skipped(&mut self, batch: &SkippedBatch) {
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
    pub(super) fn stepped(&mut self) {
        let batches = std::mem::take(&mut self.equal_batches);
        if batches > 0 {
            tracing::info!(batches, "learning resumes after {batches} batches of equal rewards");
        }
    }
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
