//! A server that answers probes before its model is loaded.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use axum::Router;
use hyper_util::service::TowerToHyperService;

use hone_core::metrics::Metrics;

use super::tls::Tls;
use crate::config::ServerConfig;
use crate::http::AppState;
use crate::http::routes::{crowded, router, starting};

/// A server from its first connection on. Until [`Self::finish`], it answers `/livez`, `/metrics`, and
/// everything else with 503. Clones share it.
#[derive(Clone)]
pub struct Startup {
    pub(super) config: Arc<ServerConfig>,
    pub(super) metrics: Arc<Metrics>,
    /// [`AppState::ready`].
    pub(super) ready: Arc<AtomicBool>,
    pub(super) tls: Arc<Tls>,
    starting: Router,
    crowded: Router,
    loaded: Arc<OnceLock<Router>>,
}

impl Startup {
    /// A server that is loading. `ready` is also that of the later [`AppState`].
    pub fn new(config: Arc<ServerConfig>, metrics: Arc<Metrics>, ready: Arc<AtomicBool>) -> Self {
        let (starting, crowded) = (starting(metrics.clone()), crowded(metrics.clone()));
        let (tls, loaded) = (Arc::default(), Arc::default());
        Self { config, metrics, ready, tls, starting, crowded, loaded }
    }

    /// The server with TLS, if `tls` has a certificate.
    pub fn with_tls(self, tls: Arc<Tls>) -> Self {
        Self { tls, ..self }
    }

    /// Answers every route from now on. A second call has no effect.
    pub fn finish(&self, state: AppState) {
        let _loaded = self.loaded.get_or_init(|| router(state));
    }

    /// The routes of a request that arrives now.
    pub(super) fn app(&self) -> TowerToHyperService<Router> {
        TowerToHyperService::new(self.loaded.get().unwrap_or(&self.starting).clone())
    }

    /// The answer to a request without a place.
    pub(super) fn crowded(&self) -> TowerToHyperService<Router> {
        TowerToHyperService::new(self.crowded.clone())
    }
}
