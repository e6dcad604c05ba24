//! Authentication by bearer keys.
//!
//! Each route except [`PUBLIC`] requires a scope. A key opens the routes of its scopes. Without a key
//! that has a scope of `/v1`, `/v1` requires no key. Without a key that has the scope `admin` or `read`, `/admin`
//! answers only programs on the same machine. Requests that are accepted because they are local must
//! name this machine in the header `Host` (`HostRule`). [`KeyRing`] has the keys, and what each has used of its limits.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use parking_lot::{Mutex, RwLock};
use schemars::JsonSchema;
use serde::Serialize;
use subtle::{ConditionallySelectable, ConstantTimeEq};

use hone_core::config::ConfigError;
use hone_core::config::describe::one_of;
use hone_core::digest::hex;
use hone_core::metrics::Metrics;
use hone_core::types::{UnixMillis, now_ms};

use super::error::{ApiError, ErrorCode};
use crate::config::{KeyConfig, KeyExpiry, KeyHash, KeyLimits, KeyScope, ServerConfig, hash_key};

/// Routes that need no key. The document and the console's page are the same for every server; `/metrics` (see [`Access::Host`]) contains
/// counts and model measurements, but no text, key or id. To hide those too, bind Hone to a private address.
const PUBLIC: [&str; 5] = ["/livez", "/readyz", "/openapi.json", "/console", "/console/{file}"];

/// Routes that sample completions.
const SAMPLING: [&str; 4] =
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"];

/// Headers that only proxies and browsers set: such a caller is not a program on this machine.
const FOREIGN: [&str; 8] = [
    "forwarded",
    "origin",
    "sec-fetch-site",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
];

/// Decides which requests are answered.
pub struct Authenticator {
    ring: Arc<KeyRing>,
    hosts: HostRule,
}

/// The authenticated caller of a request.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// First 12 hex digits of the key's SHA-256; `None` if no key was required.
    pub key_id: Option<String>,
    /// The key; `None` if no key was required.
    pub key: Option<Arc<ApiKey>>,
    /// The request, if it is for completions, among those that the key may have at once.
    slot: Option<Arc<KeySlot>>,
}

impl Caller {
    /// Begins a request for completions that takes about `tokens` tokens; `None` without a key.
    pub fn begin(&self, tokens: u64) -> Result<Option<KeyPermit>, ApiError> {
        let Some(key) = &self.key else { return Ok(None) };
        let slot = match &self.slot {
            Some(slot) => Arc::clone(slot),
            // A route that is missing in `SAMPLING` counts once its body is read.
            None => key.limiter.enter()?,
        };
        slot.begin(tokens, Instant::now()).map(Some)
    }
}

/// What a route requires.
pub enum Access {
    /// Nothing.
    Public,
    /// No key, but an allowed host: a page that rebinds its name to this machine must not read rewards.
    Host,
    /// A key with one of these scopes; any key if there are none.
    Scopes(&'static [KeyScope]),
}

/// Passes on an authenticated request with its [`Caller`], and adds the [`ApiKey`]; or answers 401, 403 or 429.
pub async fn authenticate(
    State(authenticator): State<Arc<Authenticator>>,
    mut request: Request,
    next: Next,
) -> Response {
    // The matched route decides, not the raw path of the request line.
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or(request.uri().path(), MatchedPath::as_str);
    // RFC 9112, section 3.2: a proxy could have decided by the other one.
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return ApiError::body("the header Host must not be repeated").into_response();
    }
    let samples = request.method() == Method::POST && SAMPLING.contains(&path);
    let mut caller = match authenticator.check(&access(path, request.method()), &request, now_ms())
    {
        Ok(caller) => caller,
        Err(error) => return error.into_response(),
    };
    let Some(key) = caller.key.clone() else {
        request.extensions_mut().insert(caller);
        return next.run(request).await;
    };
    let counted = key.limiter.count_request(Instant::now());
    let entered = counted.and_then(|()| samples.then(|| key.limiter.enter()).transpose());
    let mut response = match entered {
        Ok(slot) => {
            caller.slot = slot;
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    };
    key.limiter.add_headers(response.headers_mut(), Instant::now());
    response.extensions_mut().insert(key);
    response
}

/// What the route at `path` requires for a method.
pub fn access(path: &str, method: &Method) -> Access {
    let below = |prefix: &str| {
        path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if PUBLIC.contains(&path) {
        Access::Public
    } else if path == "/metrics" {
        Access::Host
    } else if below("/admin") {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        Access::Scopes(if reads { &KeyScope::OPERATOR } else { &[KeyScope::Admin] })
    } else if below("/v1/feedback") {
        Access::Scopes(&[KeyScope::Feedback, KeyScope::Chat])
    } else if below("/v1/fine_tuning") {
        Access::Scopes(&[KeyScope::Graders])
    } else if below("/v1") || below("/tokenize") || below("/detokenize") {
        Access::Scopes(&[KeyScope::Chat])
    } else {
        Access::Scopes(&[])
    }
}

/// The presented key: a bearer token, or the header of Anthropic's clients.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, key) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    };
    bearer().or_else(|| headers.get("x-api-key")?.to_str().ok().map(str::trim))
}

impl Authenticator {
    pub fn new(config: &ServerConfig, ring: Arc<KeyRing>) -> Self {
        Self { ring, hosts: HostRule { bind: config.bind.ip(), hosts: config.hosts.clone() } }
    }

    fn check(
        &self,
        access: &Access,
        request: &Request,
        now: UnixMillis,
    ) -> Result<Caller, ApiError> {
        let scopes = match access {
            Access::Public => return Ok(Caller::default()),
            Access::Host => return self.check_without_key(request, false),
            Access::Scopes(scopes) => scopes,
        };
        let keys = self.ring.current();
        let is_admin = scopes.contains(&KeyScope::Admin);
        let required: &[_] = if is_admin { &KeyScope::OPERATOR } else { &KeyScope::CLIENT };
        if !keys.has_scope(required) {
            return self.check_without_key(request, is_admin);
        }
        let Some(presented) = presented(request.headers()) else {
            let message = "the header \"Authorization: Bearer KEY\" is required";
            return Err(unauthorized(format!("{message}{}", with_scope(scopes))));
        };
        identify(keys.find(&hash_key(presented)), scopes, now)
    }

    fn check_without_key(&self, request: &Request, is_admin: bool) -> Result<Caller, ApiError> {
        if is_admin && !is_local(request) {
            let message = "no key has the scope admin (server.admin_keys or server.keys), so /admin answers \
                           only programs on the server's own machine";
            return Err(ApiError::new(ErrorCode::Forbidden, message));
        }
        // Beyond loopback the operator accepts every client, whatever name it uses, unless names are listed.
        let HostRule { bind, hosts } = &self.hosts;
        let checks = is_admin || bind.to_canonical().is_loopback() || !hosts.is_empty();
        match self.hosts.refused(request.uri(), request.headers()).filter(|_| checks) {
            None => Ok(Caller::default()),
            Some(host) => Err(ApiError::new(
                ErrorCode::HostNotAllowed,
                format!(
                    "the header Host is {host:?}: without a key it must be localhost, a loopback address, the \
                     address of server.bind or one of server.hosts"
                ),
            )),
        }
    }
}

fn unauthorized(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidApiKey, message)
}

/// The end of a sentence about a key that is required.
fn with_scope(scopes: &[KeyScope]) -> String {
    if scopes.is_empty() {
        return String::new();
    }
    format!(", with a key that has the scope {}", listed(scopes))
}

fn listed(scopes: &[KeyScope]) -> String {
    one_of(&scopes.iter().map(|scope| scope.as_str().to_owned()).collect::<Vec<_>>())
}

fn identify(
    known: Option<&Arc<ApiKey>>,
    scopes: &[KeyScope],
    now: UnixMillis,
) -> Result<Caller, ApiError> {
    let Some(key) = known else {
        let message = "the key in the header Authorization is unknown; it is required";
        return Err(unauthorized(format!("{message}{}", with_scope(scopes))));
    };
    let name = &key.entry.name;
    if let Some(expiry) = key.entry.expires.filter(|expiry| expiry.has_passed(now)) {
        return Err(unauthorized(format!("the key {name:?} expired at {expiry}")));
    }
    if !key.has_one_of(scopes) {
        let (needed, held) = (listed(scopes), listed(&key.entry.scopes).replace(" or ", " and "));
        let message = format!("the key {name:?} lacks the scope {needed}: it has {held}");
        return Err(ApiError::new(ErrorCode::MissingScope, message));
    }
    key.last_used.store(now, Ordering::Relaxed);
    Ok(Caller { key_id: Some(key.id.clone()), key: Some(Arc::clone(key)), slot: None })
}

/// Whether a program on this machine sent a request, rather than a proxy or a browser.
fn is_local(request: &Request) -> bool {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    peer.is_some_and(|peer| peer.0.ip().to_canonical().is_loopback())
        // A proxy of nginx without further settings, which adds no header.
        && request.version() != Version::HTTP_10
        && !FOREIGN.iter().any(|name| request.headers().contains_key(*name))
}

// The header `Host` of requests that need no key. A web page whose name resolves to a loopback address (DNS
// rebinding) can send requests from a browser on this machine. They have the page's name as their host, so a
// request that is accepted because it is local must name this machine.

/// The hosts that requests without a key may name.
struct HostRule {
    bind: IpAddr,
    hosts: Vec<String>,
}

impl HostRule {
    /// The host that is not allowed. A request without a host is allowed: browsers always send one.
    fn refused(&self, uri: &Uri, headers: &HeaderMap) -> Option<String> {
        let of_uri = uri.authority().map(|authority| authority.as_str().to_owned());
        let of_headers = headers.get_all(header::HOST).iter();
        let of_headers =
            of_headers.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        of_uri.into_iter().chain(of_headers).find(|host| !self.allows(host))
    }

    fn allows(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host();
        let inner = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        if let Ok(address) = inner.unwrap_or(name).parse::<IpAddr>() {
            let listed = |host: &String| host.parse::<IpAddr>() == Ok(address);
            return address.to_canonical().is_loopback()
                || address == self.bind
                || self.hosts.iter().any(listed);
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        let below = |suffix: &str| {
            let start = name.len().checked_sub(suffix.len());
            let end = start.and_then(|start| name.get(start..));
            end.is_some_and(|end| end.eq_ignore_ascii_case(suffix))
        };
        name.eq_ignore_ascii_case("localhost")
            || below(".localhost")
            || self.hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
    }
}

// CORS: web pages of the origins in `server.cors_origins` may use the server from a browser.

/// Seconds that a browser may keep the answer to a preflight request.
const PREFLIGHT_AGE: HeaderValue = HeaderValue::from_static("600");

/// Answers preflight requests, which have no key, and permits pages of a listed origin to read responses.
pub async fn share(
    State(origins): State<Arc<Vec<String>>>,
    request: Request,
    next: Next,
) -> Response {
    let allows = |origin: &&HeaderValue| {
        origins.iter().any(|listed| listed == "*" || origin.as_bytes() == listed.as_bytes())
    };
    let allowed = request.headers().get(header::ORIGIN).filter(allows).cloned();
    let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &allowed {
        Some(_) if asks && request.method() == Method::OPTIONS => preflight(request.headers()),
        _ => next.run(request).await,
    };
    if origins.is_empty() {
        return response;
    }
    let headers = response.headers_mut();
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    }
    response
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, DELETE");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE);
    if let Some(wanted) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    response
}

// The keys in use. A reload replaces them as a whole while requests run.

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
struct KeySet(Vec<(KeyHash, Arc<ApiKey>)>);

#[derive(Debug)]
pub struct ApiKey {
    /// Its entry in the configuration, without the key itself.
    pub entry: KeyConfig,
    /// First 12 hex digits of the key's SHA-256.
    pub id: String,
    pub limiter: Arc<KeyLimiter>,
    /// When it was accepted last; 0 if not since the start. A reload keeps it.
    last_used: Arc<AtomicU64>,
}

/// A key as `GET /admin/keys` lists it.
#[derive(Serialize, JsonSchema)]
pub struct ListedKey {
    /// First 12 hexadecimal digits of the key's SHA-256.
    id: String,
    name: String,
    #[schemars(with = "Vec<String>")]
    scopes: Vec<KeyScope>,
    /// Unix milliseconds from which on the key is refused; null if it does not expire.
    expires: Option<UnixMillis>,
    /// Unix milliseconds of the last request that the key was accepted for; null if there was none since the start.
    last_used: Option<UnixMillis>,
    expired: bool,
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

    /// Every key, without its secret.
    pub fn list(&self, now: UnixMillis) -> Vec<ListedKey> {
        let listed = |key: &ApiKey| ListedKey {
            id: key.id.clone(),
            name: key.entry.name.clone(),
            scopes: key.entry.scopes.clone(),
            expires: key.entry.expires.map(KeyExpiry::unix_millis),
            last_used: Some(key.last_used.load(Ordering::Relaxed)).filter(|used| *used > 0),
            expired: key.entry.expires.is_some_and(|expiry| expiry.has_passed(now)),
        };
        self.current().0.iter().map(|(_, key)| listed(key)).collect()
    }

    /// Sets the metrics of expiries.
    pub fn report(&self, metrics: &Metrics, now: UnixMillis) {
        let keys = self.current();
        let expiries = keys.0.iter().filter_map(|(_, key)| key.entry.expires);
        let (passed, coming): (Vec<_>, Vec<_>) =
            expiries.partition(|expiry| expiry.has_passed(now));
        metrics.http_expired_keys.set(i64::try_from(passed.len()).unwrap_or(i64::MAX));
        let next = coming.into_iter().min().map_or(0, KeyExpiry::unix_millis);
        metrics.http_key_expiry.set(seconds(next));
    }

    /// Number of keys that may rate.
    pub fn raters(&self) -> usize {
        let rates = |key: &ApiKey| key.has_one_of(&[KeyScope::Chat, KeyScope::Feedback]);
        self.current().0.iter().filter(|(_, key)| rates(key)).count()
    }

    fn current(&self) -> Arc<KeySet> {
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
        for (path, scopes) in [("/v1", &KeyScope::CLIENT[..]), ("/admin", &KeyScope::OPERATOR[..])]
        {
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
    fn has_scope(&self, scopes: &[KeyScope]) -> bool {
        self.0.iter().any(|(_, key)| key.has_one_of(scopes))
    }

    /// The key with a hash. Every hash is compared to its end, so that the time reveals nothing about the keys.
    fn find(&self, presented: &KeyHash) -> Option<&Arc<ApiKey>> {
        let mut found = 0_u64;
        for (number, (hash, _)) in (1_u64..).zip(&self.0) {
            found.conditional_assign(&number, hash.ct_eq(presented));
        }
        let index = usize::try_from(found).ok()?.checked_sub(1)?;
        self.0.get(index).map(|(_, key)| key)
    }
}

impl ApiKey {
    fn new(entry: &KeyConfig, hash: &KeyHash, before: Option<&Arc<Self>>) -> Arc<Self> {
        let entry = KeyConfig { key: String::new(), sha256: String::new(), ..entry.clone() };
        let (name, limits) = (&entry.name, entry.limits());
        let kept = before.map(|key| &key.limiter);
        let kept = kept.filter(|own| own.name == *name && own.limits == limits);
        let limiter = kept.map_or_else(|| KeyLimiter::new(name, limits), Arc::clone);
        let last_used = before.map(|key| Arc::clone(&key.last_used)).unwrap_or_default();
        Arc::new(Self { entry, id: hex(&hash[..6]), limiter, last_used })
    }

    /// Whether the key has one of `scopes`, or no scope is required.
    pub fn has_one_of(&self, scopes: &[KeyScope]) -> bool {
        scopes.is_empty() || scopes.iter().any(|scope| self.entry.scopes.contains(scope))
    }
}

/// A time in seconds, for a metric.
#[expect(clippy::cast_precision_loss, reason = "f64 has milliseconds for longer than dates last")]
fn seconds(time: UnixMillis) -> f64 {
    time as f64 / 1000.0
}

// The limits of one key. Requests and tokens have a bucket each, which holds the allowance of a minute and fills evenly.
// Tokens are reserved when a completion begins, by an estimate, and settled when it has ended. Its bucket may fall below
// zero, so that the rate is exact in the long run whatever the estimate was. A request for completions counts from its
// head on, so that a key cannot have more of them than it may by sending their bodies slowly.

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

    pub fn count_request(&self, now: Instant) -> Result<(), ApiError> {
        let Err(wait) = self.state.lock().requests.take(1.0, now) else { return Ok(()) };
        let (name, most) = (&self.name, self.limits.requests_per_minute);
        let message = format!("the key {name:?} may send {most} requests a minute");
        Err(ApiError::limited("requests_per_minute", message, wait))
    }

    pub fn enter(self: &Arc<Self>) -> Result<Arc<KeySlot>, ApiError> {
        let mut state = self.state.lock();
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
        let mut state = self.state.lock();
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
        let reserved = limiter.state.lock().tokens.take(tokens as f64, now).map_err(|wait| {
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
        let mut state = self.0.state.lock();
        state.running = state.running.saturating_sub(1);
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        let mut state = self.slot.0.state.lock();
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
