//! The trainer's thread: start, stop, and restart from the checkpoint after an error or a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use hone_core::metrics::Metrics;
use hone_core::threads::to_background;

use super::progress::AttemptMarker;
use super::report::{StatusCell, TrainState, TrainStatus};
use super::trainer::Trainer;
use super::{StepGate, ThreadPools, TrainCommand, TrainError, TrainFailure, TrainSetup};

/// Waits between restarts double from the first to the second.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// How often [`TrainWorker::stop`] looks whether the thread has ended.
const STOP_INTERVAL: Duration = Duration::from_millis(5);

/// Most optimizer steps between sampling and training, of a graded group and of a rating without the weight of late
/// feedback: twice what 8 versions of 4 steps are. The clipped ratio degrades with the distance of the policies, which
/// grows with steps, whatever a version has of them.
const MAX_STALE_STEPS: u64 = 64;

/// `train.max_staleness` in versions, as far as they have [`MAX_STALE_STEPS`] together. Two versions always count: samples
/// of the active version are that old while the next one is published and another step is taken.
fn staleness_limit(versions: u64, publish_every: u64) -> u64 {
    versions.min((MAX_STALE_STEPS / publish_every.max(1)).max(2))
}

/// Owner of the trainer's thread.
pub struct TrainWorker {
    handle: TrainHandle,
    /// Marks the step that is being computed.
    marker: AttemptMarker,
    /// `None` if training is disabled.
    thread: Option<JoinHandle<()>>,
}

impl TrainWorker {
    /// Starts the trainer's thread, which then loads the model. Must be called on the Tokio runtime,
    /// which runs the task that wakes the thread.
    ///
    /// # Errors
    /// If the ledger cannot be read, or the thread or its pools cannot be started.
    pub fn start(mut setup: TrainSetup) -> Result<Self, TrainFailure> {
        setup.config.max_staleness =
            staleness_limit(setup.config.max_staleness, setup.policy.publish_every);
        let metrics = setup.metrics.clone();
        let marker = AttemptMarker::new(&setup.checkpoints);
        if !setup.config.enabled {
            return Ok(Self { handle: TrainHandle::disabled(metrics), marker, thread: None });
        }
        let status = StatusCell::new(TrainState::Waiting, metrics);
        // The ledger's last step, as long as the model is being loaded.
        let last_step = setup.store.last_step()?;
        status.update(|status| {
            status.policy_version = setup.policies.active().0;
            if let Some(last) = last_step {
                status.step = last.step;
                status.metrics = last.metrics;
            }
        });
        let (sender, commands) = channel();
        let handle = TrainHandle { status: status.clone(), commands: Some(sender.clone()) };
        spawn_waker(&setup, sender.clone());
        let pools = ThreadPools::new(setup.config.threads)?;
        let runtime = Handle::current();
        let thread = std::thread::Builder::new().name("hone-train".to_owned()).spawn(move || {
            to_background();
            supervise(&setup, (&commands, &sender), &status, &runtime, &pools);
        });
        Ok(Self {
            handle,
            marker,
            thread: Some(thread.map_err(|error| TrainFailure::of_start(&error))?),
        })
    }

    /// A handle to the thread.
    pub fn handle(&self) -> TrainHandle {
        self.handle.clone()
    }

    /// Ends the thread after the current step, or stops waiting after `patience`: its groups then stay ready.
    pub async fn stop(self, patience: Duration) {
        // Fails only if the thread has already ended.
        let _ended = self.handle.send(TrainCommand::Stop);
        let Some(thread) = self.thread else { return };
        let started = Instant::now();
        // A blocking task that joins the thread would keep the runtime from ending.
        while !thread.is_finished() {
            if started.elapsed() >= patience {
                tracing::warn!("the trainer is still in its step and is not waited for");
                // The end of the process is not the step's fault, so the next start may repeat it.
                if let Err(error) = self.marker.clear() {
                    tracing::warn!(%error, "the next start will not repeat the step");
                }
                return;
            }
            tokio::time::sleep(STOP_INTERVAL).await;
        }
        if thread.join().is_err() {
            tracing::error!("the trainer ended with a panic");
        }
    }
}

/// Wakes the trainer when groups become ready or an operator activates a version.
fn spawn_waker(setup: &TrainSetup, sender: Sender<TrainCommand>) {
    let mut ready = setup.store.watch_ready();
    let mut rollback = setup.policies.watch_rollback();
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
}

/// Runs the trainer until a stop command. The wait before a restart after an error or a panic doubles each
/// time, and starts over once the trainer has run for [`MAX_BACKOFF`].
fn supervise(
    setup: &TrainSetup,
    (commands, wake): (&Receiver<TrainCommand>, &Sender<TrainCommand>),
    status: &StatusCell,
    runtime: &Handle,
    pools: &ThreadPools,
) {
    let mut backoff = MIN_BACKOFF;
    let mut gate = StepGate { step_limit: setup.step_limit, ..StepGate::default() };
    loop {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let (mut trainer, phase) = Trainer::restore(setup, status, runtime, pools, wake)?;
            trainer.run(phase, commands, &mut gate)
        }));
        let error = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(error)) if error.is_end_of_engine() => {
                tracing::info!("the trainer ends with the engine");
                return;
            }
            Ok(Err(error)) => error,
            Err(panic) => TrainFailure::from_panic(&*panic).into(),
        };
        if started.elapsed() > MAX_BACKOFF {
            backoff = MIN_BACKOFF;
        }
        let backoff_s = backoff.as_secs();
        tracing::error!(%error, backoff_s, "trainer failed, restarting from its checkpoint");
        status.update(|s| {
            s.last_error = Some(error.to_string());
            s.restarts += 1;
        });
        status.set_state(TrainState::Failed);
        setup.metrics.train.restarts.inc();
        if !back_off(commands, backoff, &mut gate, &error) {
            return;
        }
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Waits for `backoff` and answers commands meanwhile. Returns false after a stop command.
fn back_off(
    commands: &Receiver<TrainCommand>,
    backoff: Duration,
    gate: &mut StepGate,
    error: &TrainError,
) -> bool {
    let end = Instant::now() + backoff;
    loop {
        let command = commands.recv_timeout(end.saturating_duration_since(Instant::now()));
        match command.map(|command| gate.apply(command)) {
            Ok(Some(TrainCommand::Step(reply))) => {
                // Fails only if the caller no longer waits.
                let _hung_up = reply.send(Err(error.clone()));
            }
            Ok(Some(TrainCommand::Stop)) | Err(RecvTimeoutError::Disconnected) => return false,
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return true,
        }
    }
}

/// Controls the trainer's thread. Cheap to clone; no method but [`Self::step`] waits for it. Commands fail
/// with [`TrainError::Disabled`] or [`TrainError::Stopped`].
#[derive(Clone)]
pub struct TrainHandle {
    status: StatusCell,
    /// `None` if training is disabled.
    commands: Option<Sender<TrainCommand>>,
}

impl TrainHandle {
    /// The handle of a daemon that does not train.
    pub fn disabled(metrics: Arc<Metrics>) -> Self {
        Self { status: StatusCell::new(TrainState::Disabled, metrics), commands: None }
    }

    fn send(&self, command: TrainCommand) -> Result<(), TrainError> {
        let commands = self.commands.as_ref().ok_or(TrainError::Disabled)?;
        commands.send(command).map_err(|_| TrainError::Stopped)
    }

    /// The trainer's current status.
    pub fn status(&self) -> TrainStatus {
        self.status.read()
    }

    /// Pauses training after the current step, which is still published.
    pub fn pause(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Pause)
    }

    /// Ends a pause, and restores a lowered learning rate.
    pub fn resume(&self) -> Result<(), TrainError> {
        self.send(TrainCommand::Resume)
    }

    /// Halves the learning rate so often, until another call or [`Self::resume`].
    pub fn lower_rate(&self, halvings: u32) -> Result<(), TrainError> {
        self.send(TrainCommand::LowerRate(halvings))
    }

    /// Waits until the trainer has ended its step, and keeps it from writing checkpoints and steps until the
    /// result is dropped, at most for a minute. A failed trainer is held between its restarts.
    pub async fn hold(&self) -> Result<TrainHold, TrainError> {
        let (begun, answer) = oneshot::channel();
        let (hold, end) = channel();
        self.send(TrainCommand::Hold(begun, end))?;
        answer.await.map_err(|_| TrainError::Stopped)?;
        Ok(TrainHold(hold))
    }

    /// Pauses training once `limit` steps are taken in total, earlier processes included.
    pub fn set_step_limit(&self, limit: Option<u64>) -> Result<(), TrainError> {
        self.send(TrainCommand::SetStepLimit(limit))
    }

    /// Takes one step on the groups that are ready, however few, even if paused. Returns the status
    /// after the step's publication.
    ///
    /// # Errors
    /// [`TrainError::NothingReady`] if no group is ready; otherwise as the step fails.
    pub async fn step(&self) -> Result<TrainStatus, TrainError> {
        let (reply, answer) = oneshot::channel();
        self.send(TrainCommand::Step(reply))?;
        answer.await.map_err(|_| TrainError::Stopped)?
    }
}

/// Keeps the trainer from writing while it exists.
#[derive(Debug)]
pub struct TrainHold(#[expect(dead_code, reason = "its drop ends the hold")] Sender<()>);

#[cfg(test)]
mod tests;
