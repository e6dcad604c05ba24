//! The places of connections: `server.connections.max` for every request, and some more for probes.
//!
//! Without the latter a server whose clients occupy every place would not answer its liveness check, and
//! would be restarted because it is busy. A connection that has one answers one probe and ends. Another
//! request gets an ordinary place if one becomes free soon, and is refused otherwise.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Places beyond `server.connections.max`.
const RESERVED: usize = 32;
/// Requests on reserved places that wait for an ordinary one. Probes have the others.
const WAITING: usize = RESERVED / 2;
/// How long such a request waits.
const WAIT: Duration = Duration::from_secs(1);
/// Interval at which idle connections are asked to end.
const ASK_INTERVAL: Duration = Duration::from_millis(25);

/// The places of all connections.
pub(super) struct Places {
    ordinary: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    waiting: Semaphore,
    /// Asks idle connections to end, because all places are taken.
    crowded: Notify,
}

/// The place of one connection. Dropping it frees the place.
pub(super) struct Place {
    /// `None` only if the semaphore is closed, which it never is.
    _permit: Option<OwnedSemaphorePermit>,
    is_reserved: bool,
}

impl Place {
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
            crowded: Notify::new(),
        }
    }

    /// A place for a new connection. It waits if even the reserved ones are taken.
    pub async fn take(&self) -> Place {
        tokio::select! {
            biased;
            permit = self.ordinary.clone().acquire_owned() => {
                Place { _permit: permit.ok(), is_reserved: false }
            }
            permit = self.reserved.clone().acquire_owned() => {
                Place { _permit: permit.ok(), is_reserved: true }
            }
        }
    }

    /// Exchanges a reserved place for an ordinary one, if one becomes free soon. Idle connections are asked
    /// to end. Returns whether the place is an ordinary one now.
    pub async fn open(&self, place: &mut Place) -> bool {
        if !place.is_reserved {
            return true;
        }
        let Ok(_waiting) = self.waiting.try_acquire() else { return false };
        if let Ok(Some(permit)) = timeout(WAIT, self.freed()).await {
            *place = Place { _permit: Some(permit), is_reserved: false };
        }
        !place.is_reserved
    }

    /// Completes when idle connections are asked to end.
    pub fn crowded(&self) -> Notified<'_> {
        self.crowded.notified()
    }

    /// Asks idle connections to end until there is a place.
    async fn freed(&self) -> Option<OwnedSemaphorePermit> {
        let mut asks = tokio::time::interval(ASK_INTERVAL);
        loop {
            tokio::select! {
                place = self.ordinary.clone().acquire_owned() => return place.ok(),
                _ = asks.tick() => self.crowded.notify_waiters(),
            }
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
        assert!(reserved.iter().all(Place::is_reserved));
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
