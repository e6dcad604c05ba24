//! Starts and stops the tasks, and accepts served prompts.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use parking_lot::Mutex;
use rand::SeedableRng;
use rand_chacha::ChaCha12Rng;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use hone_core::metrics::Metrics;
use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, Interaction, Sample, SampleId, now_ms,
};
use hone_dataset::DatasetConfig;
use hone_engine::Engine;
use hone_reward::{Routes, record};
use hone_store::{MERGED, Op, Store, StoreError};

use crate::config::RolloutConfig;
use crate::context::{PromptJob, RolloutContext, RolloutProgress};
use crate::dataset::{DatasetPrompts, RolloutError};
use crate::scheduler;
use crate::siblings::{RatedSample, Regrouping};

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
    /// Each start uses another stream of `seed`, chosen by the number of samples in the ledger, so that a
    /// restart repeats no sample. `state_file` keeps the position in the dataset. `config` is one for the
    /// trainer's steps ([`RolloutConfig::for_steps_of`]): with a limit of 0 ready groups, no group starts.
    ///
    /// # Errors
    /// If the dataset or its route (names the line or the key) or the ledger cannot be used.
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
            queue: Mutex::default(),
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
        let mut tasks = vec![tokio::spawn(run(Arc::clone(&context)))];
        if config.enabled {
            tasks.push(tokio::spawn(scheduler::run(Arc::clone(&context), dataset, rng)));
        }
        Ok(Self { context, tasks: Arc::new(Mutex::new(tasks)) })
    }

    /// Submits a served interaction for a group. Never waits. What gets no group is counted with the reason.
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
        let route = context.routes.get(&interaction.route).filter(|route| route.scores_shadows());
        let Some(route) = route.cloned() else { return context.count_skipped("route_unscored") };
        let comparable = scheduler::comparable(context, &interaction);
        let mut job = PromptJob::live(interaction, served, route);
        let left_out = job.leave_out(|sample| !is_member(sample));
        context.count_left_out("untrainable", left_out);
        let left_out = job.leave_out(|_| !comparable);
        context.count_left_out("settings", left_out);
        // Before the push, after which the scheduler may take and finish the job at any moment.
        context.reserve_feedback(&job.reserved, job.completed + context.config.feedback_wait_ms);
        let mut waiting = context.queue.lock();
        if waiting.len() < context.config.queue {
            waiting.push_back(job);
            drop(waiting);
            context.report_queue();
            context.wake_scheduler.notify_one();
        } else {
            drop(waiting);
            context.release_feedback(&job.reserved);
            // The reason shows whether sampling or training is the bottleneck.
            let sampling = context.can_start_group();
            context.count_skipped(if sampling { "queue_full" } else { "backlog" });
        }
    }

    /// The groups since the start.
    pub fn progress(&self) -> RolloutProgress {
        self.context.progress.lock().clone()
    }

    /// Stops sampling and commits complete groups, within seconds. Feedback stays in the ledger for the next
    /// start.
    pub async fn stop(&self) {
        self.context.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        let deadline = Instant::now() + STOP_TIMEOUT;
        for mut task in tasks {
            if timeout_at(deadline, &mut task).await.is_err() {
                tracing::warn!("a rollout task did not stop in time");
                task.abort();
            }
        }
    }
}

/// Whether a served completion may be a member. A grader would judge a cancelled one as if it had ended there.
fn is_member(sample: &Sample) -> bool {
    sample.untrainable.is_none() && sample.finish != FinishReason::Cancelled
}

// The feedback sweep: feedback that no other group uses becomes groups of rated completions of one prompt.
// This is all feedback on routes without graders, what arrived after its group was committed, and what a
// crash left over.

/// Longest time between two sweeps, because reservations expire without a wake-up.
const TICK: Duration = Duration::from_millis(500);
/// Ledger rows read at once. More than can be reserved by the queue and the groups in flight.
const ROWS: usize = 4096;
/// Completions grouped in one commit.
const BATCH: usize = 256;

/// Runs until [`crate::Rollout::stop`].
pub(super) async fn run(context: Arc<RolloutContext>) {
    let mut changes = context.store.watch_feedback();
    loop {
        changes.mark_unchanged();
        match sweep(&context).await {
            Ok(()) => {}
            Err(StoreError::Closed) => return,
            Err(error) => tracing::warn!(%error, "feedback stays ungrouped in the ledger"),
        }
        tokio::select! {
            biased;
            () = context.stopped() => return,
            changed = changes.changed() => if changed.is_err() { return },
            () = context.wake_sweep.notified() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// Groups all ungrouped feedback that is not reserved.
async fn sweep(context: &RolloutContext) -> Result<(), StoreError> {
    // Ensures that the sweep ends even if a commit does not clear a row.
    let mut seen = HashSet::new();
    while !context.is_stopping() {
        let _grouping = context.grouping.lock().await;
        let rows = context.store.ungrouped_feedback(now_ms(), ROWS)?;
        let mut open: BTreeMap<SampleId, Vec<String>> = BTreeMap::new();
        for (sample, part) in rows {
            let full = open.len() == BATCH && !open.contains_key(&sample);
            if !full && !context.is_reserved(sample) && !seen.contains(&(sample, part.clone())) {
                open.entry(sample).or_default().push(part);
            }
        }
        if open.is_empty() {
            return Ok(());
        }
        let (mut rated, mut dropped) = (Vec::new(), Vec::new());
        for (id, parts) in open {
            seen.extend(parts.iter().map(|part| (id, part.clone())));
            match context.store.sample(id)? {
                Some(sample) => rated.extend(usable(context, sample, parts, &mut dropped)?),
                None => tracing::warn!(sample = %id, "feedback on a sample that is not recorded"),
            }
        }
        let Regrouping { groups, merged } = Regrouping::of(context, &rated)?;
        let formed = groups.len().saturating_sub(merged.len());
        let skipped: Vec<GroupState> = dropped.iter().map(|group| group.state.clone()).collect();
        let merge = |id| Op::GroupState(id, GroupState::Dropped(MERGED.to_owned()));
        let mut ops: Vec<Op> =
            groups.into_iter().chain(dropped).map(|group| Op::Group(Box::new(group))).collect();
        // Last: members of a group that the trainer used meanwhile leave the new group.
        ops.extend(merged.into_iter().map(merge));
        context.store.commit(ops).await?;
        context.metrics.rollout_groups.with_label_values(&["feedback"]).inc_by(formed as u64);
        for state in skipped {
            if let GroupState::Dropped(reason) = state {
                context.count_skipped(&reason);
            }
        }
        for RatedSample { sample, route, parts, .. } in &rated {
            let rewards = context.store.rewards_of(sample.id)?;
            for reward in rewards.iter().filter(|reward| parts.contains(&reward.name)) {
                record(&context.metrics, &route.name, &reward.name, [reward.value]);
            }
        }
    }
    Ok(())
}

/// The completion with the parts that the route learns from. A group of its other parts is added to `dropped`.
fn usable(
    context: &RolloutContext,
    sample: Sample,
    parts: Vec<String>,
    dropped: &mut Vec<Group>,
) -> Result<Option<RatedSample>, StoreError> {
    let interaction = context.store.interaction(sample.interaction)?;
    let route_name = interaction.as_ref().map(|i| i.route.clone()).unwrap_or_default();
    let route = context.routes.get(&route_name).cloned();
    let mut drop = |parts, reason: &str| {
        dropped.push(Group {
            id: GroupId::new(),
            interaction: sample.interaction,
            route: route_name.clone(),
            members: vec![sample.id],
            parts,
            oldest_version: sample.version,
            created: now_ms(),
            state: GroupState::Dropped(reason.to_owned()),
        });
    };
    let (Some(interaction), Some(route)) = (interaction, route) else {
        drop(parts, if route_name.is_empty() { "no_route" } else { "unknown_route" });
        return Ok(None);
    };
    let untrainable = interaction.held_out.then_some("held_out").or(sample.untrainable.as_deref());
    if let Some(reason) = untrainable {
        drop(parts, reason);
        return Ok(None);
    }
    let (parts, unknown): (Vec<String>, Vec<String>) =
        parts.into_iter().partition(|part| route.takes_feedback(part));
    if !unknown.is_empty() {
        drop(unknown, "unknown_part");
    }
    let has_parts = !parts.is_empty();
    Ok(has_parts.then_some(RatedSample { sample, interaction, route, parts }))
}
