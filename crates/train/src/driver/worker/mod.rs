//! The trainer's thread: started, stopped, and restarted from its checkpoint with back-off after a
//! panic or an error. Serving never notices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;
use hone_engine::ModelDir;
use hone_model::Model;
use hone_reward::Routes;
use hone_store::Store;

use super::handle::{StatusCell, StepGate, TrainCommand, TrainError, TrainHandle, TrainState};
use super::trainer::Trainer;
use crate::config::TrainConfig;
use crate::policy::Policies;

const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Everything the worker needs.
pub struct TrainSetup {
    /// How to train.
    pub config: TrainConfig,
    /// Optimiser steps between versions.
    pub publish_every: u64,
    /// Takes no step beyond this one until [`TrainHandle::until`] says otherwise.
    pub until: Option<u64>,
    /// Peak learning rates of a curriculum: `(first step from 1, rate)`, in order. Before the first
    /// of them, and without any, the configuration's holds.
    pub peak_rates: Vec<(u64, f64)>,
    /// Token limit of completions, for the `dr_grpo` normaliser.
    pub max_completion_tokens: usize,
    /// The base model.
    pub model: ModelDir,
    /// Its weights, where somebody has loaded them already.
    pub base: Option<Model>,
    /// Its name, for the adapters' `base_model_name_or_path`.
    pub model_name: String,
    /// Where checkpoints go.
    pub checkpoints: PathBuf,
    /// The ledger.
    pub store: Store,
    /// The parts' weights.
    pub routes: Arc<Routes>,
    /// Where versions go.
    pub policies: Arc<Policies>,
    /// Where figures go.
    pub metrics: Arc<Metrics>,
}

/// The trainer's threads, of which one set or the other computes most of the time.
pub(crate) struct Pools {
    /// For steps.
    pub(crate) train: rayon::ThreadPool,
    /// For scoring a publication's probe during one.
    pub(crate) probe: Arc<rayon::ThreadPool>,
}

/// The running worker.
pub struct TrainWorker {
    handle: TrainHandle,
    thread: Option<JoinHandle<()>>,
}

impl TrainWorker {
    /// Starts the worker's thread. Call it on the async runtime, whose tasks wake it.
    ///
    /// # Errors
    /// If the thread or its pool cannot be started.
    pub fn start(parts: TrainSetup) -> Result<Self, TrainError> {
        let metrics = parts.metrics.clone();
        if !parts.config.enabled {
            return Ok(Self { handle: TrainHandle::disabled(metrics), thread: None });
        }
        let board = StatusCell::new(TrainState::Waiting, metrics);
        // What is true already while the worker's thread still loads the model.
        let last = parts.store.last_step().map_err(|e| TrainError::Failed(e.to_string()))?;
        board.update(|status| {
            status.policy_version = parts.policies.active().0;
            if let Some(last) = last {
                status.step = last.step;
                status.metrics = last.metrics;
            }
        });
        let (sender, commands) = channel();
        let handle = TrainHandle::new(board.clone(), Some(sender.clone()));
        let mut ready = parts.store.watch_ready();
        let mut rollback = parts.policies.watch_rollback();
        tokio::spawn(async move {
            loop {
                let changed = tokio::select! {
                    changed = ready.changed() => changed,
                    changed = rollback.changed() => changed,
                };
                if changed.is_err() || sender.send(TrainCommand::Wake).is_err() {
                    break;
                }
            }
        });
        let pool = |name: &'static str| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(parts.config.threads)
                .thread_name(move |i| format!("hone-{name}-{i}"))
                .start_handler(|_| to_background())
                .build()
                .map_err(|error| TrainError::Failed(format!("train.threads: {error}")))
        };
        let pools = Pools { train: pool("train")?, probe: Arc::new(pool("probe")?) };
        let runtime = Handle::current();
        let thread = std::thread::Builder::new()
            .name("hone-train".to_owned())
            .spawn(move || {
                to_background();
                supervise(&parts, &commands, &board, &runtime, &pools);
            })
            .map_err(|error| TrainError::Failed(format!("the trainer's thread: {error}")))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// The handle that others hold.
    pub fn handle(&self) -> TrainHandle {
        self.handle.clone()
    }

    /// Ends the worker after the step in hand, waiting for at most `patience`; its checkpoint
    /// makes it safe to stop waiting.
    pub async fn stop(self, patience: Duration) {
        self.handle.stop();
        let Some(thread) = self.thread else { return };
        let joined = tokio::task::spawn_blocking(move || thread.join());
        match tokio::time::timeout(patience, joined).await {
            Ok(Ok(Ok(()))) => {}
            Ok(_) => tracing::error!("the trainer ended with a panic"),
            Err(_) => tracing::warn!("the trainer is still in its step, leaving it behind"),
        }
    }
}

/// Runs the worker until it is told to stop, restarting it after errors and panics.
fn supervise(
    parts: &TrainSetup,
    commands: &Receiver<TrainCommand>,
    board: &StatusCell,
    runtime: &Handle,
    pools: &Pools,
) {
    let mut backoff = Duration::from_secs(1);
    let mut hold = StepGate { until: parts.until, ..StepGate::default() };
    loop {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            Trainer::restore(parts, board, runtime, pools)
                .and_then(|mut trainer| trainer.run(commands, &mut hold))
        }));
        let error = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("panic: {}", panic_message(&*panic)),
        };
        if started.elapsed() > MAX_BACKOFF {
            backoff = Duration::from_secs(1);
        }
        tracing::error!(
            error,
            backoff_s = backoff.as_secs(),
            "trainer failed, restarting from its checkpoint"
        );
        board.update(|s| {
            s.last_error = Some(error.clone());
            s.restarts += 1;
        });
        board.state(TrainState::Failed);
        parts.metrics.train.restarts.inc();
        if !wait_out(commands, backoff, &mut hold, &error) {
            return;
        }
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Answers commands while backing off; false when told to stop.
fn wait_out(
    commands: &Receiver<TrainCommand>,
    backoff: Duration,
    hold: &mut StepGate,
    error: &str,
) -> bool {
    let until = Instant::now() + backoff;
    loop {
        let command = commands.recv_timeout(until.saturating_duration_since(Instant::now()));
        match command.map(|command| hold.follow(command)) {
            Ok(Some(TrainCommand::Step(reply))) => {
                // A caller that has gone away needs no answer.
                let _gone = reply.send(Err(TrainError::Failed(error.to_owned())));
            }
            Ok(Some(TrainCommand::Stop)) | Err(RecvTimeoutError::Disconnected) => return false,
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return true,
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests;
