//! The trainer's thread, which turns ready groups in the ledger into served policy versions.
//!
//! The thread `hone-train` runs `Trainer::run`: it handles all commands, then makes one turn of the
//! state machine `Trainer::tick`, and sleeps if nothing follows. Groups that became ready, an operator's
//! activation, a command of a [`TrainHandle`], the end of a publication, or `POLL_INTERVAL` wake it. It
//! follows an activation once no other came for a quarter of a second, or before the next step: each
//! return to a version reads and writes a whole checkpoint. The life of a step (`Trainer::step`):
//!
//! 1. *Batch*: the oldest ready groups, whose rewards become *advantages*.
//! 2. *Forward and backward* passes, and the *optimizer* updates the adapter.
//! 3. *Wait* for the previous step's publication. If that version is not served, the step is undone
//!    and its groups stay ready.
//! 4. *Record*: a checkpoint, then the ledger's step record, which marks the groups as trained.
//! 5. *Propose* the weights as a version: a thread `hone-publish` writes it, loads it into the engine,
//!    probes and activates it, while this thread computes the next step.
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

mod offline;
mod progress;
mod publication;
mod report;
mod restore;
mod trainer;
mod worker;

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rayon::ThreadPool;
use tokio::sync::oneshot;

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_core::types::PolicyVersion;
use hone_engine::{EngineError, ModelDir};
use hone_model::Model;
use hone_model::device::DeviceBase;
use hone_reward::Routes;
use hone_store::{Store, StoreError};

use crate::config::TrainConfig;
use crate::error::LearnError;
use crate::policy::{Policies, PolicyConfig, PolicyError};

pub use offline::{OfflineSetup, OfflineTrainer};
pub use report::{TrainState, TrainStatus};
pub use worker::{TrainHandle, TrainHold, TrainWorker};

/// Everything that the trainer's thread needs.
pub struct TrainSetup {
    /// The keys of `[train]`.
    pub config: TrainConfig,
    /// The keys of `[policy]` that decide when a version is published and when training pauses.
    pub policy: PolicyConfig,
    /// The last step to take until [`TrainHandle::set_step_limit`] changes it; `None` is no limit.
    pub step_limit: Option<u64>,
    /// Peak learning rates of a curriculum: `(first step, rate)` in ascending order, steps counted
    /// from 1. `train.learning_rate` applies before the first entry.
    pub peak_rates: Vec<(u64, f64)>,
    /// Token limit of a completion, the divisor of the `dr_grpo` loss.
    pub max_completion_tokens: usize,
    /// The base model's directory.
    pub model: ModelDir,
    /// The base on the GPU that computes the passes of steps; `None` is the processor.
    pub device: Option<DeviceBase>,
    /// Tokens of the longest sample, and shard, of a step: `MemoryPlanner::longest_sample`.
    pub longest_sample: usize,
    /// Whether a publication loads a copy of the weights, so that a step with a long shard waits for its end.
    pub stages_weights: bool,
    /// Whether no client's request runs or waits, for `train.when = "idle"`.
    pub is_idle: Arc<dyn Fn() -> bool + Send + Sync>,
    /// The base model's weights if they are already loaded, so that they are not loaded twice.
    pub base: Option<Model>,
    /// The base model's name, written to `base_model_name_or_path` of each adapter.
    pub model_name: String,
    /// The directory that holds the checkpoints.
    pub checkpoints: PathBuf,
    /// The ledger, source of ready groups and destination of step records.
    pub store: Store,
    /// The routes, which define the weight of each reward part.
    pub routes: Arc<Routes>,
    /// The registry that new versions are published to.
    pub policies: Arc<Policies>,
    /// The process's Prometheus metrics.
    pub metrics: Arc<Metrics>,
}

impl TrainSetup {
    /// The peak learning rate of the schedule at `step`, counted from 1, for a model with so many parameters.
    fn peak_rate(&self, step: u64, parameters: usize) -> f64 {
        let stage = self.peak_rates.iter().rev().find(|(first, _)| *first <= step);
        stage.map_or_else(|| self.config.learning_rate.of(parameters), |(_, rate)| *rate)
    }
}

/// The thread pools of the trainer. Usually only one of them is busy.
struct ThreadPools {
    train: ThreadPool,
    /// Scores the parity probe of a publication, which must not wait for the next step.
    probe: Arc<ThreadPool>,
}

impl ThreadPools {
    /// Two pools of `threads` threads each; 0 is one per core.
    fn new(threads: usize) -> Result<Self, TrainFailure> {
        let pool = |name: &'static str| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |i| format!("hone-{name}-{i}"))
                .start_handler(|_| to_background())
                .build()
                .map_err(|error| {
                    TrainFailure::Thread(format!("its threads cannot be started: {error}"))
                })
        };
        Ok(Self { train: pool("train")?, probe: Arc::new(pool("probe")?) })
    }
}

/// Why the trainer's thread cannot start, or must restart from its checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum TrainFailure {
    /// The learner failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A version cannot be listed, read or published.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thread or its pool cannot be started, or the trainer or a publication panicked.
    #[error("{0}")]
    Thread(String),
}

impl TrainFailure {
    fn of_start(error: &io::Error) -> Self {
        Self::Thread(format!("a thread of the trainer cannot be started: {error}"))
    }

    fn from_panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Self::Thread(format!("panic: {}", text.as_deref().unwrap_or("unknown")))
    }
}

/// Why a call of a [`TrainHandle`] failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrainError {
    /// Training is switched off.
    #[error("training is disabled (`train.enabled = false`)")]
    Disabled,
    /// A step was requested, but no group is ready.
    #[error("no group is ready to train on")]
    NothingReady,
    /// A step was requested while a canary is served, whose end decides from where training continues.
    #[error("version {0} is a canary: no step can be taken before its end")]
    CanaryRunning(PolicyVersion),
    /// The trainer's thread has ended.
    #[error("the trainer has stopped")]
    Stopped,
    /// The trainer failed; it restarts from its checkpoint.
    #[error(transparent)]
    Failed(Arc<TrainFailure>),
}

impl TrainError {
    /// Whether the engine no longer takes requests because the process ends, which is no failure.
    fn is_end_of_engine(&self) -> bool {
        let Self::Failed(failure) = self else { return false };
        matches!(&**failure, TrainFailure::Policy(PolicyError::Engine(EngineError::ShuttingDown)))
    }
}

impl<E: Into<TrainFailure>> From<E> for TrainError {
    fn from(error: E) -> Self {
        Self::Failed(Arc::new(error.into()))
    }
}

// Commands to the trainer's thread, and the conditions under which it takes no step on its own.

/// Receives the status after a requested step.
type StepReply = oneshot::Sender<Result<TrainStatus, TrainError>>;

/// A message to the trainer's thread.
enum TrainCommand {
    /// Stop stepping until [`Self::Resume`].
    Pause,
    /// Undo [`Self::Pause`].
    Resume,
    /// Stop stepping after this step; `None` removes the limit.
    SetStepLimit(Option<u64>),
    /// Halve the learning rate so often, until this changes or [`Self::Resume`].
    LowerRate(u32),
    /// Take one step now, even if paused.
    Step(StepReply),
    /// Write nothing until the receiver's sender is dropped; the reply says that this has begun.
    Hold(oneshot::Sender<()>, Receiver<()>),
    /// Look for ready groups and rollbacks now.
    Wake,
    /// End the thread after the current step.
    Stop,
}

/// Decides whether the trainer may take a step on its own. Outlives restarts of the trainer.
#[derive(Clone, Copy, Debug, Default)]
struct StepGate {
    paused: bool,
    /// Whether a resume has come that the trainer has not taken yet. It ends a hold too.
    resumed: bool,
    step_limit: Option<u64>,
}

impl StepGate {
    /// Applies a command that changes the gate; returns any other command.
    fn apply(&mut self, command: TrainCommand) -> Option<TrainCommand> {
        match command {
            TrainCommand::Pause => self.paused = true,
            TrainCommand::Resume => (self.paused, self.resumed) = (false, true),
            TrainCommand::SetStepLimit(limit) => self.step_limit = limit,
            TrainCommand::Hold(begun, end) => hold(begun, &end),
            other => return Some(other),
        }
        None
    }

    fn is_closed(&self, step: u64) -> bool {
        self.paused || self.step_limit.is_some_and(|limit| step >= limit)
    }
}

/// Longest hold: whoever asked for it must not stop training.
const LONGEST_HOLD: Duration = Duration::from_secs(60);

fn hold(begun: oneshot::Sender<()>, end: &Receiver<()>) {
    // Fails only if the caller no longer waits.
    if begun.send(()).is_ok() {
        let _ended = end.recv_timeout(LONGEST_HOLD);
    }
}
