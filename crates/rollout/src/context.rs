//! The state that the tasks share.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use hone_core::metrics::Metrics;
use hone_core::types::{GroupId, GroupState, Interaction, Sample, SampleId, UnixMillis, now_ms};
use hone_dataset::PromptId;
use hone_engine::Engine;
use hone_reward::{MissingPart, Route, Routes};
use hone_store::Store;

use crate::config::RolloutConfig;

/// Counts of the groups since the start, from which a run sees that it cannot learn.
#[derive(Clone, Debug, Default)]
pub struct RolloutProgress {
    /// Number of groups that the trainer can use.
    pub ready: u64,
    /// Number of groups without any value.
    pub unscored: u64,
    /// When the first of them ended.
    pub unscored_since: Option<Instant>,
    /// The parts of the last of them, all of which were missing.
    pub missing: Vec<MissingPart>,
}

/// The state that the tasks share.
pub(super) struct RolloutContext {
    pub config: RolloutConfig,
    pub engine: Arc<dyn Engine>,
    pub store: Store,
    pub routes: Arc<Routes>,
    pub metrics: Arc<Metrics>,
    /// Prompts that wait for a group; requests push, and the scheduler pops the newest.
    pub queue: Mutex<VecDeque<PromptJob>>,
    /// Served completions whose feedback is reserved for the group of their prompt, and until when.
    pub reserved: Mutex<HashMap<SampleId, UnixMillis>>,
    /// Locked from reading feedback to committing its group, so that it enters one group only.
    pub grouping: tokio::sync::Mutex<()>,
    /// Groups between their first shadow and their commit.
    pub in_flight: AtomicUsize,
    /// Graded groups that may still wait for the trainer, oldest first, with their number of members.
    pub waiting: Mutex<VecDeque<(GroupId, usize)>>,
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

    pub fn report_queue(&self) {
        let length = self.queue.lock().len();
        self.metrics.rollout_queue.set(i64::try_from(length).unwrap_or(i64::MAX));
    }

    /// Keeps the sweep from using the feedback on these samples before `until`.
    pub fn reserve_feedback(&self, samples: &[SampleId], until: UnixMillis) {
        self.reserved.lock().extend(samples.iter().map(|id| (*id, until)));
    }

    /// Lets the sweep use the feedback on these samples.
    pub fn release_feedback(&self, samples: &[SampleId]) {
        self.reserved.lock().retain(|id, _| !samples.contains(id));
        self.wake_sweep.notify_one();
    }

    pub fn is_reserved(&self, sample: SampleId) -> bool {
        self.reserved.lock().get(&sample).is_some_and(|until| now_ms() < *until)
    }

    /// Samples that may wait for the trainer: those of `max_ready_groups` full groups. Incomplete groups
    /// could have too few samples for a step, and trainer and rollout would wait for each other.
    fn most_waiting(&self) -> usize {
        self.config.max_ready_groups.saturating_mul(self.config.group_size.max(1))
    }

    /// Whether another group may start: the graded groups that wait for the trainer, with those in flight,
    /// have fewer samples than [`Self::most_waiting`]. Groups of ratings alone do not count, beside which
    /// graded routes must learn.
    ///
    /// During a canary the trainer takes no group, and the newest ones displace the oldest
    /// ([`Self::displace`]), so only those in flight count: training continues with the freshest samples.
    pub fn can_start_group(&self) -> bool {
        let most = self.most_waiting();
        let in_flight = self.in_flight.load(Ordering::Acquire) * self.config.group_size.max(1);
        if in_flight >= most {
            return false;
        }
        if self.store.lineage().canary().is_some() {
            return true;
        }
        let mut waiting = self.waiting.lock();
        if samples_in(&waiting) + in_flight >= most {
            waiting.retain(|(id, _)| self.is_waiting(*id));
        }
        samples_in(&waiting) + in_flight < most
    }

    /// Whether a group still waits for the trainer. One that cannot be read is taken for one that does.
    fn is_waiting(&self, id: GroupId) -> bool {
        let group = self.store.group(id);
        group.is_ok_and(|group| group.is_none_or(|group| group.state == GroupState::Ready))
    }

    /// Adds a committed group. During a canary, returns the oldest ones beyond the limit, for the caller to
    /// drop.
    pub fn displace(&self, id: GroupId, members: usize) -> Vec<GroupId> {
        let mut waiting = self.waiting.lock();
        waiting.push_back((id, members));
        let mut displaced = Vec::new();
        if self.store.lineage().canary().is_some() && samples_in(&waiting) > self.most_waiting() {
            waiting.retain(|(id, _)| self.is_waiting(*id));
            while samples_in(&waiting) > self.most_waiting() {
                displaced.extend(waiting.pop_front().map(|(id, _)| id));
            }
        }
        displaced
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

fn samples_in(waiting: &VecDeque<(GroupId, usize)>) -> usize {
    waiting.iter().map(|(_, members)| members).sum()
}

// Prompts that wait for a group, bounded, newest first: the newest completion is of the newest policy
// version, and its user's feedback can still arrive in time. Older prompts fill idle time.

/// Age at which a prompt is dropped, because it no longer represents current traffic.
const MAX_AGE_MS: UnixMillis = 10 * 60 * 1000;

pub(super) struct PromptJob {
    pub interaction: Arc<Interaction>,
    /// The prompt's id in the dataset; `None` for a live prompt.
    pub prompt: Option<PromptId>,
    pub route: Arc<Route>,
    /// Completions that a client received and that are comparable with shadows.
    pub served: Vec<Sample>,
    /// The served completions whose feedback is reserved for this group.
    pub reserved: Vec<SampleId>,
    /// When the last served completion ended.
    pub completed: UnixMillis,
}

impl PromptJob {
    /// A served prompt with its completions.
    pub fn live(interaction: Arc<Interaction>, served: Vec<Sample>, route: Arc<Route>) -> Self {
        let last = served.iter().map(|sample| sample.created).max();
        let completed = last.unwrap_or(interaction.created).min(now_ms());
        let reserved = served.iter().map(|sample| sample.id).collect();
        Self { interaction, prompt: None, route, served, reserved, completed }
    }

    /// Removes completions from the group and its reservation; returns how many.
    pub fn leave_out(&mut self, condition: impl Fn(&Sample) -> bool) -> usize {
        let all = self.served.len();
        self.served.retain(|sample| !condition(sample));
        self.reserved = self.served.iter().map(|sample| sample.id).collect();
        all - self.served.len()
    }

    /// A prompt of the dataset.
    pub fn dataset(interaction: Interaction, prompt: PromptId, route: Arc<Route>) -> Self {
        Self {
            completed: interaction.created,
            interaction: Arc::new(interaction),
            prompt: Some(prompt),
            route,
            served: Vec::new(),
            reserved: Vec::new(),
        }
    }
}

/// Removes and returns the jobs that are too old.
pub(super) fn expired(jobs: &mut VecDeque<PromptJob>, now: UnixMillis) -> Vec<PromptJob> {
    let old = |job: &PromptJob| now.saturating_sub(job.completed) > MAX_AGE_MS;
    // Nearly in the order of completion: concurrent requests may overtake each other.
    let count = jobs.iter().take_while(|job| old(job)).count();
    jobs.drain(..count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::world::interaction;

    fn job(created: UnixMillis) -> PromptJob {
        let route = Arc::new(Route { name: "r".to_owned(), store: true, parts: Vec::new() });
        let interaction = Interaction { created, ..interaction("r") };
        PromptJob::live(Arc::new(interaction), Vec::new(), route)
    }

    #[test]
    fn old_prompts_expire() {
        let mut jobs: VecDeque<_> = [0, 1, 1_000_000].map(job).into();
        assert!(expired(&mut jobs, MAX_AGE_MS).is_empty());
        assert_eq!(expired(&mut jobs, MAX_AGE_MS + 2).len(), 2);
        assert_eq!(jobs.len(), 1);
    }
}
