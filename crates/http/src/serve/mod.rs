//! Serves the router on a listener, bounds its connections, and drains it at shutdown.
//!
//! A connection ends if its client does not send the head of a request, a further request, or does not
//! read the response, each for too long ([`places`]). A generation whose client does not read is then
//! cancelled and recorded, as if the client had disconnected. [`places`] bounds their number, and the number of
//! files and sockets that the process may have open bounds [`places`].

mod places;
mod tls;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use axum::serve::Listener;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use hone_core::files::{free_bytes, raise_open_limit};
use hone_core::metrics::Metrics;
use hone_core::types::now_ms;

use crate::config::{ConnectionsConfig, ServerConfig};
use crate::routes::{crowded, router, starting};
use crate::state::AppState;
use places::{Activity, ConnectionPlace, GuardedBody, IDLE, Patience, Places, WatchedStream};

pub use tls::Tls;

/// Connections leave a quarter of the process's open files to ledger, models and sandbox, but at most this many.
const MOST_OTHERS: u64 = 512;
/// Interval at which shutdown polls the number of requests in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Consecutive polls without a request after which shutdown stops waiting for open connections.
const IDLE_POLLS: u32 = 10;

/// A server from its first connection on. Until [`Self::finish`], all but `/livez` and `/metrics` are 503.
#[derive(Clone)]
pub struct Startup {
    config: Arc<ServerConfig>,
    metrics: Arc<Metrics>,
    /// [`AppState::ready`].
    ready: Arc<AtomicBool>,
    tls: Arc<Tls>,
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
    pub fn finish(&self, state: impl Into<Arc<AppState>>) {
        let state = state.into();
        let _loaded = self.loaded.get_or_init(|| {
            let (dir, keys, tls) =
                (state.disk.dir.clone(), Arc::clone(&state.keys), Arc::clone(&self.tls));
            self.metrics.read_with(move |metrics| {
                if let Ok(free) = free_bytes(&dir) {
                    metrics.data_free.set(i64::try_from(free).unwrap_or(i64::MAX));
                }
                keys.report(metrics, now_ms());
                tls.report(metrics);
            });
            router(state)
        });
    }
}

/// Serves requests on `listener`, probes also before the model is loaded, until `shutdown` completes. Then running
/// requests may finish for up to `server.shutdown_grace_seconds`.
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

/// The number of connections that the system permits, up to `wanted`: each needs a descriptor.
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
    let ConnectionsConfig { head_seconds, idle_seconds, write_seconds, .. } = limits;
    let [head, idle, write] = [head_seconds, idle_seconds, write_seconds].map(Duration::from_secs);
    Patience { head, idle, write }
}

/// Serves connections until `shutdown` completes, and the open ones to their end. Dropping the future ends them.
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
            (stream, peer, connections.places.wait(true).await)
        };
        let (stream, peer, place) = tokio::select! {
            () = shutdown.as_mut() => break,
            next = next => next,
        };
        // Nagle's algorithm would delay each streamed token, by up to 40 ms on Linux.
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

/// Completes when no request has run for [`IDLE_POLLS`] polls after `begins`, or after the grace period. The server
/// itself waits for every open connection, even for those that never send a request.
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

// One connection.

/// What is answered on a reserved place.
const PROBES: [&str; 3] = ["/livez", "/readyz", "/metrics"];
/// How long a connection on a reserved place may take to send the head of its request.
const RESERVED_HEAD: Duration = Duration::from_secs(1);
/// The reason of a connection that is closed because its TLS handshake failed or took too long.
const HANDSHAKE: &str = "handshake";
/// The reason of a connection that is closed for another one.
const CROWDED: &str = "crowded";

/// What all connections share.
struct Connections {
    startup: Startup,
    patience: Patience,
    places: Places,
}

impl Connections {
    /// Interval of the checks for connections that wait too long.
    fn tick(&self) -> Duration {
        let Patience { head, idle, write } = self.patience;
        (head.min(idle).min(write) / 4).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    /// Serves a client, with TLS if there is a certificate. The handshake may take as long as a request's head.
    pub async fn serve(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        place: ConnectionPlace,
        mut shutdown: watch::Receiver<bool>,
    ) {
        let activity = Activity::new(place.is_reserved);
        let _listed = self.places.list(&activity, &self.startup.metrics);
        let Some(acceptor) = self.startup.tls.acceptor() else {
            return self.serve_requests(stream, peer, place, activity, shutdown).await;
        };
        let limit = self.longest_head(place.is_reserved);
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

    /// Serves requests until the client ends the connection or waits too long, or until `shutdown` has a value.
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
                Ok::<_, Infallible>(response.map(|body| GuardedBody { body, guard: Some(active) }))
            }
        });
        let stream = TokioIo::new(WatchedStream { inner: stream, activity: activity.clone() });
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
                _ = ticks.tick() => {
                    let Some(reason) = activity.overdue(&self.patience_at(&activity)) else {
                        continue;
                    };
                    self.count_closed(peer, reason);
                    if reason != IDLE || is_ending {
                        return;
                    }
                }
                _ = shutdown.changed(), if !is_ending => {}
                is_idle = activity.asked(), if !is_ending => {
                    self.count_closed(peer, CROWDED);
                    if !is_idle {
                        return;
                    }
                }
            }
            // A request that arrives at this moment is not lost with an idle connection.
            is_ending = true;
            connection.as_mut().graceful_shutdown();
        }
    }

    /// Answers a request. On a reserved place only a probe is answered, and the connection ends.
    async fn answer(
        &self,
        request: Request<Body>,
        place: &mut ConnectionPlace,
        activity: &Activity,
    ) -> Result<Response, Infallible> {
        let is_open = PROBES.contains(&request.uri().path()) || self.places.open(place).await;
        if !place.is_reserved {
            activity.leave_reserved();
        }
        let Startup { loaded, starting, crowded, .. } = &self.startup;
        let app = if is_open { loaded.get().unwrap_or(starting) } else { crowded };
        let mut response = TowerToHyperService::new(app.clone()).call(request).await?;
        if place.is_reserved {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }

    /// How long a connection may wait for its client. On a reserved place the request must be sent at once.
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
