//! A publication on a thread of its own: the trainer's pool must not wait while the engine loads a version.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rayon::ThreadPool;
use tokio::runtime::Handle;
use tracing::field::Empty;
use tracing::{Instrument as _, info_span};

use hone_core::metrics::SPANS;
use hone_core::threads::to_background;
use hone_core::types::{TokenId, UnixMillis, now_ms};
use hone_model::kernels::compute::Compute;

use super::progress::TrainProgress;
use super::{TrainCommand, TrainFailure, TrainSetup};
use crate::error::LearnError;
use crate::learning::Snapshot;
use crate::policy::{Candidate, Policies, PolicyError, PublishOutcome, ScoredBy};

/// The outcome of a publication and the time at which it was known.
type Finished = (PublishOutcome, UnixMillis);

/// A publication in progress. Dropping it suspends a canary and waits, so that a restart finds it in the
/// ledger.
pub(super) struct Publication {
    policies: Arc<Policies>,
    pub(super) step: u64,
    /// Arrival times of the feedback that the version is the first to be trained on.
    pub(super) feedback_times: Vec<UnixMillis>,
    /// `None` once joined.
    thread: Option<JoinHandle<Result<Finished, PolicyError>>>,
}

impl Publication {
    /// Starts to publish `snapshot`, the weights of `progress`, with scores on `pool`. Wakes the trainer at
    /// its end.
    pub(super) fn start(
        setup: &TrainSetup,
        (runtime, pool, wake): (&Handle, &Arc<ThreadPool>, Sender<TrainCommand>),
        snapshot: Snapshot,
        progress: &TrainProgress,
        feedback_times: Vec<UnixMillis>,
    ) -> Result<Self, TrainFailure> {
        let (parent, step) = (progress.parent, progress.steps());
        let metrics = progress.last_step.as_ref().map(|s| s.metrics.clone()).unwrap_or_default();
        let (policies, runtime) = (Arc::clone(&setup.policies), runtime.clone());
        let publisher = Arc::clone(&policies);
        let candidate = SnapshotCandidate {
            snapshot: Arc::new(snapshot),
            others: Mutex::default(),
            pool: Arc::clone(pool),
            base_model: setup.model_name.clone(),
        };
        // A child of the span of the step that is published.
        let span = info_span!(
            target: SPANS, "publication", hone.step = step, hone.policy_version = Empty, hone.outcome = Empty,
        );
        let publish = move || {
            to_background();
            // Also after a panic.
            let _wake = WakeAtEnd(wake);
            let published = publisher.publish(&candidate, parent, step, metrics);
            let outcome = runtime.block_on(published.instrument(span.clone()))?;
            let (outcome_name, version) = outcome.summary();
            span.record("hone.outcome", outcome_name).record("hone.policy_version", version);
            Ok((outcome, now_ms()))
        };
        let thread = std::thread::Builder::new().name("hone-publish".to_owned()).spawn(publish);
        let thread = thread.map_err(|error| TrainFailure::of_start(&error))?;
        Ok(Self { policies, step, feedback_times, thread: Some(thread) })
    }

    pub(super) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the outcome. A second call fails.
    pub(super) fn wait(&mut self) -> Result<Finished, TrainFailure> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(finished)) => Ok(finished?),
            Some(Err(panic)) => Err(TrainFailure::from_panic(&*panic)),
            None => Err(TrainFailure::Thread("the publication was already joined".to_owned())),
        }
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _suspension = self.policies.suspend();
            let _outcome = thread.join();
        }
    }
}

struct WakeAtEnd(Sender<TrainCommand>);

impl Drop for WakeAtEnd {
    fn drop(&mut self) {
        // Fails only if the trainer's thread has ended.
        let _ended = self.0.send(TrainCommand::Wake);
    }
}

struct SnapshotCandidate {
    snapshot: Arc<Snapshot>,
    /// The policies that the gate compares with, each made at its first use: adapters, and the base as `None`.
    others: Mutex<HashMap<Option<PathBuf>, Arc<Snapshot>>>,
    pool: Arc<ThreadPool>,
    base_model: String,
}

impl SnapshotCandidate {
    fn policy(&self, policy: ScoredBy<'_>) -> Result<Arc<Snapshot>, LearnError> {
        let adapter = match policy {
            ScoredBy::Candidate => return Ok(Arc::clone(&self.snapshot)),
            ScoredBy::Base => None,
            ScoredBy::Adapter(dir) => Some(dir.to_owned()),
        };
        let mut others = self.others.lock();
        if let Some(known) = others.get(&adapter) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(match &adapter {
            None => self.snapshot.base()?,
            Some(dir) => self.snapshot.with_adapter(dir)?,
        });
        others.insert(adapter, Arc::clone(&made));
        Ok(made)
    }
}

impl Candidate for SnapshotCandidate {
    fn write(&self, dir: &Path) -> Result<(), LearnError> {
        self.snapshot.write(dir, &self.base_model)
    }

    fn compute(&self) -> Compute {
        self.snapshot.model.compute()
    }

    fn score(
        &self,
        policy: ScoredBy<'_>,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, LearnError> {
        let snapshot = self.policy(policy)?;
        self.pool.install(|| snapshot.score(prompt_ids, ids, temperature))
    }
}
