//! Authentication by bearer keys.
//!
//! Each route except [`PUBLIC`] requires a scope. A key opens the routes of its scopes. Without a key
//! that has a scope of `/v1`, `/v1` requires no key. Without a key that has the scope `admin`, `/admin`
//! answers only programs on the same machine. Requests that are accepted because they are local must
//! name this machine in the header `Host` (`HostRule`). [`keys`] holds the keys, and what each has used of its limits.

mod keys;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use hone_core::config::describe::one_of;
use hone_core::types::{UnixMillis, now_ms};

use super::error::{ApiError, ErrorCode};
use crate::config::{KeyScope, ServerConfig, hash_key};
use keys::KeySlot;

pub use keys::{ApiKey, KeyPermit, KeyRing};

/// Routes that need no key. The document is the same for every server; `/metrics` (see [`Access::Host`]) contains
/// counts and model measurements, but no text, key or id. To hide those too, bind Hone to a private address.
const PUBLIC: [&str; 3] = ["/livez", "/readyz", "/openapi.json"];

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
    /// Whether only programs on this machine can connect.
    is_local: bool,
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
    let mut caller = match authenticator.check(&access(path), &request, now_ms()) {
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

/// What the route at `path` requires.
pub fn access(path: &str) -> Access {
    let below = |prefix: &str| {
        path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if PUBLIC.contains(&path) {
        Access::Public
    } else if path == "/metrics" {
        Access::Host
    } else if below("/admin") {
        Access::Scopes(&[KeyScope::Admin])
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
        let is_local = config.bind.ip().to_canonical().is_loopback();
        Self { ring, hosts: HostRule::new(config), is_local }
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
        let required: &[_] = if is_admin { &[KeyScope::Admin] } else { &KeyScope::CLIENT };
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
        let checks = is_admin || self.is_local || !self.hosts.hosts.is_empty();
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
    fn new(config: &ServerConfig) -> Self {
        Self { bind: config.bind.ip(), hosts: config.hosts.clone() }
    }

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

/// The origins whose pages may use the server.
pub struct CorsRule(Vec<String>);

impl CorsRule {
    pub fn new(origins: &[String]) -> Arc<Self> {
        Arc::new(Self(origins.to_vec()))
    }

    /// The origin of a request, if its pages may use the server.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let allows = |listed: &String| listed == "*" || origin.as_bytes() == listed.as_bytes();
        self.0.iter().any(allows).then(|| origin.clone())
    }
}

/// Answers preflight requests, which have no key, and permits pages of a listed origin to read responses.
pub async fn share(State(rule): State<Arc<CorsRule>>, request: Request, next: Next) -> Response {
    let allowed = rule.allowed(request.headers());
    let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &allowed {
        Some(_) if asks && request.method() == Method::OPTIONS => preflight(request.headers()),
        _ => next.run(request).await,
    };
    if rule.0.is_empty() {
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

#[cfg(test)]
mod tests;
