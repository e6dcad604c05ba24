//! One connection.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::extract::ConnectInfo;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{MissedTickBehavior, timeout};

use hone_core::metrics::Metrics;

use super::activity::{ActiveBody, Activity, Overdue, Patience, WatchedStream};
use super::startup::Startup;

/// The reason of a connection that is closed because its TLS handshake failed or took too long.
const HANDSHAKE: &str = "handshake";

/// What all connections share.
pub(super) struct Connections {
    pub startup: Startup,
    pub patience: Patience,
    /// Asks idle connections to end, because all are taken.
    pub crowded: Notify,
}

impl Connections {
    /// Interval of the checks for connections that wait too long.
    fn tick(&self) -> Duration {
        let Patience { head, idle, write } = self.patience;
        (head.min(idle).min(write) / 4).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    /// Serves a client, with TLS if the server has a certificate. Its handshake may take as long as the head of a
    /// request.
    pub async fn serve(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        mut shutdown: watch::Receiver<bool>,
    ) {
        let _open = OpenConnection::new(&self.startup.metrics);
        let Some(acceptor) = self.startup.tls.acceptor() else {
            return self.answer(stream, peer, shutdown).await;
        };
        let secured = tokio::select! {
            secured = timeout(self.patience.head, acceptor.accept(stream)) => secured,
            _ = shutdown.changed() => return,
        };
        match secured {
            Ok(Ok(stream)) => self.answer(stream, peer, shutdown).await,
            Ok(Err(error)) => {
                tracing::debug!(%peer, %error, "a TLS handshake failed");
                self.count_closed(peer, HANDSHAKE);
            }
            Err(_) => self.count_closed(peer, HANDSHAKE),
        }
    }

    /// Answers requests until the client ends the connection, waits too long, or `shutdown` has a value.
    /// Then the request that runs is answered.
    async fn answer<S>(&self, stream: S, peer: SocketAddr, mut shutdown: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Activity::new();
        let service = service_fn(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            let active = activity.begin();
            let response = self.startup.app().call(request);
            async move {
                let response = response.await?;
                Ok::<_, Infallible>(response.map(|body| ActiveBody::new(body, active)))
            }
        });
        let stream = TokioIo::new(WatchedStream::new(stream, activity.clone()));
        // The checks below limit the time for a head too, and distinguish it from an idle connection.
        let mut http = http1::Builder::new();
        let mut connection =
            pin!(http.header_read_timeout(None::<Duration>).serve_connection(stream, service));
        let mut ticks = tokio::time::interval(self.tick());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_ending = false;
        loop {
            tokio::select! {
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        tracing::debug!(%peer, %error, "a connection ended");
                    }
                    return;
                }
                _ = ticks.tick() => match activity.overdue(&self.patience) {
                    None => {}
                    Some(reason) => {
                        self.count_closed(peer, reason.as_str());
                        // A request that arrives at this moment is not lost with an idle connection.
                        if reason != Overdue::Idle || is_ending {
                            return;
                        }
                        is_ending = true;
                        connection.as_mut().graceful_shutdown();
                    }
                },
                _ = shutdown.changed(), if !is_ending => {
                    is_ending = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = self.crowded.notified(), if !is_ending => if activity.is_idle() {
                    self.count_closed(peer, "crowded");
                    is_ending = true;
                    connection.as_mut().graceful_shutdown();
                },
            }
        }
    }

    fn count_closed(&self, peer: SocketAddr, reason: &str) {
        self.startup.metrics.http_closed_connections.with_label_values(&[reason]).inc();
        tracing::debug!(%peer, reason, "a connection is closed");
    }
}

/// A connection in the gauge of open ones.
struct OpenConnection<'a>(&'a Metrics);

impl<'a> OpenConnection<'a> {
    fn new(metrics: &'a Metrics) -> Self {
        metrics.http_connections.inc();
        Self(metrics)
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        self.0.http_connections.dec();
    }
}
