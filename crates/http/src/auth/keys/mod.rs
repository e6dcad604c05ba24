//! The keys in use, and what each has used of its limits: requests and tokens a minute, and completions at once.
//!
//! A reload replaces the keys as a whole while requests run. Requests and tokens have a bucket each, which holds the
//! allowance of a minute and fills evenly. Tokens are reserved when a completion begins, by an estimate, and settled
//! when it has ended. Its bucket may fall below zero, so that the rate is exact in the long run whatever the estimate
//! was. A request for completions counts from its head on, so that a key cannot have more of them than it may by sending
//! their bodies slowly.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use parking_lot::{Mutex, MutexGuard, RwLock};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use hone_core::config::ConfigError;

use crate::config::{KeyConfig, KeyHash, KeyLimits, KeyScope, ServerConfig};
use crate::error::ApiError;

/// Fewest characters of a key that cannot be guessed.
const SHORT_KEY: usize = 16;

/// The keys that the server accepts.
pub struct KeyRing {
    /// The address that the server was configured to listen on, and whether it may do so without keys.
    bind: SocketAddr,
    insecure: bool,
    keys: RwLock<Arc<KeySet>>,
}

/// All keys of one moment.
#[derive(Default)]
pub(super) struct KeySet(Vec<(KeyHash, Arc<ApiKey>)>);

#[derive(Debug)]
pub struct ApiKey {
    /// Its entry in the configuration, without the key itself.
    pub entry: KeyConfig,
    /// First 12 hex digits of the key's SHA-256.
    pub id: String,
    pub limiter: Arc<KeyLimiter>,
}

impl KeyRing {
    /// Reads the keys of a configuration and of its `server.keys_file`.
    ///
    /// # Errors
    /// If an entry or the file is invalid, or `server.bind` is beyond loopback and no key is required.
    pub fn load(config: &ServerConfig) -> Result<Self, ConfigError> {
        let (bind, insecure) = (config.bind, config.insecure);
        let keys = KeySet::read(config, &KeySet::default())?;
        keys.check_exposure(bind, insecure)?;
        Ok(Self { bind, insecure, keys: RwLock::new(Arc::new(keys)) })
    }

    /// Replaces the keys by those of `config`, whose other values are not used. Requests that run keep
    /// their key, and a key with the same limits what it has used of them. Returns the number of keys.
    ///
    /// # Errors
    /// As [`Self::load`]. The keys then stay as they are.
    pub fn reload(&self, config: &ServerConfig) -> Result<usize, ConfigError> {
        let before = self.current();
        let keys = KeySet::read(config, &before)?;
        keys.check_exposure(self.bind, self.insecure)?;
        keys.check_protection(&before)?;
        let count = keys.0.len();
        *self.keys.write() = Arc::new(keys);
        Ok(count)
    }

    /// Number of keys that may rate.
    pub fn raters(&self) -> usize {
        let rates = |key: &ApiKey| key.has_one_of(&[KeyScope::Chat, KeyScope::Feedback]);
        self.current().0.iter().filter(|(_, key)| rates(key)).count()
    }

    pub(super) fn current(&self) -> Arc<KeySet> {
        Arc::clone(&self.keys.read())
    }
}

impl KeySet {
    /// The keys of a configuration. Those that `before` has keep what they have used of their limits.
    fn read(config: &ServerConfig, before: &Self) -> Result<Self, ConfigError> {
        let entries = config.read_keys();
        let entries = entries.map_err(|problem| ConfigError::Invalid(problem.sentence()))?;
        let plain = |list: &'static str, keys: &[String], scopes: &[KeyScope]| {
            let named = keys.iter().enumerate().map(|(i, key)| KeyConfig {
                name: format!("{list}[{i}]"),
                key: key.clone(),
                scopes: scopes.to_vec(),
                ..KeyConfig::default()
            });
            named.collect::<Vec<_>>()
        };
        let clients = plain("client_keys", &config.client_keys, &KeyScope::CLIENT);
        let admins = plain("admin_keys", &config.admin_keys, &[KeyScope::Admin]);
        let all = clients.iter().chain(&admins).chain(&entries);
        let known = |entry: &KeyConfig| {
            let hash = entry.hash()?;
            if (1..SHORT_KEY).contains(&entry.key.len()) {
                tracing::warn!(
                    key = entry.name,
                    "the key is short enough to be guessed: use {SHORT_KEY} random characters"
                );
            }
            let key = ApiKey::new(entry, &hash, before.find(&hash));
            Some((hash, key))
        };
        Ok(Self(all.filter_map(known).collect()))
    }

    /// Refuses an address that others can reach if the server would answer them without a key.
    fn check_exposure(&self, bind: SocketAddr, insecure: bool) -> Result<(), ConfigError> {
        if insecure || bind.ip().to_canonical().is_loopback() || self.has_scope(&KeyScope::CLIENT) {
            return Ok(());
        }
        Err(ConfigError::Invalid(format!(
            "server.bind is {bind}: it must be a loopback address, because no key is required: set \
             server.client_keys, server.keys or server.keys_file, or accept every client with \
             server.insecure or --insecure"
        )))
    }

    /// Refuses a reload that opens routes: a file that is empty while it is written must not; a restart can.
    fn check_protection(&self, before: &Self) -> Result<(), ConfigError> {
        for (path, scopes) in [("/v1", &KeyScope::CLIENT[..]), ("/admin", &[KeyScope::Admin][..])] {
            if before.has_scope(scopes) && !self.has_scope(scopes) {
                return Err(ConfigError::Invalid(format!(
                    "the new keys have none for {path}, which would then need no key: restart to remove \
                     all keys"
                )));
            }
        }
        Ok(())
    }

    /// Whether a key has one of `scopes`, so that the routes of these scopes require a key.
    pub(super) fn has_scope(&self, scopes: &[KeyScope]) -> bool {
        self.0.iter().any(|(_, key)| key.has_one_of(scopes))
    }

    /// The key with a hash. Every hash is compared to its end, so that the time reveals nothing about the keys.
    pub(super) fn find(&self, presented: &str) -> Option<&Arc<ApiKey>> {
        let mut found = 0_u64;
        for (number, (hash, _)) in (1_u64..).zip(&self.0) {
            found.conditional_assign(&number, hash.as_bytes().ct_eq(presented.as_bytes()));
        }
        let index = usize::try_from(found).ok()?.checked_sub(1)?;
        self.0.get(index).map(|(_, key)| key)
    }
}

impl ApiKey {
    fn new(entry: &KeyConfig, hash: &str, before: Option<&Arc<Self>>) -> Arc<Self> {
        let entry = KeyConfig { key: String::new(), sha256: String::new(), ..entry.clone() };
        let (name, limits) = (&entry.name, entry.limits());
        let kept = before.map(|key| &key.limiter);
        let kept = kept.filter(|own| own.name == *name && own.limits == limits);
        let limiter = kept.map_or_else(|| KeyLimiter::new(name, limits), Arc::clone);
        Arc::new(Self { entry, id: hash.chars().take(12).collect(), limiter })
    }

    /// Whether the key has one of `scopes`, or no scope is required.
    pub fn has_one_of(&self, scopes: &[KeyScope]) -> bool {
        scopes.is_empty() || scopes.iter().any(|scope| self.entry.scopes.contains(scope))
    }
}

// The limits of one key.

/// The limits of a key, and what it has used of them.
#[derive(Debug)]
pub struct KeyLimiter {
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

    fn lock(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock()
    }

    pub fn count_request(&self, now: Instant) -> Result<(), ApiError> {
        let Err(wait) = self.lock().requests.take(1.0, now) else { return Ok(()) };
        let (name, most) = (&self.name, self.limits.requests_per_minute);
        let message = format!("the key {name:?} may send {most} requests a minute");
        Err(ApiError::limited("requests_per_minute", message, wait))
    }

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
mod tests;
