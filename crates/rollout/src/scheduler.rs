//! Takes prompts while there is room for another group and a slot to sample in.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::RngCore;
use rand_chacha::ChaCha12Rng;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use hone_core::types::{Sample, SampleId, now_ms};

use super::dataset::DatasetPrompts;
use super::queue::PromptJob;
use super::{Shared, shadow};
use crate::group_commit;

/// How often room and age are looked at when nothing else wakes the scheduler.
const TICK: Duration = Duration::from_secs(1);

/// A served completion this many versions behind is left out of its group: the rest of what
/// `train.max_staleness` allows is for waiting on the trainer.
const SERVED_LAG: u64 = 4;

/// How long a group being sampled may hold back feedback on its served completion, at most.
const HOLD_MS: u64 = 30_000;

/// A group between its first shadow and its commit. Dropping it, panics included, frees its place
/// and its feedback.
pub(super) struct InFlight {
    shared: Arc<Shared>,
    held: Vec<SampleId>,
}

impl InFlight {
    fn begin(shared: &Arc<Shared>, job: &PromptJob) -> Self {
        shared.in_flight.fetch_add(1, Ordering::AcqRel);
        shared.metrics.rollout_in_flight.inc();
        let until = job.completed + shared.config.feedback_wait_ms;
        shared.hold(&job.held, until.max(now_ms() + HOLD_MS));
        Self { shared: Arc::clone(shared), held: job.held.clone() }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.shared.metrics.rollout_in_flight.dec();
        self.shared.release(&self.held);
        self.shared.wake.notify_one();
    }
}

impl Shared {
    /// Whether another group may be begun: the groups waiting for the trainer, those under way
    /// included, hold fewer samples than `max_ready_groups` full groups.
    ///
    /// Samples rather than groups are counted, because groups of one (feedback alone) would
    /// otherwise fill the bound with too few samples for a step, and both sides would wait.
    pub(super) fn has_room(&self) -> bool {
        let bound = self.config.max_ready_groups;
        let under_way = self.in_flight.load(Ordering::Acquire);
        if *self.store.watch_ready().borrow() + under_way < bound {
            return true;
        }
        let size = self.config.group_size.max(1);
        let limit = bound.saturating_mul(size);
        match self.store.ready_groups(limit) {
            Ok(groups) => {
                let waiting: usize = groups.iter().map(|group| group.members.len()).sum();
                waiting + under_way * size < limit
            }
            Err(error) => {
                tracing::warn!(%error, "cannot count the groups that wait for the trainer");
                false
            }
        }
    }
}

/// Runs until [`super::Rollout::stop`], then waits for the groups under way.
pub(super) async fn run(shared: Arc<Shared>, dataset: Option<DatasetPrompts>, rng: ChaCha12Rng) {
    let slots = match shared.config.max_concurrent {
        0 => shared.engine.info().slots,
        bound => bound,
    };
    let permits = Arc::new(Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS)));
    let mut scheduler = Scheduler { shared, dataset, rng, permits };
    let mut groups = JoinSet::new();
    while let Some(()) = scheduler.step(&mut groups).await {
        while let Some(done) = groups.try_join_next() {
            report(done);
        }
    }
    for job in scheduler.shared.queue.drain() {
        scheduler.shared.release(&job.held);
        scheduler.shared.skip("stopping");
    }
    scheduler.shared.queue_gauge(0);
    while let Some(done) = groups.join_next().await {
        report(done);
    }
    if let Some(dataset) = &mut scheduler.dataset {
        dataset.save();
    }
}

fn report(done: Result<(), tokio::task::JoinError>) {
    if let Err(error) = done {
        tracing::error!(%error, "a group was lost");
    }
}

struct Scheduler {
    shared: Arc<Shared>,
    dataset: Option<DatasetPrompts>,
    rng: ChaCha12Rng,
    permits: Arc<Semaphore>,
}

impl Scheduler {
    /// Begins one group; `None` when the daemon stops.
    ///
    /// The slot comes before the prompt, so that the prompt taken is the newest of that moment.
    async fn step(&mut self, groups: &mut JoinSet<()>) -> Option<()> {
        let slot = self.slot().await?;
        let mut job = self.next_job().await?;
        let in_flight = InFlight::begin(&self.shared, &job);
        let active = self.shared.engine.active_version().0;
        job.served.retain(|sample| active.saturating_sub(sample.version.0) <= SERVED_LAG);
        let wanted = self.shared.config.group_size.saturating_sub(job.served.len());
        let shadows = self.sample(&job, wanted, slot).await?;
        let shared = Arc::clone(&self.shared);
        groups.spawn(async move {
            group_commit::run(&shared, job, shadows, wanted).await;
            drop(in_flight);
        });
        Some(())
    }

    async fn slot(&self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            biased;
            () = self.shared.stopped() => None,
            permit = Arc::clone(&self.permits).acquire_owned() => permit.ok(),
        }
    }

    /// Starts `wanted` shadows, each once a slot is free.
    async fn sample(
        &mut self,
        job: &PromptJob,
        wanted: usize,
        first: OwnedSemaphorePermit,
    ) -> Option<JoinSet<Option<Sample>>> {
        let mut shadows = JoinSet::new();
        let mut first = Some(first);
        for _ in 0..wanted {
            let slot = match first.take() {
                Some(slot) => slot,
                None => self.slot().await?,
            };
            let seed = self.rng.next_u64();
            let (shared, interaction) = (Arc::clone(&self.shared), Arc::clone(&job.interaction));
            shadows.spawn(async move {
                let sample = shadow::sample(&shared, &interaction, seed).await;
                drop(slot);
                sample
            });
        }
        Some(shadows)
    }

    /// Waits for room and a prompt: the newest live one or the dataset's next, as
    /// `dataset.mix.live_share` shares them out while both wait.
    async fn next_job(&mut self) -> Option<PromptJob> {
        let shared = Arc::clone(&self.shared);
        let mut ready = shared.store.watch_ready();
        loop {
            if shared.is_stopping() {
                return None;
            }
            for job in shared.queue.expired(now_ms()) {
                shared.release(&job.held);
                shared.skip("expired");
            }
            ready.mark_unchanged();
            if shared.has_room() {
                let waits = shared.queue.len() > 0;
                let live = self.dataset.as_mut().is_none_or(|dataset| dataset.takes_live(waits));
                let job = if live { shared.queue.pop() } else { None };
                let drawn = || self.dataset.as_mut()?.next_job(&shared);
                // The dataset may turn out to hold nothing that the model can take.
                let job = job.or_else(drawn).or_else(|| shared.queue.pop());
                shared.queue_gauge(shared.queue.len());
                if job.is_some() {
                    return job;
                }
            }
            tokio::select! {
                () = shared.stopped() => return None,
                changed = ready.changed() => changed.ok()?,
                () = shared.wake.notified() => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }
}
