//! The daemon under demonstration.

use std::net::SocketAddr;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

/// A running daemon, known only by its URL. Tests start a fake one.
pub struct DaemonHandle {
    url: String,
    shutdown: Box<dyn FnOnce() -> LocalBoxFuture<'static, anyhow::Result<()>>>,
}

impl DaemonHandle {
    /// A daemon that listens on `addr` without TLS, as [`config`](super::config) has it; awaiting `shutdown` ends it.
    pub fn new<F, Fut>(addr: SocketAddr, shutdown: F) -> Self
    where
        F: FnOnce() -> Fut + 'static,
        Fut: Future<Output = anyhow::Result<()>> + 'static,
    {
        Self { url: format!("http://{addr}"), shutdown: Box::new(move || shutdown().boxed_local()) }
    }

    /// The base URL of its API.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Shuts it down.
    ///
    /// # Errors
    /// If it does not shut down cleanly.
    pub async fn shut_down(self) -> anyhow::Result<()> {
        (self.shutdown)().await
    }
}
