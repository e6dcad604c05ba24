//! Starts and stops the tasks, and accepts served prompts.

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::SeedableRng;
use rand_chacha::ChaCha12Rng;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, Group, Interaction, Sample};
use hone_dataset::DatasetConfig;
use hone_engine::Engine;
use hone_reward::Routes;
use hone_store::Store;

use crate::config::RolloutConfig;
use crate::context::RolloutContext;
use crate::dataset::DatasetPrompts;
use crate::error::RolloutError;
use crate::progress::RolloutProgress;
use crate::queue::{PromptJob, PromptQueue};
use crate::{feedback, scheduler, shadow};

/// How long [`Rollout::stop`] waits for its tasks before it aborts them.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle of the running tasks. Cheap to clone.
#[derive(Clone)]
pub struct Rollout {
    context: Arc<RolloutContext>,
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Rollout {
    /// Starts the tasks on the current runtime.
    ///
    /// `seed` is that of the shadows' seeds. Each start uses another stream of it, chosen by the
    /// number of samples in the ledger, so that a restart repeats no sample. `state_file` keeps the
    /// position in the dataset from one start to the next. `config` is one for the trainer's steps
    /// ([`RolloutConfig::for_steps_of`]): with a limit of 0 ready groups, no group starts.
    ///
    /// # Errors
    /// If the dataset or its route cannot be used (names the line or the key), or if the ledger
    /// cannot be read.
    pub fn start(
        config: &RolloutConfig,
        dataset: Option<&DatasetConfig>,
        (seed, state_file): (u64, Option<PathBuf>),
        engine: Arc<dyn Engine>,
        store: Store,
        routes: Arc<Routes>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, RolloutError> {
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        rng.set_stream(store.stats()?.samples);
        let dataset = dataset
            .filter(|_| config.enabled)
            .map(|dataset| {
                DatasetPrompts::load(dataset, &config.dataset_route, &routes, state_file)
            })
            .transpose()?;
        let is_graded = |group: &Group| {
            let route = routes.get(&group.route).filter(|_| !group.is_correction());
            route.is_some_and(|route| group.parts.iter().any(|part| !route.takes_feedback(part)))
        };
        let waiting = store.ready_groups(usize::MAX)?.into_iter().filter(is_graded);
        let waiting = waiting.map(|group| (group.id, group.members.len())).collect();
        let context = Arc::new(RolloutContext {
            queue: PromptQueue::new(config.queue),
            config: config.clone(),
            engine,
            store,
            routes,
            metrics,
            reserved: Mutex::default(),
            grouping: tokio::sync::Mutex::default(),
            in_flight: AtomicUsize::new(0),
            waiting: Mutex::new(waiting),
            prompt_rewards: Mutex::default(),
            progress: Mutex::default(),
            wake_scheduler: Notify::new(),
            wake_sweep: Notify::new(),
            stop: watch::channel(false).0,
        });
        let mut tasks = vec![tokio::spawn(feedback::run(Arc::clone(&context)))];
        if config.enabled {
            tasks.push(tokio::spawn(scheduler::run(Arc::clone(&context), dataset, rng)));
        }
        Ok(Self { context, tasks: Arc::new(Mutex::new(tasks)) })
    }

    /// Submits a served interaction for a group. Never waits. A prompt that gets no group is
    /// counted with the reason, and so is a completion that is left out of the group.
    pub fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        let context = &self.context;
        if context.is_stopping() {
            return context.count_skipped("stopping");
        }
        if !context.config.enabled {
            return context.count_skipped("disabled");
        }
        if interaction.held_out {
            return context.count_skipped("held_out");
        }
        let route = context.routes.get(&interaction.route).filter(|route| route.has_graders());
        let Some(route) = route.cloned() else { return context.count_skipped("route_unscored") };
        let comparable = shadow::comparable(context, &interaction);
        let mut job = PromptJob::live(interaction, served, route);
        let left_out = job.leave_out(|sample| !is_member(sample));
        context.count_left_out("untrainable", left_out);
        let left_out = job.leave_out(|_| !comparable);
        context.count_left_out("settings", left_out);
        // Before the push, after which the scheduler may take and finish the job at any moment.
        context.reserve_feedback(&job.reserved, job.completed + context.config.feedback_wait_ms);
        match context.queue.push(job) {
            Ok(length) => {
                context.report_queue(length);
                context.wake_scheduler.notify_one();
            }
            Err(job) => {
                context.release_feedback(&job.reserved);
                // The reason shows whether sampling or training is the bottleneck.
                let sampling = context.can_start_group();
                context.count_skipped(if sampling { "queue_full" } else { "backlog" });
            }
        }
    }

    /// The groups since the start.
    pub fn progress(&self) -> RolloutProgress {
        self.context.progress().clone()
    }

    /// Stops sampling, commits complete groups and returns within seconds. Waiting prompts are
    /// dropped; their feedback stays in the ledger for the next start.
    pub async fn stop(&self) {
        self.context.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let deadline = Instant::now() + STOP_TIMEOUT;
        for mut task in tasks {
            if timeout_at(deadline, &mut task).await.is_err() {
                tracing::warn!("a rollout task did not stop in time");
                task.abort();
            }
        }
    }
}

/// Whether a served completion may be a member of its prompt's group. A cancelled one may not: a
/// grader would judge it as if it had ended there.
fn is_member(sample: &Sample) -> bool {
    sample.untrainable.is_none() && sample.finish != FinishReason::Cancelled
}
