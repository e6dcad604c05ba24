//! What is observed of the HTTP requests: their number and size, and the store's time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use chrono::DateTime;
use hone_core::types::UnixMillis;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{Certificate, ClientOptions};
use parking_lot::Mutex;

/// What was requested since the bucket was opened. Each attempt counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketUse {
    /// All requests.
    pub requests: u64,
    /// Those that are not reads by the method GET.
    pub writes: u64,
    /// Those that got no answer or one with a status from 500 on.
    pub failures: u64,
    /// Bytes of the requests' bodies.
    pub sent: u64,
    /// Bytes of the answers' bodies as announced.
    pub received: u64,
}

/// What the requests of one bucket have in common.
#[derive(Debug)]
pub(super) struct Wire {
    used: Mutex<BucketUse>,
    opened: Instant,
    /// The store's time at `opened`, or less; 0 before the first answer that has a date.
    store_time: AtomicU64,
}

impl Wire {
    pub(super) fn new() -> Self {
        Self { used: Mutex::default(), opened: Instant::now(), store_time: AtomicU64::new(0) }
    }

    pub(super) fn used(&self) -> BucketUse {
        *self.used.lock()
    }

    /// Milliseconds of the local monotonic clock, which cannot be set.
    fn elapsed(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn now(&self) -> Option<UnixMillis> {
        let at_open = self.store_time.load(Ordering::Relaxed);
        (at_open > 0).then(|| at_open.saturating_add(self.elapsed()))
    }

    /// An answer arrived that the store dated `date`, rounded down to a second.
    pub(super) fn observe(&self, date: UnixMillis) {
        self.store_time.fetch_max(date.saturating_sub(self.elapsed()), Ordering::Relaxed);
    }
}

/// Makes HTTP clients that are observed and trust further certificates.
#[derive(Debug)]
pub(super) struct WireConnector {
    pub(super) wire: Arc<Wire>,
    pub(super) certificates: Vec<Certificate>,
}

impl HttpConnector for WireConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut options = options.clone();
        for certificate in &self.certificates {
            options = options.with_root_certificate(certificate.clone());
        }
        let connector = ReqwestConnector::default();
        // A minimal container has no system certificates. Plain HTTP or the CA file can do without.
        let client = connector
            .connect(&options)
            .or_else(|_| connector.connect(&options.with_no_system_certificates(true)))?;
        Ok(HttpClient::new(WireService { client, wire: Arc::clone(&self.wire) }))
    }
}

#[derive(Debug)]
struct WireService {
    client: HttpClient,
    wire: Arc<Wire>,
}

#[async_trait]
impl HttpService for WireService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_write = request.method().as_str() != "GET";
        let sent = request.body().content_length() as u64;
        let result = self.client.execute(request).await;
        let header = |name| result.as_ref().ok()?.headers().get(name)?.to_str().ok();
        let length = header("content-length").and_then(|length| length.parse::<u64>().ok());
        let date = header("date").and_then(|date| DateTime::parse_from_rfc2822(date).ok());
        let millis = date.map_or(0, |date| date.timestamp_millis());
        self.wire.observe(u64::try_from(millis).unwrap_or(0));
        let failed = result.as_ref().map_or(true, |answer| answer.status().is_server_error());
        let mut used = self.wire.used.lock();
        used.requests += 1;
        used.writes += u64::from(is_write);
        used.failures += u64::from(failed);
        used.sent += sent;
        used.received += length.unwrap_or(0);
        drop(used);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Wire {
        /// Sets the clock forward or back.
        pub(in crate::bucket) fn shift(&self, millis: i64) {
            let at_open = self.store_time.load(Ordering::Relaxed);
            self.store_time.store(at_open.saturating_add_signed(millis), Ordering::Relaxed);
        }
    }

    #[test]
    fn an_older_date_does_not_set_the_clock_back() {
        let wire = Wire::new();
        assert_eq!(wire.now(), None);
        wire.observe(5_000);
        wire.observe(4_000);
        assert!((5_000..60_000).contains(&wire.now().unwrap()));
        wire.observe(90_000);
        assert!(wire.now().unwrap() >= 90_000);
    }
}
