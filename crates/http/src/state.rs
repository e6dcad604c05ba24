//! The state that the handlers share, with the trainer, the policy versions and rollout as traits, so that tests of
//! the routes can replace all three.

use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;

use hone_core::metrics::Metrics;
use hone_core::types::{Interaction, PolicyRecord, PolicyVersion, Sample, UnixMillis};
use hone_engine::Engine;
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_rollout::Rollout;
use hone_store::{ErasureFilter, Retention, Store, StoreError};
use hone_train::policy::{CanaryStatus, Policies, PolicyError, VersionRating};
use hone_train::{TrainError, TrainHandle, TrainHold, TrainStatus};

use super::auth::KeyRing;
use super::error::ApiError;
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

/// The data directory and its limits.
#[derive(Clone, Debug, Default)]
pub struct DiskLimit {
    /// `data.dir`.
    pub dir: PathBuf,
    /// Free bytes below which the server is not ready.
    pub min_free: u64,
    /// `store.retention`, which `/admin/data` reports.
    pub retention: Retention,
}

/// What the handlers need of the fleet.
pub struct FleetLink {
    /// What keeps the process from serving the fleet's version, for `/readyz`.
    pub problem: watch::Receiver<Option<String>>,
    /// Has the other processes erase what an operator selected.
    pub share_erasure: ShareErasure,
}

/// Passes a selection to the other processes of a fleet. The error is a sentence.
pub type ShareErasure =
    Arc<dyn Fn(&ErasureFilter) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

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
    /// With a fleet, other servers answer too, so that feedback may be on their completions.
    pub fleet: Option<FleetLink>,
    /// What decides whether feedback is trained on.
    pub learning: LearningLimits,
    /// Request counters and latencies; `/metrics` encodes them.
    pub metrics: Arc<Metrics>,
    /// Share of the live prompts of graded routes that only exams use (`policy.gate.holdout_share`).
    pub holdout_share: f64,
    /// Addresses and limits.
    pub config: Arc<ServerConfig>,
    /// Turns of conversations that may still be queued for the ledger.
    pub recent_turns: RecentTurns,
    /// API keys. They may be replaced while the server runs.
    pub keys: Arc<KeyRing>,
    /// What `/readyz` requires of the disk.
    pub disk: DiskLimit,
    /// Whether the server is not shutting down, which [`serve`](super::serve) changes.
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

/// Digests that are remembered. More than the ledger's queue holds.
const MAX_RECENT: usize = 16_384;

/// First 16 bytes of a SHA-256 of messages.
pub type TurnDigest = [u8; 16];

/// The digests that were queued for the ledger last. A conversation with one of them waits for the queue.
#[derive(Default)]
pub struct RecentTurns(Mutex<(VecDeque<TurnDigest>, HashSet<TurnDigest>)>);

impl RecentTurns {
    pub fn add(&self, digest: TurnDigest) {
        let mut state = self.0.lock();
        let (order, known) = &mut *state;
        if !known.insert(digest) {
            return;
        }
        order.push_back(digest);
        if order.len() > MAX_RECENT
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    pub fn contains(&self, digest: &TurnDigest) -> bool {
        self.0.lock().1.contains(digest)
    }
}

/// The trainer, for `/admin/train`.
#[async_trait]
pub trait TrainControl: Send + Sync {
    /// Its state, step and progress.
    fn status(&self) -> TrainStatus;
    /// Takes no further step until resumed.
    fn pause(&self) -> Result<(), TrainError>;
    /// Ends a pause.
    fn resume(&self) -> Result<(), TrainError>;
    /// Takes one step now and returns the status after it.
    async fn step(&self) -> Result<TrainStatus, TrainError>;
    /// Keeps the trainer from writing until the result is dropped.
    async fn hold(&self) -> Result<TrainHold, TrainError>;
}

#[async_trait]
impl TrainControl for TrainHandle {
    fn status(&self) -> TrainStatus {
        self.status()
    }
    fn pause(&self) -> Result<(), TrainError> {
        self.pause()
    }
    fn resume(&self) -> Result<(), TrainError> {
        self.resume()
    }
    async fn step(&self) -> Result<TrainStatus, TrainError> {
        self.step().await
    }
    async fn hold(&self) -> Result<TrainHold, TrainError> {
        self.hold().await
    }
}

/// The policy versions, for `/admin/policies`.
#[async_trait]
pub trait PolicyControl: Send + Sync {
    /// Every version, in order.
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError>;
    /// The version being served.
    fn active(&self) -> PolicyVersion;
    /// Switches serving to an existing version.
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError>;
    /// Keeps a version's files, or lets them be deleted again.
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<PolicyRecord, PolicyError>;
    /// The evidence of the canary in progress.
    fn canary_status(&self) -> Option<CanaryStatus> {
        None
    }
    /// The canary that a request with this key must get; `None` is the active version.
    fn assign(&self, key: &str) -> Option<PolicyVersion>;
    /// Whether a canary runs that this process decides about, for which ratings are evidence.
    fn counts_ratings(&self) -> bool;
    /// Adds a rating to the evidence of a canary.
    fn rate(&self, rating: &VersionRating);
    /// Adds the end of a request to the evidence of a canary.
    fn answered(&self, version: PolicyVersion, failed: bool);
}

#[async_trait]
impl PolicyControl for Policies {
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        self.list()
    }
    fn active(&self) -> PolicyVersion {
        self.active()
    }
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        self.activate(version, reason).await
    }
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<PolicyRecord, PolicyError> {
        self.pin(version, pinned).await
    }
    fn canary_status(&self) -> Option<CanaryStatus> {
        self.canary_status()
    }
    fn assign(&self, key: &str) -> Option<PolicyVersion> {
        self.assign(key)
    }
    fn counts_ratings(&self) -> bool {
        self.counts_ratings()
    }
    fn rate(&self, rating: &VersionRating) {
        self.rate(rating);
    }
    fn answered(&self, version: PolicyVersion, failed: bool) {
        self.answered(version, failed);
    }
}

/// Receives served completions, to sample shadow groups for their prompts.
pub trait ServedSink: Send + Sync {
    /// Submits one interaction with its served samples. Never blocks.
    fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>);
}

impl ServedSink for Rollout {
    fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        self.submit(interaction, served);
    }
}
