//! The places of connections, and what a connection does, so that one that does nothing for too long can be closed.
//!
//! [`Places`] has `server.connections.max` for every request, and some more for probes. Without the latter a server
//! whose clients occupy every place would not answer its liveness check, and would be restarted because it is busy. A
//! connection that has one answers one probe and ends. Another request gets an ordinary place if one becomes free
//! soon, and is refused otherwise.
//!
//! For a client that waits, the connection is closed that waits longest for its own client: one without a request,
//! else one without a whole head, else one without a whole body. [`WatchedStream`] reports reads and writes, and
//! [`GuardedBody`] the end of a request or a response. [`Activity`] keeps since when the connection waits for its
//! client.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use scopeguard::guard;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use hone_core::metrics::Metrics;

/// Places beyond `server.connections.max`.
pub(super) const RESERVED: usize = 32;
/// Requests on reserved places that wait for an ordinary one. Probes have the others.
const WAITING: usize = RESERVED / 2;
/// How long such a request waits.
const WAIT: Duration = Duration::from_secs(1);
/// Interval at which further connections are asked to end.
const ASK_INTERVAL: Duration = Duration::from_millis(25);

/// The places of all connections.
pub(super) struct Places {
    ordinary: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    waiting: Semaphore,
    open: Mutex<OpenConnections>,
}

/// The connections that may be asked to end, by number.
#[derive(Default)]
struct OpenConnections {
    last: u64,
    activities: BTreeMap<u64, Activity>,
}

/// The place of one connection. Dropping it frees the place.
pub(super) struct ConnectionPlace {
    /// `None` only if the semaphore is closed, which it never is.
    _permit: Option<OwnedSemaphorePermit>,
    /// Whether only probes are answered.
    pub is_reserved: bool,
}

impl Places {
    /// `most` ordinary places.
    pub fn new(most: usize) -> Self {
        Self {
            ordinary: Arc::new(Semaphore::new(most)),
            reserved: Arc::new(Semaphore::new(RESERVED)),
            waiting: Semaphore::new(WAITING),
            open: Mutex::default(),
        }
    }

    /// Lists a connection among those that may be asked to end, and in the gauge of open ones, until what is returned
    /// is dropped.
    pub fn list<'a>(&'a self, activity: &Activity, metrics: &'a Metrics) -> impl Sized + use<'a> {
        metrics.http_connections.inc();
        let mut open = self.open.lock();
        open.last += 1;
        let number = open.last;
        open.activities.insert(number, activity.clone());
        guard((), move |()| {
            self.open.lock().activities.remove(&number);
            metrics.http_connections.dec();
        })
    }

    /// An ordinary place, or a reserved one if those are `also_reserved`. Connections are asked to end until there is
    /// one.
    pub async fn wait(&self, also_reserved: bool) -> ConnectionPlace {
        let mut asks = tokio::time::interval(ASK_INTERVAL);
        loop {
            tokio::select! {
                biased;
                permit = self.ordinary.clone().acquire_owned() => {
                    return ConnectionPlace { _permit: permit.ok(), is_reserved: false };
                }
                permit = self.reserved.clone().acquire_owned(), if also_reserved => {
                    return ConnectionPlace { _permit: permit.ok(), is_reserved: true };
                }
                _ = asks.tick() => self.ask_idlest(also_reserved),
            }
        }
    }

    /// Exchanges a reserved place for an ordinary one, for which connections are asked to end, if one is free soon.
    /// Returns whether the place is an ordinary one now.
    pub async fn open(&self, place: &mut ConnectionPlace) -> bool {
        if !place.is_reserved {
            return true;
        }
        let Ok(_waiting) = self.waiting.try_acquire() else { return false };
        if let Ok(ordinary) = timeout(WAIT, self.wait(false)).await {
            *place = ordinary;
        }
        !place.is_reserved
    }

    /// Asks the connection to end that waits longest for its client, on an ordinary place or also on a reserved one.
    fn ask_idlest(&self, also_reserved: bool) {
        let open = self.open.lock();
        let may_end = |activity: &&Activity| also_reserved || !activity.is_reserved();
        let waiting = open.activities.values().filter(may_end);
        let waiting = waiting.filter_map(|activity| Some((activity.idleness()?, activity)));
        if let Some((_, idlest)) = waiting.max_by_key(|(idleness, _)| *idleness) {
            idlest.ask();
        }
    }
}

// What one connection does.

/// How long a client may take to send a head or a body before its connection may be closed for another one.
const GRACE: Duration = Duration::from_millis(100);

/// How long a connection may wait for its client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For the rest of a request's head, from its first byte or from the beginning of the connection on.
    pub head: Duration,
    /// For the next request.
    pub idle: Duration,
    /// For the client to read more of a response.
    pub write: Duration,
}

/// The reasons why a connection is closed: the head of a request did not arrive, no further request arrived, or the
/// client does not read.
pub(super) const HEAD: &str = "head";
pub(super) const IDLE: &str = "idle";
pub(super) const WRITE: &str = "write";

#[derive(Clone, Debug)]
pub(super) struct Activity(Arc<ActivityCell>);

#[derive(Debug)]
struct ActivityCell {
    state: Mutex<ActivityState>,
    /// Asks the connection to end.
    asked: Notify,
}

#[derive(Debug)]
struct ActivityState {
    /// Requests without the end of their response.
    requests: usize,
    /// Whether the head of a request is expected, rather than that a client may send another request.
    in_head: bool,
    /// Whether the body of a request is arriving.
    in_body: bool,
    is_reserved: bool,
    is_asked: bool,
    /// Since when the connection waits for a request, or for the body of the last one.
    since: Instant,
    /// Since when the client reads nothing.
    blocked: Option<Instant>,
}

/// What a connection waits for, and how long: the greatest is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Idleness {
    Body(Duration),
    Head(Duration),
    Idle(Duration),
}

/// A body with a guard, which is dropped at the body's end.
pub(super) struct GuardedBody<B, G> {
    pub body: B,
    pub guard: Option<G>,
}

/// A stream that reports reads and writes.
pub(super) struct WatchedStream<S> {
    pub inner: S,
    pub activity: Activity,
}

impl Activity {
    /// A connection that has sent nothing yet, on a reserved place or an ordinary one.
    pub fn new(is_reserved: bool) -> Self {
        let state = ActivityState {
            requests: 0,
            in_head: true,
            in_body: false,
            is_reserved,
            is_asked: false,
            since: Instant::now(),
            blocked: None,
        };
        Self(Arc::new(ActivityCell { state: Mutex::new(state), asked: Notify::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        self.0.state.lock()
    }

    /// A request begins, until what is returned is dropped.
    pub fn begin(&self) -> impl Unpin + Send + use<> {
        let mut state = self.lock();
        state.requests += 1;
        state.in_head = false;
        state.since = Instant::now();
        drop(state);
        guard(self.clone(), |own| {
            let mut state = own.lock();
            state.requests = state.requests.saturating_sub(1);
            state.since = Instant::now();
        })
    }

    pub fn receive(&self, body: Incoming) -> Body {
        self.lock().in_body = !body.is_end_stream();
        let arriving = guard(self.clone(), |own| own.lock().in_body = false);
        Body::new(GuardedBody { body, guard: Some(arriving) })
    }

    /// The connection has an ordinary place now. Its client could not be served before.
    pub fn leave_reserved(&self) {
        let mut state = self.lock();
        if state.is_reserved {
            state.is_reserved = false;
            state.since = Instant::now();
        }
    }

    pub fn is_reserved(&self) -> bool {
        self.lock().is_reserved
    }

    /// What the connection waits for; `None` if it is answering, was asked to end, or its client had too little time.
    pub fn idleness(&self) -> Option<Idleness> {
        let state = self.lock();
        let waited = state.since.elapsed();
        let idleness = match (state.requests, state.in_head) {
            (0, false) => Idleness::Idle(waited),
            (0, true) if waited >= GRACE => Idleness::Head(waited),
            (1.., _) if state.in_body && waited >= GRACE => Idleness::Body(waited),
            _ => return None,
        };
        (!state.is_asked).then_some(idleness)
    }

    pub fn ask(&self) {
        self.lock().is_asked = true;
        self.0.asked.notify_one();
    }

    /// Waits until the connection is asked to end while it waits. Returns whether it waits for another request.
    pub async fn asked(&self) -> bool {
        loop {
            self.0.asked.notified().await;
            let mut state = self.lock();
            if state.requests == 0 || state.in_body {
                return state.requests == 0 && !state.in_head;
            }
            // A request came in between.
            state.is_asked = false;
        }
    }

    /// Why the connection should be closed now; `None` if it should not.
    pub fn overdue(&self, patience: &Patience) -> Option<&'static str> {
        let state = self.lock();
        if state.blocked.is_some_and(|since| since.elapsed() >= patience.write) {
            return Some(WRITE);
        }
        let (limit, reason) = match state.in_head {
            true => (patience.head, HEAD),
            false => (patience.idle, IDLE),
        };
        (state.requests == 0 && state.since.elapsed() >= limit).then_some(reason)
    }

    fn received(&self) {
        let mut state = self.lock();
        if state.requests == 0 && !state.in_head {
            state.in_head = true;
            state.since = Instant::now();
        }
    }

    fn wrote<T>(&self, result: &Poll<T>) {
        let mut state = self.lock();
        match result {
            Poll::Pending => {
                state.blocked.get_or_insert_with(Instant::now);
            }
            Poll::Ready(_) => state.blocked = None,
        }
    }
}

impl<B: HttpBody + Unpin, G: Unpin> HttpBody for GuardedBody<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.guard = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.activity.received();
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.activity.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.activity.wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(cx);
        // A flush without anything to write is no progress.
        if result.is_pending() {
            self.activity.wrote(&result);
        }
        result
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn patience(head: Duration, idle: Duration, write: Duration) -> Patience {
        Patience { head, idle, write }
    }

    fn is_idle(activity: &Activity) -> bool {
        matches!(activity.idleness(), Some(Idleness::Idle(_)))
    }

    #[test]
    fn each_state_of_a_connection_has_its_own_patience() {
        let (none, activity) = (Duration::ZERO, Activity::new(false));
        // A new connection has to send a request.
        assert_eq!(activity.overdue(&patience(none, LONG, LONG)), Some(HEAD));
        assert_eq!(activity.overdue(&patience(LONG, none, none)), None);
        assert!(!is_idle(&activity));
        // While a request is answered, only the client's reading counts.
        let request = activity.begin();
        let second = activity.begin();
        assert_eq!(activity.overdue(&patience(none, none, none)), None);
        activity.wrote(&Poll::<()>::Pending);
        assert_eq!(activity.overdue(&patience(none, none, none)), Some(WRITE));
        activity.wrote(&Poll::Ready(()));
        assert_eq!(activity.overdue(&patience(none, none, none)), None);
        drop((request, second));
        // The next request may take longer, until it begins.
        assert!(is_idle(&activity));
        assert_eq!(activity.overdue(&patience(LONG, none, LONG)), Some(IDLE));
        assert_eq!(activity.overdue(&patience(none, LONG, LONG)), None);
        activity.received();
        assert!(!is_idle(&activity));
        assert_eq!(activity.overdue(&patience(none, LONG, LONG)), Some(HEAD));
    }

    #[tokio::test]
    async fn a_blocked_write_ends_with_the_next_bytes() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let (client, server) = tokio::io::duplex(8);
        let (activity, mut client) = (Activity::new(false), client);
        let mut watched = WatchedStream { inner: server, activity: activity.clone() };
        let request = activity.begin();
        let writes = tokio::spawn(async move {
            watched.write_all(&[1; 16]).await.unwrap();
            watched
        });
        let none = patience(LONG, LONG, Duration::ZERO);
        while activity.overdue(&none).is_none() {
            tokio::task::yield_now().await;
        }
        let mut read = [0; 16];
        client.read_exact(&mut read).await.unwrap();
        let mut watched = writes.await.unwrap();
        assert_eq!(activity.overdue(&none), None);
        drop(request);
        client.write_all(&[1]).await.unwrap();
        watched.read_exact(&mut read[..1]).await.unwrap();
        assert_eq!(activity.overdue(&patience(Duration::ZERO, LONG, LONG)), Some(HEAD));
    }

    #[tokio::test]
    async fn requests_that_wait_leave_reserved_places_to_probes() {
        let places = Arc::new(Places::new(1));
        let mut ordinary = places.wait(true).await;
        assert!(!ordinary.is_reserved && places.open(&mut ordinary).await);
        let mut reserved = Vec::new();
        for _ in 0..RESERVED {
            reserved.push(places.wait(true).await);
        }
        assert!(reserved.iter().all(|place| place.is_reserved));
        assert!(places.wait(true).now_or_never().is_none(), "all are taken");
        let mut waiting = Vec::new();
        for mut place in reserved.drain(..WAITING) {
            let places = Arc::clone(&places);
            waiting.push(tokio::spawn(async move { (places.open(&mut place).await, place) }));
        }
        while places.waiting.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let mut refused = reserved.pop().unwrap();
        assert!(!places.open(&mut refused).await, "enough wait");
        drop((ordinary, refused, reserved));
        let mut opened = 0;
        let mut held = Vec::new();
        for task in waiting {
            let (open, place) = task.await.unwrap();
            opened += usize::from(open);
            held.push(place);
        }
        assert_eq!(opened, 1, "one place became free");
    }
}
