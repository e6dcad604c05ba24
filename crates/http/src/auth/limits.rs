//! The limits of one key: requests and tokens a minute, and completions at once.
//!
//! Requests and tokens have a bucket each, which holds the allowance of a minute and fills evenly. Tokens
//! are reserved when a completion begins, by an estimate, and settled when it has ended. Its bucket may
//! fall below zero, so that the rate is exact in the long run whatever the estimate was. A request for completions
//! counts from its head on, so that a key cannot have more of them than it may by sending their bodies slowly.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use parking_lot::{Mutex, MutexGuard};

use crate::config::KeyLimits;
use crate::error::ApiError;

/// The limits of a key, and what it has used of them.
#[derive(Debug)]
pub struct KeyLimiter {
    /// Name of the key.
    name: String,
    limits: KeyLimits,
    state: Mutex<LimiterState>,
}

#[derive(Debug)]
struct LimiterState {
    requests: MinuteBucket,
    tokens: MinuteBucket,
    /// Requests for completions that arrive, wait or run.
    running: u32,
}

/// An allowance that fills evenly.
#[derive(Clone, Debug)]
struct MinuteBucket {
    /// Capacity, and what flows in within a minute; 0 is no limit.
    limit: f64,
    level: f64,
    updated: Instant,
}

/// One of the requests for completions that a key may have at once, until it is dropped.
#[derive(Debug)]
pub struct KeySlot(Arc<KeyLimiter>);

/// The right of one request to sample completions. Dropping it settles what it used.
#[derive(Debug)]
pub struct KeyPermit {
    slot: Arc<KeySlot>,
    reserved: f64,
    /// Tokens of the prompt and the completions so far.
    pub used: usize,
}

impl MinuteBucket {
    fn new(limit: u32, now: Instant) -> Self {
        let limit = f64::from(limit);
        Self { limit, level: limit, updated: now }
    }

    fn refill(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.updated).as_secs_f64();
        self.level = (self.level + self.limit * seconds / 60.0).min(self.limit);
        self.updated = self.updated.max(now);
    }

    /// Takes `amount`, or all that the bucket can hold. Returns what it took, or how long to wait for enough.
    fn take(&mut self, amount: f64, now: Instant) -> Result<f64, Duration> {
        if self.limit == 0.0 {
            return Ok(0.0);
        }
        self.refill(now);
        let amount = amount.min(self.limit);
        if self.level < amount {
            return Err(self.until(amount));
        }
        self.level -= amount;
        Ok(amount)
    }

    /// Adds headers whose names and values consist of digits, lower-case letters and punctuation.
    fn insert(&self, headers: &mut HeaderMap, reset: String, name: impl Fn(&str) -> String) {
        let limit = format!("{:.0}", self.limit);
        // What can be taken at once.
        let remaining = format!("{:.0}", self.level.max(0.0).floor());
        for (part, value) in [("limit", limit), ("remaining", remaining), ("reset", reset)] {
            let value = HeaderValue::try_from(value);
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name(part)), value) {
                headers.insert(name, value);
            }
        }
    }

    /// The time until the bucket will have `amount`.
    fn until(&self, amount: f64) -> Duration {
        let seconds = (amount - self.level).max(0.0) * 60.0 / self.limit;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

impl KeyLimiter {
    pub fn new(name: &str, limits: KeyLimits) -> Arc<Self> {
        let now = Instant::now();
        let state = LimiterState {
            requests: MinuteBucket::new(limits.requests_per_minute, now),
            tokens: MinuteBucket::new(limits.tokens_per_minute, now),
            running: 0,
        };
        Arc::new(Self { name: name.to_owned(), limits, state: Mutex::new(state) })
    }

    /// Whether this is the state of a key with this name and these limits.
    pub fn is_of(&self, name: &str, limits: KeyLimits) -> bool {
        self.name == name && self.limits == limits
    }

    fn lock(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock()
    }

    /// Counts one request.
    pub fn count_request(&self, now: Instant) -> Result<(), ApiError> {
        let Err(wait) = self.lock().requests.take(1.0, now) else { return Ok(()) };
        let (name, most) = (&self.name, self.limits.requests_per_minute);
        let message = format!("the key {name:?} may send {most} requests a minute");
        Err(ApiError::limited("requests_per_minute", message, wait))
    }

    /// Counts a request for completions.
    pub fn enter(self: &Arc<Self>) -> Result<Arc<KeySlot>, ApiError> {
        let mut state = self.lock();
        let (name, most) = (&self.name, self.limits.concurrency);
        if most > 0 && state.running >= most {
            let message =
                format!("the key {name:?} may have {most} requests for completions at once");
            return Err(ApiError::limited("concurrency", message, Duration::ZERO));
        }
        state.running += 1;
        Ok(Arc::new(KeySlot(Arc::clone(self))))
    }

    /// Adds OpenAI's headers: the limits, what is left of them, and when they will be whole again.
    pub fn add_headers(&self, headers: &mut HeaderMap, now: Instant) {
        for (kind, bucket) in self.allowances(now) {
            let reset = shown(bucket.until(bucket.limit));
            bucket.insert(headers, reset, |part| format!("x-ratelimit-{part}-{kind}"));
        }
    }

    /// Adds Anthropic's headers with the same, and the moment at which the limits will be whole again.
    pub fn add_anthropic_headers(&self, headers: &mut HeaderMap, now: Instant) {
        for (kind, bucket) in self.allowances(now) {
            let reset = moment_after(Utc::now(), bucket.until(bucket.limit));
            bucket.insert(headers, reset, |part| format!("anthropic-ratelimit-{kind}-{part}"));
        }
    }

    /// The limits that exist, by what they count.
    fn allowances(&self, now: Instant) -> Vec<(&'static str, MinuteBucket)> {
        let mut state = self.lock();
        let LimiterState { requests, tokens, .. } = &mut *state;
        let mut allowances = Vec::with_capacity(2);
        for (kind, bucket) in [("requests", requests), ("tokens", tokens)] {
            if bucket.limit > 0.0 {
                bucket.refill(now);
                allowances.push((kind, bucket.clone()));
            }
        }
        allowances
    }
}

impl KeySlot {
    /// Begins to sample, which takes about `tokens` tokens.
    pub fn begin(self: &Arc<Self>, tokens: u64, now: Instant) -> Result<KeyPermit, ApiError> {
        let limiter = &self.0;
        let reserved = limiter.lock().tokens.take(tokens as f64, now).map_err(|wait| {
            let (name, most) = (&limiter.name, limiter.limits.tokens_per_minute);
            let message = format!(
                "the key {name:?} may use {most} tokens a minute; this request may take {tokens}"
            );
            ApiError::limited("tokens_per_minute", message, wait)
        })?;
        Ok(KeyPermit { slot: Arc::clone(self), reserved, used: 0 })
    }
}

impl Drop for KeySlot {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running = state.running.saturating_sub(1);
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        let mut state = self.slot.0.lock();
        let tokens = &mut state.tokens;
        tokens.level = (tokens.level + self.reserved - self.used as f64).min(tokens.limit);
    }
}

/// A moment as RFC 3339 writes it, in whole seconds and not too early.
fn moment_after(now: DateTime<Utc>, time: Duration) -> String {
    let time = TimeDelta::from_std(time).unwrap_or_default() + TimeDelta::milliseconds(999);
    let moment = now.checked_add_signed(time).unwrap_or(now);
    moment.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// A duration as OpenAI writes it, such as `20ms`, `1s` or `6m0s`.
fn shown(time: Duration) -> String {
    if time.as_secs() == 0 && time.subsec_millis() > 0 {
        return format!("{}ms", time.subsec_millis());
    }
    match time.as_secs_f64().ceil() as u64 {
        seconds if seconds < 60 => format!("{seconds}s"),
        seconds => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use axum::response::IntoResponse;

    use super::*;

    fn limiter(requests: u32, tokens: u32, concurrency: u32) -> Arc<KeyLimiter> {
        let limits =
            KeyLimits { requests_per_minute: requests, tokens_per_minute: tokens, concurrency };
        KeyLimiter::new("web", limits)
    }

    fn begin(limiter: &Arc<KeyLimiter>, tokens: u64, now: Instant) -> Result<KeyPermit, ApiError> {
        limiter.enter()?.begin(tokens, now)
    }

    /// The seconds after which a refused request may be sent again.
    fn retry<T>(result: Result<T, ApiError>) -> Option<String> {
        let response = result.err()?.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        Some(response.headers()["retry-after"].to_str().unwrap().to_owned())
    }

    fn headers(limiter: &KeyLimiter, now: Instant) -> Vec<String> {
        let mut headers = HeaderMap::new();
        limiter.add_headers(&mut headers, now);
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            format!(
                "{}={}",
                name.as_str().trim_start_matches("x-ratelimit-"),
                value.to_str().unwrap()
            )
        };
        let mut lines: Vec<String> = headers.iter().map(line).collect();
        lines.sort();
        lines
    }

    #[test]
    fn requests_are_limited_to_the_rate() {
        let (limiter, start) = (limiter(3, 0, 0), Instant::now());
        for _ in 0..3 {
            assert_eq!(retry(limiter.count_request(start)), None);
        }
        assert_eq!(retry(limiter.count_request(start)).as_deref(), Some("20"));
        let later = start + Duration::from_secs(30);
        assert_eq!(retry(limiter.count_request(later)), None);
        assert_eq!(retry(limiter.count_request(later)).as_deref(), Some("10"));
        // A time before the last one, as of another thread, changes nothing.
        assert_eq!(retry(limiter.count_request(start)).as_deref(), Some("10"));
        assert_eq!(retry(limiter.count_request(later)).as_deref(), Some("10"));
        let rested = later + Duration::from_secs(3600);
        assert_eq!((0..9).filter(|_| limiter.count_request(rested).is_ok()).count(), 3);
    }

    #[test]
    fn tokens_are_reserved_and_settled() {
        let (limiter, start) = (limiter(0, 600, 0), Instant::now());
        let mut first = begin(&limiter, 400, start).unwrap();
        assert_eq!(retry(begin(&limiter, 300, start)).as_deref(), Some("10"));
        first.used = 100;
        drop(first);
        let mut second = begin(&limiter, 500, start).unwrap();
        // It takes more than it reserved, so the bucket is in debt.
        second.used = 700;
        drop(second);
        assert_eq!(
            headers(&limiter, start),
            ["limit-tokens=600", "remaining-tokens=0", "reset-tokens=1m20s"]
        );
        assert_eq!(retry(begin(&limiter, 1, start)).as_deref(), Some("21"));
        // A request larger than the bucket waits until it is full.
        let rested = start + Duration::from_secs(80);
        let huge = begin(&limiter, 1_000_000, rested).unwrap();
        drop(huge);
        assert_eq!(headers(&limiter, rested)[1], "remaining-tokens=600");
    }

    #[test]
    fn completions_at_once_are_limited_and_without_limits_nothing_is() {
        let (two, now) = (limiter(0, 0, 2), Instant::now());
        let first = begin(&two, 10, now).unwrap();
        let _second = begin(&two, 10, now).unwrap();
        assert_eq!(retry(begin(&two, 10, now)).as_deref(), Some("1"));
        drop(first);
        assert!(begin(&two, 10, now).is_ok());
        assert!(headers(&two, now).is_empty());
        let limiter = limiter(0, 0, 0);
        let permits: Vec<_> = (0..100).map(|_| begin(&limiter, u64::MAX, now).unwrap()).collect();
        assert!((0..100).all(|_| limiter.count_request(now).is_ok()));
        drop(permits);
        assert!(headers(&limiter, now).is_empty());
    }

    #[test]
    fn moments_and_durations_have_the_forms_of_anthropic_and_openai() {
        let now = DateTime::from_timestamp_millis(1_700_000_000_250).unwrap();
        for (ms, text) in [(0, "2023-11-14T22:13:21Z"), (59_751, "2023-11-14T22:14:21Z")] {
            assert_eq!(moment_after(now, Duration::from_millis(ms)), text);
        }
        assert_eq!(moment_after(now, Duration::MAX), "2023-11-14T22:13:21Z");
        let mut headers = HeaderMap::new();
        limiter(2, 0, 0).add_anthropic_headers(&mut headers, Instant::now());
        assert_eq!(headers["anthropic-ratelimit-requests-limit"], "2");
        assert_eq!(headers["anthropic-ratelimit-requests-remaining"], "2");
        assert_eq!(headers.len(), 3);
        for (ms, text) in [(0, "0s"), (20, "20ms"), (999, "999ms"), (1000, "1s"), (1001, "2s")] {
            assert_eq!(shown(Duration::from_millis(ms)), text);
        }
        assert_eq!(shown(Duration::from_secs(360)), "6m0s");
    }
}
