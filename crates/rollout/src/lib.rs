//! Which prompts get a group, when, and by which sampler; forms every group the trainer sees.
//!
//! ```text
//! offer -> queue -> scheduler -> shadows -> finish -> one commit: samples, rewards, group
//! dataset ------------^                       ^
//! feedback in the ledger ---------------------+--> sweep -> groups of one
//! ```
//!
//! Invariants: live traffic goes first (shadows run at [`Priority::Shadow`] only); a group is
//! committed whole or not at all; feedback that the ledger holds reaches exactly one group, sooner
//! or later, whatever crashes in between.
//!
//! [`Priority::Shadow`]: hone_engine::Priority::Shadow

mod config;
mod dataset;
mod feedback;
mod group_commit;
mod queue;
mod scheduler;
mod shadow;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dataset::DatasetPrompts;
use queue::{PromptJob, PromptQueue};
use rand::SeedableRng;
use rand_chacha::ChaCha12Rng;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use hone_core::metrics::Metrics;
use hone_core::types::{Interaction, Sample, SampleId, UnixMillis, now_ms};
use hone_dataset::{DatasetConfig, PromptId};
use hone_engine::Engine;
use hone_reward::{RewardError, Routes};
use hone_store::{Store, StoreError};

pub use config::{RolloutConfig, SamplerKind};

/// How long `stop` waits for its tasks before it aborts them.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// What can go wrong at start.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The dataset cannot be read.
    #[error("rollout.dataset: {0}")]
    Dataset(String),
    /// The dataset's route does not exist.
    #[error(transparent)]
    Route(#[from] RewardError),
    /// The dataset's route cannot score anything.
    #[error(
        "{key} = `{route}` has no reward that can score a completion; \
         feedback alone does not reach dataset prompts"
    )]
    UnscoredRoute {
        /// The key that names it.
        key: &'static str,
        /// Its name.
        route: String,
    },
    /// The ledger cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The running scheduler. Cheap to clone.
#[derive(Clone)]
pub struct Rollout {
    shared: Arc<Shared>,
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

/// What the tasks share.
struct Shared {
    config: RolloutConfig,
    engine: Arc<dyn Engine>,
    store: Store,
    routes: Arc<Routes>,
    metrics: Arc<Metrics>,
    queue: PromptQueue,
    /// Served completions whose feedback waits for their group, and until when at most.
    held: Mutex<HashMap<SampleId, UnixMillis>>,
    /// Held while feedback is read and its group committed, so that it enters one group only.
    forming: tokio::sync::Mutex<()>,
    /// Groups whose sampling has begun and that are not committed yet.
    in_flight: AtomicUsize,
    /// Total rewards of finished groups of the dataset, until its next draw.
    outcomes: Mutex<Vec<(PromptId, Vec<Option<f64>>)>>,
    /// Wakes the scheduler: a prompt came, or a group left.
    wake: Notify,
    /// Wakes the sweep: feedback is no longer held.
    released: Notify,
    stop: watch::Sender<bool>,
}

impl Rollout {
    /// Starts its tasks on the current runtime. `dataset` is what
    /// [`crate::config::Config::dataset_in_use`] says.
    ///
    /// # Errors
    /// If the dataset or its route cannot be used; names the line or the key.
    pub fn start(
        config: &RolloutConfig,
        dataset: Option<&DatasetConfig>,
        engine: Arc<dyn Engine>,
        store: Store,
        routes: Arc<Routes>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, RolloutError> {
        Self::start_kept(config, dataset, (0, None), engine, store, routes, metrics)
    }

    /// [`Self::start`] with a seed for the shadows' random numbers, and a file in which the
    /// dataset's place is kept from one start to the next.
    ///
    /// Each start of a daemon draws from another stream of the seed, chosen by the number of
    /// samples in the ledger, so that a restart repeats no sample.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn start_kept(
        config: &RolloutConfig,
        dataset: Option<&DatasetConfig>,
        (seed, kept): (u64, Option<PathBuf>),
        engine: Arc<dyn Engine>,
        store: Store,
        routes: Arc<Routes>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, RolloutError> {
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        rng.set_stream(store.stats()?.samples);
        let dataset = dataset
            .filter(|_| config.enabled)
            .map(|dataset| DatasetPrompts::load(dataset, &config.dataset_route, &routes, kept))
            .transpose()?;
        let shared = Arc::new(Shared {
            queue: PromptQueue::new(config.queue),
            config: config.clone(),
            engine,
            store,
            routes,
            metrics,
            held: Mutex::default(),
            forming: tokio::sync::Mutex::default(),
            in_flight: AtomicUsize::new(0),
            outcomes: Mutex::default(),
            wake: Notify::new(),
            released: Notify::new(),
            stop: watch::channel(false).0,
        });
        let mut tasks = vec![tokio::spawn(feedback::run(Arc::clone(&shared)))];
        if config.enabled {
            tasks.push(tokio::spawn(scheduler::run(Arc::clone(&shared), dataset, rng)));
        }
        Ok(Self { shared, tasks: Arc::new(Mutex::new(tasks)) })
    }

    /// Offers a served interaction for a group. Never waits; what gets no group is counted with
    /// the reason.
    pub fn offer(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        let shared = &self.shared;
        if *shared.stop.borrow() {
            return shared.skip("stopping");
        }
        if !shared.config.enabled {
            return shared.skip("disabled");
        }
        let route = shared.routes.get(&interaction.route).filter(|route| route.has_graders());
        let Some(route) = route.cloned() else { return shared.skip("route_unscored") };
        let job = PromptJob::live(interaction, served, route);
        // Held first: once queued, the job may be taken and finished at any moment.
        shared.hold(&job.held, job.completed + shared.config.feedback_wait_ms);
        match shared.queue.push(job) {
            Ok(length) => {
                shared.queue_gauge(length);
                shared.wake.notify_one();
            }
            Err(job) => {
                shared.release(&job.held);
                // Whether the trainer or the sampler falls behind decides what to do about it.
                shared.skip(if shared.has_room() { "queue_full" } else { "backlog" });
            }
        }
    }

    /// Stops sampling, hands on what is complete, and returns within seconds. Prompts that still
    /// wait are given up; their feedback stays in the ledger and is taken up at the next start.
    pub async fn stop(&self) {
        self.shared.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let deadline = tokio::time::Instant::now() + STOP_LIMIT;
        for mut task in tasks {
            if tokio::time::timeout_at(deadline, &mut task).await.is_err() {
                tracing::warn!("a rollout task did not stop in time");
                task.abort();
            }
        }
    }
}

impl Shared {
    fn skip(&self, reason: &str) {
        self.metrics.rollout_skipped.with_label_values(&[reason]).inc();
    }

    fn queue_gauge(&self, length: usize) {
        self.metrics.rollout_queue.set(i64::try_from(length).unwrap_or(i64::MAX));
    }

    fn held(&self) -> MutexGuard<'_, HashMap<SampleId, UnixMillis>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcomes(&self) -> MutexGuard<'_, Vec<(PromptId, Vec<Option<f64>>)>> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the sweep from taking feedback on these before `until`.
    fn hold(&self, samples: &[SampleId], until: UnixMillis) {
        self.held().extend(samples.iter().map(|id| (*id, until)));
    }

    /// Lets the sweep have the feedback on these.
    fn release(&self, samples: &[SampleId]) {
        self.held().retain(|id, _| !samples.contains(id));
        self.released.notify_one();
    }

    fn is_held(&self, sample: SampleId) -> bool {
        self.held().get(&sample).is_some_and(|until| now_ms() < *until)
    }

    /// Waits for [`Rollout::stop`].
    async fn stopped(&self) {
        // The sender lives in `self`, so the channel cannot close while this waits.
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }
}

#[cfg(test)]
mod tests;
