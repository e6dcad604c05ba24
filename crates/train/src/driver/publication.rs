//! A publication beside the next step: loading a version into the server takes one thread, and the
//! trainer's pool would wait for it.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::runtime::Handle;

use hone_core::threads::to_background;
use hone_core::types::{TokenId, UnixMillis, now_ms};

use super::handle::TrainError;
use super::progress::LoopState;
use super::worker::TrainSetup;
use crate::Snapshot;
use crate::policy::{Candidate, PublishOutcome};

/// What became of it, and when.
type Ended = (PublishOutcome, UnixMillis);

/// A version on its way. Dropping it waits for its end.
pub(crate) struct Publication {
    /// Steps taken when it was made.
    pub(crate) step: u64,
    /// When the feedback came in that it was trained on.
    pub(crate) feedback: Vec<u64>,
    /// Until the end was waited for.
    thread: Option<JoinHandle<Result<Ended, String>>>,
}

impl Publication {
    /// Begins to publish `snapshot`, the weights after `progress`; `pool` scores the probe.
    pub(crate) fn begin(
        parts: &TrainSetup,
        runtime: &Handle,
        pool: &Arc<rayon::ThreadPool>,
        snapshot: Snapshot,
        progress: &LoopState,
        feedback: Vec<u64>,
    ) -> Result<Self, TrainError> {
        let (parent, step) = (progress.parent, progress.steps());
        let metrics = progress.last_step.as_ref().map(|s| s.metrics.clone()).unwrap_or_default();
        let (policies, runtime) = (Arc::clone(&parts.policies), runtime.clone());
        let base_model = parts.model_name.clone();
        let candidate = Offered { snapshot, pool: Arc::clone(pool), base_model };
        let publish = move || {
            to_background();
            let verdict = runtime.block_on(policies.propose(&candidate, parent, step, metrics));
            verdict.map(|verdict| (verdict, now_ms())).map_err(|error| error.to_string())
        };
        let thread = std::thread::Builder::new().name("hone-publish".to_owned()).spawn(publish);
        let thread = thread.map_err(|error| TrainError::Failed(format!("no thread: {error}")))?;
        Ok(Self { step, feedback, thread: Some(thread) })
    }

    /// Whether its end need not be waited for.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for what became of it.
    pub(crate) fn end(&mut self) -> Result<Ended, TrainError> {
        let ended = self.thread.take().map(JoinHandle::join);
        let panicked = || TrainError::Failed("the publication panicked".to_owned());
        ended.and_then(Result::ok).ok_or_else(panicked)?.map_err(TrainError::Failed)
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        // A trainer that starts anew must find it done.
        if let Some(thread) = self.thread.take() {
            let _gone = thread.join();
        }
    }
}

/// The weights, as the policy module wants to see them.
struct Offered {
    snapshot: Snapshot,
    /// Not the trainer's, which is busy with the next step.
    pool: Arc<rayon::ThreadPool>,
    base_model: String,
}

impl Candidate for Offered {
    fn write(&self, dir: &Path) -> Result<(), String> {
        self.snapshot.write(dir, &self.base_model).map_err(|error| error.to_string())
    }

    fn score(
        &self,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, String> {
        self.pool
            .install(|| self.snapshot.score(prompt_ids, ids, temperature))
            .map_err(|error| error.to_string())
    }
}
