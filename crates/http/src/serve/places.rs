//! The places of connections: `server.connections.max` for every request, and some more for probes.
//!
//! Without the latter a server whose clients occupy every place would not answer its liveness check, and
//! would be restarted because it is busy. A connection that has one answers one probe and ends. Another
//! request gets an ordinary place if one becomes free soon, and is refused otherwise.
//!
//! For a client that waits, the connection is closed that waits longest for its own client: one without a request,
//! else one without a whole head, else one without a whole body.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use hone_core::metrics::Metrics;

use super::activity::Activity;

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

/// A connection among those that may be asked to end, and in the gauge of open ones.
pub(super) struct ListedConnection<'a> {
    places: &'a Places,
    number: u64,
    metrics: &'a Metrics,
}

impl Drop for ListedConnection<'_> {
    fn drop(&mut self) {
        self.places.open.lock().activities.remove(&self.number);
        self.metrics.http_connections.dec();
    }
}

/// The place of one connection. Dropping it frees the place.
pub(super) struct ConnectionPlace {
    /// `None` only if the semaphore is closed, which it never is.
    _permit: Option<OwnedSemaphorePermit>,
    is_reserved: bool,
}

impl ConnectionPlace {
    /// Whether only probes are answered.
    pub fn is_reserved(&self) -> bool {
        self.is_reserved
    }
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

    /// Lists a connection among those that may be asked to end, until what is returned is dropped.
    pub fn list<'a>(&'a self, activity: &Activity, metrics: &'a Metrics) -> ListedConnection<'a> {
        metrics.http_connections.inc();
        let mut open = self.open.lock();
        open.last += 1;
        let number = open.last;
        open.activities.insert(number, activity.clone());
        ListedConnection { places: self, number, metrics }
    }

    /// A place for a new connection.
    pub async fn take(&self) -> ConnectionPlace {
        self.wait(true).await
    }

    /// An ordinary place, or a reserved one if those are `also_reserved`. Connections are asked to end until there is
    /// one.
    async fn wait(&self, also_reserved: bool) -> ConnectionPlace {
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

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn requests_that_wait_leave_reserved_places_to_probes() {
        let places = Arc::new(Places::new(1));
        let mut ordinary = places.take().await;
        assert!(!ordinary.is_reserved() && places.open(&mut ordinary).await);
        let mut reserved = Vec::new();
        for _ in 0..RESERVED {
            reserved.push(places.take().await);
        }
        assert!(reserved.iter().all(ConnectionPlace::is_reserved));
        assert!(places.take().now_or_never().is_none(), "all are taken");
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
