//! One URL that JSON is posted to.

use std::time::{Duration, Instant, SystemTime};

use chrono::DateTime;
use parking_lot::Mutex;
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Url, redirect};

use super::{CallError, CallEvents, CallLimits};

/// One URL that JSON is posted to.
pub(crate) struct Endpoint {
    client: reqwest::Client,
    url: String,
    limits: CallLimits,
    breaker: Breaker,
}

impl Endpoint {
    /// Prepares calls to `url`.
    /// Errors: if the HTTP client cannot be built.
    pub(crate) fn new(url: &str, limits: CallLimits) -> Result<Self, CallError> {
        // No proxy from the environment, which only the configuration may read.
        let mut builder = reqwest::Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .timeout(limits.timeout);
        if Url::parse(url).is_ok_and(|u| u.scheme() == "http") {
            // Needs no system certificates, which a minimal container lacks.
            builder = builder.tls_certs_only([]);
        }
        let client = builder.build().map_err(|e| CallError::Client(e.without_url()))?;
        let breaker = Breaker::new(limits.breaker_failures, limits.breaker_cooldown);
        Ok(Self { client, url: url.to_owned(), limits, breaker })
    }

    /// Posts `body`, with retries; `headers` builds the headers of each attempt.
    /// Errors: the last attempt's.
    pub(crate) async fn post(
        &self,
        body: &[u8],
        headers: impl Fn() -> HeaderMap,
        events: &CallEvents,
    ) -> Result<Vec<u8>, CallError> {
        let mut retries = 0;
        loop {
            let permit = self.breaker.admit(Instant::now()).ok_or(CallError::CircuitOpen)?;
            let start = Instant::now();
            let result = self.attempt(body, headers()).await;
            let outcome = result.as_ref().map_or_else(CallError::reason, |_| "ok");
            events.attempt(outcome, start.elapsed());
            let failed = result.as_ref().is_err_and(CallError::is_service_failure);
            if let Some(opened) = permit.settle(failed.then(Instant::now)) {
                events.circuit(opened);
            }
            let error = match result {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let requested = match error {
                CallError::Status(_, retry_after) => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            // A longer `Retry-After` would delay the group; an earlier retry would be refused.
            if retries == self.limits.retries
                || !error.is_retryable()
                || requested > self.limits.max_backoff
            {
                return Err(error);
            }
            let delay = backoff(&self.limits, retries, rand::random());
            tokio::time::sleep(delay.max(requested)).await;
            retries += 1;
        }
    }

    async fn attempt(&self, body: &[u8], headers: HeaderMap) -> Result<Vec<u8>, CallError> {
        let request = self
            .client
            .post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .headers(headers)
            .body(body.to_vec());
        let mut response = request.send().await.map_err(|e| self.transport_error(e))?;
        if !response.status().is_success() {
            let wait = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok());
            let wait = wait.and_then(|v| retry_after(v, SystemTime::now()));
            return Err(CallError::Status(response.status().as_u16(), wait));
        }
        let limit = self.limits.max_response_bytes;
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.transport_error(e))? {
            if answer.len() + chunk.len() > limit {
                return Err(CallError::TooLarge(limit));
            }
            answer.extend_from_slice(&chunk);
        }
        Ok(answer)
    }

    fn transport_error(&self, error: reqwest::Error) -> CallError {
        let error = error.without_url();
        if error.is_connect() {
            CallError::Connect(error)
        } else if error.is_timeout() {
            CallError::Timeout(self.limits.timeout)
        } else {
            CallError::Broken(error)
        }
    }
}

/// The delay before retry `n` (from 0): with `d = min(max_backoff, backoff x 2^n)`, a value between
/// `d / 2` and `d`, chosen by `unit` in 0..1. Callers that failed together so retry at different
/// times ("equal jitter", AWS Architecture Blog).
pub(super) fn backoff(limits: &CallLimits, n: u32, unit: f64) -> Duration {
    let doubled = limits.backoff.saturating_mul(2_u32.saturating_pow(n));
    doubled.min(limits.max_backoff).mul_f64(0.5 + 0.5 * unit.clamp(0.0, 1.0))
}

/// Parses `Retry-After` (RFC 9110, 10.2.3): seconds, or a date, which may be in the past.
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = SystemTime::from(DateTime::parse_from_rfc2822(value).ok()?);
    Some(date.duration_since(now).unwrap_or_default())
}

// A circuit breaker (Nygard, *Release It!*): after consecutive failures no request is sent for a
// while, then one request probes the service; its success closes the circuit.

enum CircuitState {
    /// Requests are sent; the last `failures` attempts have failed.
    Closed { failures: u32 },
    /// No request is sent before `until`.
    Open { until: Instant },
    /// One request, started at `since`, tests whether the service has recovered.
    Probing { since: Instant },
}

/// Decides whether a request may be sent.
pub(super) struct Breaker {
    threshold: u32,
    cooldown: Duration,
    state: Mutex<CircuitState>,
}

impl Breaker {
    /// A breaker that opens for `cooldown` after `threshold` consecutive failures.
    pub(super) fn new(threshold: u32, cooldown: Duration) -> Self {
        Self { threshold, cooldown, state: Mutex::new(CircuitState::Closed { failures: 0 }) }
    }

    /// A permit for one attempt; `None` while the circuit is open or probing.
    pub(super) fn admit(&self, now: Instant) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let probe = match *state {
            CircuitState::Closed { .. } => false,
            CircuitState::Open { until } if now >= until => {
                *state = CircuitState::Probing { since: now };
                true
            }
            CircuitState::Open { .. } | CircuitState::Probing { .. } => return None,
        };
        Some(Permit { breaker: self, probe, settled: false })
    }
}

/// Permission for one attempt. If a probe's permit is dropped without a result (its future was
/// cancelled), the next request probes.
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    probe: bool,
    settled: bool,
}

impl Permit<'_> {
    /// Reports the attempt, with the time of a failure. Returns whether the circuit opened, for the first time or
    /// after a failed probe (true), or closed (false); `None` if it did not change.
    pub(super) fn settle(mut self, failed: Option<Instant>) -> Option<bool> {
        self.settled = true;
        let Breaker { threshold, cooldown, .. } = *self.breaker;
        let mut state = self.breaker.state.lock();
        match *state {
            CircuitState::Closed { failures } => {
                let failures = if failed.is_some() { failures + 1 } else { 0 };
                if failures < threshold {
                    *state = CircuitState::Closed { failures };
                    return None;
                }
            }
            CircuitState::Probing { .. } if self.probe => {}
            // The attempt started before the circuit opened, so it does not show the current state.
            CircuitState::Open { .. } | CircuitState::Probing { .. } => return None,
        }
        *state = match failed {
            Some(now) => CircuitState::Open { until: now + cooldown },
            None => CircuitState::Closed { failures: 0 },
        };
        Some(failed.is_some())
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.settled || !self.probe {
            return;
        }
        let mut state = self.breaker.state.lock();
        if let CircuitState::Probing { since } = *state {
            *state = CircuitState::Open { until: since };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::webhook::WebhookParams;

    #[test]
    fn delays_double_up_to_the_maximum() {
        let limits = WebhookParams::new("https://a.example/").limits();
        let at = |n, unit| backoff(&limits, n, unit).as_millis();
        assert_eq!([at(0, 1.0), at(1, 1.0), at(2, 1.0), at(10, 1.0)], [200, 400, 800, 10_000]);
        assert_eq!([at(0, 0.0), at(10, 0.0)], [100, 5_000]);
    }

    #[test]
    fn parses_seconds_and_dates() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777); // RFC 9110's example
        let read = |text| retry_after(text, now).map(|d| d.as_secs());
        assert_eq!(read("120"), Some(120));
        assert_eq!(read("Sun, 06 Nov 1994 08:49:47 GMT"), Some(10));
        assert_eq!(read("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0));
        assert_eq!(read("-1"), None);
        assert_eq!(read("soon"), None);
    }

    proptest! {
        #[test]
        fn a_delay_stays_within_its_bounds(n in 0_u32..100, unit in 0.0_f64..1.0) {
            let limits = WebhookParams::new("https://a.example/").limits();
            let wait = backoff(&limits, n, unit);
            prop_assert!(wait >= limits.backoff / 2 && wait <= limits.max_backoff);
        }
    }

    const COOLDOWN: Duration = Duration::from_secs(10);

    #[test]
    fn opens_after_consecutive_failures_and_closes_after_a_probe() {
        let breaker = Breaker::new(3, COOLDOWN);
        let start = Instant::now();
        let fail = |now| breaker.admit(now).unwrap().settle(Some(now));
        assert_eq!([fail(start), fail(start)], [None; 2]);
        // A success resets the count.
        assert_eq!(breaker.admit(start).unwrap().settle(None), None);
        assert_eq!([fail(start), fail(start), fail(start)], [None, None, Some(true)]);
        assert!(breaker.admit(start + COOLDOWN / 2).is_none());
        // One probe at a time; a failed one opens the circuit for another cooldown.
        let later = start + COOLDOWN;
        let probe = breaker.admit(later).unwrap();
        assert!(breaker.admit(later).is_none());
        assert_eq!(probe.settle(Some(later)), Some(true));
        assert!(breaker.admit(later + COOLDOWN / 2).is_none());
        let back = later + COOLDOWN;
        assert_eq!(breaker.admit(back).unwrap().settle(None), Some(false));
        assert_eq!([fail(back), fail(back), fail(back)], [None, None, Some(true)]);
    }

    #[test]
    fn after_a_cancelled_probe_the_next_request_probes() {
        let breaker = Breaker::new(1, COOLDOWN);
        let start = Instant::now();
        assert_eq!(breaker.admit(start).unwrap().settle(Some(start)), Some(true));
        drop(breaker.admit(start + COOLDOWN).unwrap());
        assert_eq!(breaker.admit(start + COOLDOWN).unwrap().settle(None), Some(false));
    }

    #[test]
    fn results_of_earlier_attempts_do_not_change_an_open_circuit() {
        let breaker = Breaker::new(1, COOLDOWN);
        let start = Instant::now();
        let (first, second, third) = (
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
        );
        assert_eq!(first.settle(Some(start)), Some(true));
        assert_eq!(second.settle(None), None);
        assert!(breaker.admit(start).is_none());
        let probe = breaker.admit(start + COOLDOWN).unwrap();
        assert_eq!(third.settle(Some(start + COOLDOWN)), None);
        assert_eq!(probe.settle(None), Some(false));
    }
}
