//! OpenAI's API over an [`Engine`], feedback into the ledger, and the operator's routes.
//!
//! `routes` shows every route on one screen; `error` alone maps errors to status codes; `auth` lets
//! requests in; `observe` counts them; `extract` and `fields` read bodies, naming what is wrong;
//! `chat` runs completions and records them; `feedback`, `quarantine`, `models`, `admin` and `health` answer the
//! rest.
//!
//! Invariants: every answer but a stream's is JSON or `/metrics` text, and every error has
//! OpenAI's shape; a completion is queued for the ledger before its last byte is sent; nothing of
//! a key but the first digits of its hash is kept or logged.

mod admin;
mod auth;
mod chat;
mod control;
mod error;
mod extract;
mod feedback;
mod fields;
mod graders;
mod health;
mod models;
mod observe;
mod quarantine;
mod routes;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use hone_core::metrics::Metrics;
use hone_core::types::{UnixMillis, now_ms};
use hone_engine::Engine;
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_rollout::Rollout;
use hone_store::Store;
use hone_train::TrainHandle;
use hone_train::policy::Policies;

use crate::config::ServerConfig;

pub use control::{PolicyControl, ServedSink, TrainControl};
pub use routes::router;

/// What the handlers work with.
pub struct AppState {
    /// Serves tokens.
    pub engine: Arc<dyn Engine>,
    /// Keeps what was served and said of it.
    pub store: Store,
    /// Names the route of each request.
    pub routes: Arc<Routes>,
    /// What graders of `/v1/fine_tuning/alpha/graders` may use.
    pub graders: Backends,
    /// Gets what was served, for shadow groups; `None` where rollout is off.
    pub rollout: Option<Arc<dyn ServedSink>>,
    /// Versions, for `/admin/policies`.
    pub policies: Arc<dyn PolicyControl>,
    /// The trainer, for `/admin/train`.
    pub train: Arc<dyn TrainControl>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Keys and limits.
    pub config: Arc<ServerConfig>,
    /// What `/readyz` says; [`serve`] makes it false when shutdown begins.
    pub ready: Arc<AtomicBool>,
    /// When the daemon started: `created` in `/v1/models`.
    pub started: UnixMillis,
}

impl AppState {
    /// The daemon's own parts, ready to serve.
    #[expect(clippy::too_many_arguments, reason = "each part once, named by its type")]
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

/// How often shutdown looks whether requests still run.
const LOOK: Duration = Duration::from_millis(25);
/// Idle looks after which connections that never end are left alone.
const IDLE_LOOKS: u32 = 10;

/// Answers requests on `listener` until `shutdown` is ready; then takes no new connection, lets
/// running requests finish for `server.shutdown_grace_seconds`, and returns.
///
/// # Errors
/// If the listener fails.
pub async fn serve(
    listener: TcpListener,
    state: AppState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (ready, metrics) = (state.ready.clone(), state.metrics.clone());
    let grace = Duration::from_secs(state.config.shutdown_grace_seconds);
    let (begun, begins) = oneshot::channel();
    let service = router(state).into_make_service_with_connect_info::<SocketAddr>();
    // A token is worth a packet: Nagle's algorithm would hold it back for the client's delayed
    // acknowledgement, 40 ms on Linux.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its packets back");
        }
    });
    let server = axum::serve(listener, service).with_graceful_shutdown(async move {
        shutdown.await;
        ready.store(false, Ordering::Release);
        // The receiver is gone only if serving has ended already.
        let _ended = begun.send(()).is_err();
    });
    tokio::select! {
        result = server => result,
        () = drained(begins, grace, &metrics) => Ok(()),
    }
}

/// Ready when shutdown has begun and no request has run for a while, or the grace is over. The
/// server itself waits for every connection, also for those that never send a request.
async fn drained(begins: oneshot::Receiver<()>, grace: Duration, metrics: &Metrics) {
    if begins.await.is_err() {
        return std::future::pending().await;
    }
    let deadline = tokio::time::Instant::now() + grace;
    let mut idle = 0;
    while idle < IDLE_LOOKS {
        let running = metrics.http_in_flight.get();
        if tokio::time::Instant::now() >= deadline {
            tracing::warn!(running, "shutdown grace is over: requests are cut off");
            return;
        }
        idle = if running == 0 { idle + 1 } else { 0 };
        tokio::time::sleep(LOOK).await;
    }
}
