//! The state that the handlers share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hone_core::metrics::Metrics;
use hone_core::types::{UnixMillis, now_ms};
use hone_engine::Engine;
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_rollout::Rollout;
use hone_store::Store;
use hone_train::TrainHandle;
use hone_train::policy::Policies;

use super::control::{PolicyControl, ServedSink, TrainControl};
use crate::config::ServerConfig;

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
    /// Request counters and latencies; `/metrics` encodes them.
    pub metrics: Arc<Metrics>,
    /// API keys and limits.
    pub config: Arc<ServerConfig>,
    /// Answer of `/readyz`. [`serve`](super::serve) sets it to false when shutdown begins.
    pub ready: Arc<AtomicBool>,
    /// Start time of the daemon: `created` in `/v1/models`.
    pub started: UnixMillis,
}

impl AppState {
    /// The state of a daemon that is ready and starts now.
    #[expect(clippy::too_many_arguments, reason = "each argument has its own type")]
    pub fn new(
        engine: Arc<dyn Engine>,
        store: Store,
        routes: Arc<Routes>,
        graders: Backends,
        rollout: Rollout,
        policies: Arc<Policies>,
        train: TrainHandle,
        metrics: Arc<Metrics>,
        config: ServerConfig,
    ) -> Self {
        Self {
            engine,
            store,
            routes,
            graders,
            rollout: Some(Arc::new(rollout)),
            policies,
            train: Arc::new(train),
            metrics,
            config: Arc::new(config),
            ready: Arc::new(AtomicBool::new(true)),
            started: now_ms(),
        }
    }
}
