//! One connection.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, watch};
use tokio::time::{MissedTickBehavior, timeout};

use hone_core::metrics::Metrics;

use super::activity::{ActiveBody, Activity, ArrivingBody, Overdue, Patience, WatchedStream};
use super::places::{ConnectionPlace, Places};
use super::startup::Startup;

/// What is answered on a reserved place.
const PROBES: [&str; 3] = ["/livez", "/readyz", "/metrics"];
/// How long a connection on a reserved place may take to send the head of its request.
const RESERVED_HEAD: Duration = Duration::from_secs(1);
/// The reason of a connection that is closed because its TLS handshake failed or took too long.
const HANDSHAKE: &str = "handshake";
/// The reason of a connection that is closed for another one.
const CROWDED: &str = "crowded";

/// What all connections share.
pub(super) struct Connections {
    pub startup: Startup,
    pub patience: Patience,
    pub places: Places,
}

impl Connections {
    /// Interval of the checks for connections that wait too long.
    fn tick(&self) -> Duration {
        let Patience { head, idle, write } = self.patience;
        (head.min(idle).min(write) / 4).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    /// Serves a client, with TLS if the server has a certificate. The handshake may take as long as the head of a
    /// request.
    pub async fn serve(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        place: ConnectionPlace,
        mut shutdown: watch::Receiver<bool>,
    ) {
        let _open = OpenConnection::new(&self.startup.metrics);
        let activity = Activity::new(place.is_reserved());
        let _listed = self.places.list(&activity);
        let Some(acceptor) = self.startup.tls.acceptor() else {
            return self.serve_requests(stream, peer, place, activity, shutdown).await;
        };
        let limit = self.longest_head(place.is_reserved());
        let secured = tokio::select! {
            secured = timeout(limit, acceptor.accept(stream)) => secured,
            _ = activity.asked() => return self.count_closed(peer, CROWDED),
            _ = shutdown.changed() => return,
        };
        match secured {
            Ok(Ok(stream)) => self.serve_requests(stream, peer, place, activity, shutdown).await,
            Ok(Err(error)) => {
                tracing::debug!(%peer, %error, "a TLS handshake failed");
                self.count_closed(peer, HANDSHAKE);
            }
            Err(_) => self.count_closed(peer, HANDSHAKE),
        }
    }

    /// Serves requests until the client ends the connection, waits too long, or `shutdown` has a value.
    /// Then the request that runs is answered.
    async fn serve_requests<S>(
        &self,
        stream: S,
        peer: SocketAddr,
        place: ConnectionPlace,
        activity: Activity,
        mut shutdown: watch::Receiver<bool>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Requests of a connection are answered in turn, so none waits for the lock.
        let place = Mutex::new(place);
        let service = service_fn(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            let (active, place, activity) = (activity.begin(), &place, &activity);
            let request = request.map(|body| activity.receive(body));
            async move {
                let response = self.answer(request, &mut *place.lock().await, activity).await?;
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
                _ = ticks.tick() => match activity.overdue(&self.patience_at(&activity)) {
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
                is_idle = activity.asked(), if !is_ending => {
                    self.count_closed(peer, CROWDED);
                    // A request that arrives at this moment is not lost with an idle connection.
                    if !is_idle {
                        return;
                    }
                    is_ending = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// Answers a request. On a reserved place only a probe is answered, and the connection ends.
    async fn answer(
        &self,
        request: Request<ArrivingBody>,
        place: &mut ConnectionPlace,
        activity: &Activity,
    ) -> Result<Response, Infallible> {
        let is_open = PROBES.contains(&request.uri().path()) || self.places.open(place).await;
        if !place.is_reserved() {
            activity.leave_reserved();
        }
        let app = if is_open { self.startup.app() } else { self.startup.crowded() };
        let mut response = app.call(request).await?;
        if place.is_reserved() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }

    /// How long a connection may wait for its client. One on a reserved place has to send its request at
    /// once.
    fn patience_at(&self, activity: &Activity) -> Patience {
        Patience { head: self.longest_head(activity.is_reserved()), ..self.patience }
    }

    /// How long a client may take to send the head of a request.
    fn longest_head(&self, is_reserved: bool) -> Duration {
        let limit = if is_reserved { RESERVED_HEAD } else { Duration::MAX };
        limit.min(self.patience.head)
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
