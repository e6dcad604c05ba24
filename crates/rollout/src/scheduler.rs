//! Starts groups while the trainer's backlog is below its limit and a sampling slot is free.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::RngCore;
use rand_chacha::ChaCha12Rng;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinSet};

use hone_core::types::{
    FinishReason, Interaction, Sample, SampleId, SampleOrigin, SamplingParams, now_ms,
};
use hone_engine::{Completion, EngineError, GenerateRequest, Priority, TokenRecords};

use crate::context::{PromptJob, RolloutContext, expired};
use crate::dataset::DatasetPrompts;
use crate::group_commit;

/// Longest time between two looks at the queue, because jobs expire without a wake-up.
const TICK: Duration = Duration::from_secs(1);

/// Versions by which a served completion may be older. The rest of `train.max_staleness` is for the wait.
const MAX_SERVED_LAG: u64 = 4;

/// Longest time for which a group in flight reserves the feedback on its served completions.
const RESERVE_MS: u64 = 30_000;

/// A group between its first shadow and its commit. Its end, even by a panic, releases its feedback.
struct GroupInFlight {
    context: Arc<RolloutContext>,
    reserved: Vec<SampleId>,
}

impl GroupInFlight {
    fn new(context: &Arc<RolloutContext>, job: &PromptJob) -> Self {
        context.in_flight.fetch_add(1, Ordering::AcqRel);
        context.metrics.rollout_in_flight.inc();
        let until = job.completed + context.config.feedback_wait_ms;
        context.reserve_feedback(&job.reserved, until.max(now_ms() + RESERVE_MS));
        Self { context: Arc::clone(context), reserved: job.reserved.clone() }
    }
}

impl Drop for GroupInFlight {
    fn drop(&mut self) {
        self.context.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.context.metrics.rollout_in_flight.dec();
        self.context.release_feedback(&self.reserved);
        self.context.wake_scheduler.notify_one();
    }
}

/// Runs until [`crate::Rollout::stop`], then waits for the groups in flight.
pub(super) async fn run(
    context: Arc<RolloutContext>,
    dataset: Option<DatasetPrompts>,
    rng: ChaCha12Rng,
) {
    let slots = context.engine.info().slots.clamp(1, Semaphore::MAX_PERMITS);
    let slots = Arc::new(Semaphore::new(slots));
    let mut scheduler = GroupScheduler { context, dataset, rng, slots };
    let mut groups = JoinSet::new();
    while let Some(()) = scheduler.start_group(&mut groups).await {
        while let Some(result) = groups.try_join_next() {
            log_panic(result);
        }
    }
    let GroupScheduler { context, dataset, .. } = scheduler;
    let waiting = std::mem::take(&mut *context.queue.lock());
    for job in waiting {
        context.release_feedback(&job.reserved);
        context.count_skipped("stopping");
    }
    context.report_queue();
    while let Some(result) = groups.join_next().await {
        log_panic(result);
    }
    if let Some(mut dataset) = dataset {
        dataset.save();
    }
}

fn log_panic(result: Result<(), JoinError>) {
    // A task is cancelled only when its runtime ends, which the cause of that end reports.
    if let Err(error) = result
        && error.is_panic()
    {
        tracing::error!(%error, "a group was lost");
    }
}

struct GroupScheduler {
    context: Arc<RolloutContext>,
    dataset: Option<DatasetPrompts>,
    rng: ChaCha12Rng,
    slots: Arc<Semaphore>,
}

impl GroupScheduler {
    /// Starts one group; `None` when rollout stops. Waits for a slot before it takes the newest prompt.
    async fn start_group(&mut self, groups: &mut JoinSet<()>) -> Option<()> {
        let slot = self.acquire_slot().await?;
        let mut job = self.next_job().await?;
        let in_flight = GroupInFlight::new(&self.context, &job);
        let (active, lineage) =
            (self.context.engine.active_version(), self.context.store.lineage());
        // A canary's answer is left out too: its withdrawal would make the whole group useless.
        let is_recent =
            |version| lineage.age(active, version).is_some_and(|age| age <= MAX_SERVED_LAG);
        let served = job.served.len();
        job.served.retain(|sample| is_recent(sample.version));
        self.context.count_left_out("version", served - job.served.len());
        let wanted = self.context.config.group_size.saturating_sub(job.served.len());
        let shadows = self.start_shadows(&job, wanted, slot).await?;
        let context = Arc::clone(&self.context);
        groups.spawn(async move {
            group_commit::run(&context, job, shadows, wanted).await;
            drop(in_flight);
        });
        Some(())
    }

    async fn acquire_slot(&self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            biased;
            () = self.context.stopped() => None,
            permit = Arc::clone(&self.slots).acquire_owned() => permit.ok(),
        }
    }

    async fn start_shadows(
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
                None => self.acquire_slot().await?,
            };
            let seed = self.rng.next_u64();
            let (context, interaction) = (Arc::clone(&self.context), Arc::clone(&job.interaction));
            shadows.spawn(async move {
                let sampled = sample(&context, &interaction, seed).await;
                drop(slot);
                sampled
            });
        }
        Some(shadows)
    }

    /// Waits until a group may start and there is a prompt: live, or of the dataset, by
    /// `dataset.mix.live_share`.
    async fn next_job(&mut self) -> Option<PromptJob> {
        let context = Arc::clone(&self.context);
        let mut ready = context.store.watch_ready();
        loop {
            if context.is_stopping() {
                return None;
            }
            let old = expired(&mut context.queue.lock(), now_ms());
            for job in old {
                context.release_feedback(&job.reserved);
                context.count_skipped("expired");
            }
            ready.mark_unchanged();
            if context.can_start_group() {
                let live_waits = !context.queue.lock().is_empty();
                let dataset = self.dataset.as_mut();
                let live = dataset.is_none_or(|dataset| dataset.takes_live(live_waits));
                let job = if live { context.queue.lock().pop_back() } else { None };
                let from_dataset = || self.dataset.as_mut()?.next_job(&context);
                // The model may be unable to take any of the dataset's prompts.
                let job = job.or_else(from_dataset).or_else(|| context.queue.lock().pop_back());
                context.report_queue();
                if job.is_some() {
                    return job;
                }
            }
            tokio::select! {
                () = context.stopped() => return None,
                changed = ready.changed() => changed.ok()?,
                () = context.wake_scheduler.notified() => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }
}

// Samples one shadow completion in spare capacity.

/// Pause after the first unsuccessful attempt. It doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Failed attempts after which a sample is abandoned. Preemption is not a failure.
const MAX_FAILURES: u32 = 4;
/// Pause after a sample is abandoned, which keeps a broken engine from causing a busy loop.
const ABANDONED_PAUSE: Duration = Duration::from_millis(500);

/// Samples a completion; `None` if the engine fails or rollout stops.
async fn sample(context: &RolloutContext, interaction: &Interaction, seed: u64) -> Option<Sample> {
    let params = params(context, interaction, seed);
    tokio::select! {
        biased;
        () = context.stopped() => None,
        completion = complete(context, interaction, &params) => {
            Some(record(interaction, params, completion?))
        }
    }
}

/// Temperature sampling without truncation or penalties, because the trainer's distribution is
/// `softmax(logits / temperature)`. The client's temperature applies to [`comparable`] prompts, and its token limit
/// if that is lower. Where a completion may end is always the client's.
fn params(context: &RolloutContext, interaction: &Interaction, seed: u64) -> SamplingParams {
    let config = &context.config;
    let asked = &interaction.params;
    let is_comparable = comparable(context, interaction);
    SamplingParams {
        temperature: if is_comparable { asked.temperature } else { config.temperature },
        seed,
        max_tokens: config.max_tokens.min(token_limit(context, interaction)),
        ..SamplingParams::default()
    }
    .ending_as(asked)
}

/// The token limit of the client's completions.
fn token_limit(context: &RolloutContext, interaction: &Interaction) -> u32 {
    let free = context.engine.info().context.saturating_sub(interaction.prompt_ids.len());
    interaction.params.max_tokens.min(u32::try_from(free).unwrap_or(u32::MAX))
}

/// Whether shadows can be sampled as the client's completions, so that rewards of both can be compared: the
/// settings are trainable and do not truncate, and `rollout.max_tokens` permits the client's token limit.
pub(super) fn comparable(context: &RolloutContext, interaction: &Interaction) -> bool {
    let asked = &interaction.params;
    asked.untrainable_reason().is_none()
        && !asked.truncates()
        && token_limit(context, interaction) <= context.config.max_tokens
}

/// Repeats the request with the same seed until it succeeds or fails permanently.
async fn complete(
    context: &RolloutContext,
    interaction: &Interaction,
    params: &SamplingParams,
) -> Option<Completion> {
    let mut failures = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        match generate(context, interaction, params).await {
            Ok(completion) => return Some(completion),
            Err(EngineError::Preempted | EngineError::Overloaded { .. }) => {}
            Err(error) => {
                failures += 1;
                let id = interaction.id;
                tracing::warn!(%error, interaction = %id, failures, "a shadow sample failed");
                let transient = matches!(error, EngineError::Internal(_) | EngineError::Sample(_))
                    && !error.is_of_grammar();
                if !transient || failures >= MAX_FAILURES {
                    tokio::time::sleep(ABANDONED_PAUSE).await;
                    return None;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

async fn generate(
    context: &RolloutContext,
    interaction: &Interaction,
    params: &SamplingParams,
) -> Result<Completion, EngineError> {
    let grammar = match &interaction.grammar {
        Some(spec) => Some(context.engine.codec().compile_grammar(spec).await?),
        None => None,
    };
    let request =
        GenerateRequest::new(interaction.prompt_ids.clone(), params.clone(), Priority::Shadow);
    let request = GenerateRequest { stop: interaction.stop.clone(), grammar, ..request };
    context.engine.generate(request).await?.collect().await
}

fn record(interaction: &Interaction, params: SamplingParams, completion: Completion) -> Sample {
    let untrainable = if completion.finish == FinishReason::Cancelled {
        Some("cancelled")
    } else if completion.tokens.is_empty() {
        Some("empty")
    } else {
        params.untrainable_reason()
    };
    let tokens: TokenRecords = completion.tokens.iter().collect();
    Sample {
        kept: tokens.kept(),
        ids: tokens.ids,
        logprobs: tokens.logprobs,
        forced: tokens.forced,
        text: completion.text,
        finish: completion.finish,
        params,
        untrainable: untrainable.map(str::to_owned),
        ..Sample::new(interaction.id, SampleOrigin::Shadow, completion.version)
    }
}
