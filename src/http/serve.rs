//! Serves the router on a listener, and drains it at shutdown.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::Instant;

use hone_core::metrics::Metrics;

use super::routes::router;
use super::state::AppState;

/// Interval at which shutdown polls the number of requests in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Consecutive polls without a request after which shutdown stops waiting for open connections.
const IDLE_POLLS: u32 = 10;

/// Serves requests on `listener` until `shutdown` completes. Then it accepts no new connection,
/// lets running requests finish for up to `server.shutdown_grace_seconds`, and returns.
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
    let (began, begins) = oneshot::channel();
    let service = router(state).into_make_service_with_connect_info::<SocketAddr>();
    // Nagle's algorithm would delay each streamed token until the client acknowledges the previous
    // one: up to 40 ms on Linux.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let server = axum::serve(listener, service).with_graceful_shutdown(async move {
        shutdown.await;
        ready.store(false, Ordering::Release);
        // The receiver is dropped only after the server has ended.
        let _ended = began.send(()).is_err();
    });
    tokio::select! {
        result = server => result,
        () = drained(begins, grace, &metrics) => Ok(()),
    }
}

/// Completes when no request has run for [`IDLE_POLLS`] polls after `begins`, or when the grace
/// period is over. The server itself waits for every open connection, even for those that never
/// send a request.
async fn drained(begins: oneshot::Receiver<()>, grace: Duration, metrics: &Metrics) {
    if begins.await.is_err() {
        return std::future::pending().await;
    }
    let deadline = Instant::now() + grace;
    let mut idle = 0;
    while idle < IDLE_POLLS {
        let running = metrics.http_in_flight.get();
        if Instant::now() >= deadline {
            tracing::warn!(running, "the shutdown grace period is over: requests are aborted");
            return;
        }
        idle = if running == 0 { idle + 1 } else { 0 };
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
