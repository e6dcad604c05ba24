//! The state that the tasks share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use hone_core::metrics::Metrics;
use hone_core::types::{SampleId, UnixMillis, now_ms};
use hone_dataset::PromptId;
use hone_engine::Engine;
use hone_reward::Routes;
use hone_store::Store;

use crate::config::RolloutConfig;
use crate::progress::RolloutProgress;
use crate::queue::PromptQueue;

/// The state that the tasks share.
pub(super) struct RolloutContext {
    pub config: RolloutConfig,
    pub engine: Arc<dyn Engine>,
    pub store: Store,
    pub routes: Arc<Routes>,
    pub metrics: Arc<Metrics>,
    pub queue: PromptQueue,
    /// Served completions whose feedback is reserved for the group of their prompt, and when the
    /// reservation expires.
    pub reserved: Mutex<HashMap<SampleId, UnixMillis>>,
    /// Locked from reading feedback to committing its group, so that it enters one group only.
    pub grouping: tokio::sync::Mutex<()>,
    /// Groups between their first shadow and their commit.
    pub in_flight: AtomicUsize,
    /// Total rewards of the dataset's groups, for its next draw to consume.
    pub prompt_rewards: Mutex<Vec<(PromptId, Vec<Option<f64>>)>>,
    pub progress: Mutex<RolloutProgress>,
    /// Wakes the scheduler: a prompt was submitted, or a group ended.
    pub wake_scheduler: Notify,
    /// Wakes the feedback sweep: a reservation ended.
    pub wake_sweep: Notify,
    pub stop: watch::Sender<bool>,
}

impl RolloutContext {
    /// Counts a prompt or feedback that gets no group.
    pub fn count_skipped(&self, reason: &str) {
        self.metrics.rollout_skipped.with_label_values(&[reason]).inc();
    }

    /// Counts served completions that are left out of the group of their prompt.
    pub fn count_left_out(&self, reason: &str, count: usize) {
        self.metrics.rollout_left_out.with_label_values(&[reason]).inc_by(count as u64);
    }

    pub fn report_queue(&self, length: usize) {
        self.metrics.rollout_queue.set(i64::try_from(length).unwrap_or(i64::MAX));
    }

    fn reserved(&self) -> MutexGuard<'_, HashMap<SampleId, UnixMillis>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the sweep from using the feedback on these samples before `until`.
    pub fn reserve_feedback(&self, samples: &[SampleId], until: UnixMillis) {
        self.reserved().extend(samples.iter().map(|id| (*id, until)));
    }

    /// Lets the sweep use the feedback on these samples.
    pub fn release_feedback(&self, samples: &[SampleId]) {
        self.reserved().retain(|id, _| !samples.contains(id));
        self.wake_sweep.notify_one();
    }

    pub fn is_reserved(&self, sample: SampleId) -> bool {
        self.reserved().get(&sample).is_some_and(|until| now_ms() < *until)
    }

    pub fn prompt_rewards(&self) -> MutexGuard<'_, Vec<(PromptId, Vec<Option<f64>>)>> {
        self.prompt_rewards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn progress(&self) -> MutexGuard<'_, RolloutProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another group may start: the groups that wait for the trainer, with those in flight,
    /// have fewer samples than `max_ready_groups` full groups.
    ///
    /// Groups of one from feedback alone must not count as full groups. They could fill the limit
    /// with too few samples for an optimizer step, and trainer and rollout would wait for each
    /// other.
    pub fn can_start_group(&self) -> bool {
        let max_groups = self.config.max_ready_groups;
        let in_flight = self.in_flight.load(Ordering::Acquire);
        if *self.store.watch_ready().borrow() + in_flight < max_groups {
            return true;
        }
        let size = self.config.group_size.max(1);
        let max_samples = max_groups.saturating_mul(size);
        match self.store.ready_groups(max_samples) {
            Ok(groups) => {
                let ready: usize = groups.iter().map(|group| group.members.len()).sum();
                ready + in_flight * size < max_samples
            }
            Err(error) => {
                tracing::warn!(%error, "cannot count the groups that wait for the trainer");
                false
            }
        }
    }

    /// Waits for [`crate::Rollout::stop`].
    pub async fn stopped(&self) {
        // The sender is in `self`, so the channel cannot close meanwhile.
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }

    pub fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }
}
