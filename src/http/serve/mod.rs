//! Serves the router on a listener, bounds its connections, and drains it at shutdown.
//!
//! A connection ends if its client does not send the head of a request, a further request, or does not
//! read the response, each for too long ([`activity`]). A generation whose client does not read is then
//! cancelled and recorded, as if the client had disconnected. [`places`] bounds their number, and the number of
//! files and sockets that the process may have open bounds [`places`].

mod activity;
mod connection;
mod places;
mod startup;
mod tls;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use hone_core::files::raise_open_limit;
use hone_core::metrics::Metrics;

use crate::config::ConnectionsConfig;

use activity::Patience;
use connection::Connections;
use places::Places;

pub use startup::Startup;
pub use tls::Tls;

/// Of the files and sockets that the process may have open, connections leave a quarter to the ledger, models,
/// judges and the sandbox, but at most this many.
const MOST_OTHERS: u64 = 512;
/// Interval at which shutdown polls the number of requests in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Consecutive polls without a request after which shutdown stops waiting for open connections.
const IDLE_POLLS: u32 = 10;

/// Serves requests on `listener`, probes also before the model is loaded, until `shutdown` completes. Then it
/// accepts no new connection, lets running requests finish for up to `server.shutdown_grace_seconds`, and
/// returns.
///
/// # Errors
/// Never: connections that cannot be accepted are logged.
pub async fn serve(
    listener: TcpListener,
    startup: Startup,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (ready, metrics) = (startup.ready.clone(), startup.metrics.clone());
    let grace = Duration::from_secs(startup.config.shutdown_grace_seconds);
    let limits = startup.config.connections;
    let places = Places::new(possible(limits.max));
    let connections = Connections { startup, patience: patience(limits), places };
    let (began, begins) = oneshot::channel();
    let shutdown = async move {
        shutdown.await;
        ready.store(false, Ordering::Release);
        // The receiver is dropped only after the server has ended.
        let _ended = began.send(()).is_err();
    };
    tokio::select! {
        () = accept(listener, Arc::new(connections), shutdown) => {}
        () = drained(begins, grace, &metrics) => {}
    }
    Ok(())
}

/// The number of connections that the system permits, up to `wanted`. A connection without a descriptor could not
/// be accepted, not even for a probe.
fn possible(wanted: usize) -> usize {
    let Some(open) = raise_open_limit() else { return wanted };
    let most = open.saturating_sub((open / 4).min(MOST_OTHERS) + places::RESERVED as u64).max(1);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    if wanted > most {
        tracing::warn!(
            most,
            "server.connections.max is {wanted}: it is reduced, because the process may have only {open} \
             files and sockets open (RLIMIT_NOFILE)"
        );
    }
    wanted.min(most)
}

fn patience(limits: ConnectionsConfig) -> Patience {
    Patience {
        head: Duration::from_secs(limits.head_seconds),
        idle: Duration::from_secs(limits.idle_seconds),
        write: Duration::from_secs(limits.write_seconds),
    }
}

/// Serves connections until `shutdown` completes, and then those that are open until they end. Dropping the
/// future ends them.
async fn accept(
    mut listener: TcpListener,
    connections: Arc<Connections>,
    shutdown: impl Future<Output = ()>,
) {
    let (ends, ended) = watch::channel(false);
    let mut open = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let next = async {
            let (stream, peer) = Listener::accept(&mut listener).await;
            // Without a place, further clients wait in the system's queue.
            (stream, peer, connections.places.take().await)
        };
        let (stream, peer, place) = tokio::select! {
            () = shutdown.as_mut() => break,
            next = next => next,
        };
        // Nagle's algorithm would delay each streamed token until the client acknowledges the previous
        // one: up to 40 ms on Linux.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        while open.try_join_next().is_some() {}
        let (connections, ended) = (Arc::clone(&connections), ended.clone());
        open.spawn(async move { connections.serve(stream, peer, place, ended).await });
    }
    drop(listener);
    // The receivers are those of open connections and `ended`.
    let _sent = ends.send(true).is_ok();
    while open.join_next().await.is_some() {}
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
