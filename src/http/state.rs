//! The state that the handlers share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hone_core::metrics::Metrics;
use hone_core::types::UnixMillis;
use hone_engine::Engine;
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_store::{Store, StoreError};

use super::auth::KeyRing;
use super::error::ApiError;
use super::generate::RecentTurns;
use super::generate::TokenizerPlaces;
use super::operator::control::{PolicyControl, ServedSink, TrainControl};
use crate::config::ServerConfig;

/// The configuration that decides whether feedback is trained on.
#[derive(Clone, Copy, Debug)]
pub struct LearningLimits {
    /// `train.enabled`.
    pub enabled: bool,
    /// `train.feedback_max_staleness`.
    pub max_staleness: u64,
    /// `train.correction_weight`.
    pub correction_weight: f64,
}

/// The free space that the data directory needs.
#[derive(Clone, Debug, Default)]
pub struct DiskLimit {
    /// `data.dir`.
    pub dir: PathBuf,
    /// Free bytes below which the server is not ready.
    pub min_free: u64,
}

/// The parts of the daemon that the handlers use.
pub struct AppState {
    /// Generates the completions.
    pub engine: Arc<dyn Engine>,
    /// Records completions and feedback.
    pub store: Store,
    /// Chooses the route of a request, and with it the rewards.
    pub routes: Arc<Routes>,
    /// Services that graders of `/v1/fine_tuning/alpha/graders` may call.
    pub graders: Backends,
    /// Receives every finished completion, to sample a shadow group for it; `None` if rollout is off.
    pub rollout: Option<Arc<dyn ServedSink>>,
    /// Policy versions, for `/admin/policies`.
    pub policies: Arc<dyn PolicyControl>,
    /// Trainer, for `/admin/train`.
    pub train: Arc<dyn TrainControl>,
    /// What decides whether feedback is trained on.
    pub learning: LearningLimits,
    /// Request counters and latencies; `/metrics` encodes them.
    pub metrics: Arc<Metrics>,
    /// Share of the live prompts of graded routes that only exams use (`policy.gate.holdout_share`); 0
    /// without exams.
    pub holdout_share: f64,
    /// Addresses and limits.
    pub config: Arc<ServerConfig>,
    /// Turns of conversations that may still be queued for the ledger.
    pub recent_turns: RecentTurns,
    /// Places of long texts that are tokenized.
    pub tokenizing: TokenizerPlaces,
    /// API keys. They may be replaced while the server runs.
    pub keys: Arc<KeyRing>,
    /// What `/readyz` requires of the disk.
    pub disk: DiskLimit,
    /// Whether the server is not shutting down. [`serve`](super::serve) sets it to false when shutdown
    /// begins.
    pub ready: Arc<AtomicBool>,
    /// Start time of the daemon: `created` in `/v1/models`.
    pub started: UnixMillis,
}

impl AppState {
    /// Reads the ledger on a thread that may wait for the disk.
    pub(super) async fn read_ledger<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let store = self.store.clone();
        let read = tokio::task::spawn_blocking(move || read(&store)).await;
        Ok(read.map_err(|error| ApiError::logged("reading the ledger panicked", &error))??)
    }
}
