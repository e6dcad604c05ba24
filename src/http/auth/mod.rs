//! Authentication by bearer keys.
//!
//! Each route except [`PUBLIC`] requires a scope. A key opens the routes of its scopes. Without a key
//! that has a scope of `/v1`, `/v1` requires no key. Without a key that has the scope `admin`, `/admin`
//! answers only programs on the same machine. Requests that are accepted because they are local must
//! name this machine in the header `Host` (`HostRule`). [`ring`] holds the keys, and [`limits`] what each has
//! used of its limits.

mod cors;
mod limits;
mod ring;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, Uri, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use hone_core::config::describe::one_of;
use hone_core::types::{UnixMillis, now_ms};
use hone_engine::admission::Owner;

use super::error::ApiError;
use crate::config::{KeyScope, ServerConfig, hash_key};
use limits::KeySlot;

pub(super) use cors::{CorsRule, share};
pub(super) use limits::KeyPermit;
pub(super) use ring::ApiKey;
pub use ring::KeyRing;

/// Routes that need no key. Prometheus scrapes `/metrics` without one: it contains counts and model
/// measurements, but no text, key or id. To hide those too, bind Hone to a private address. The OpenAPI
/// document is the same for every server.
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
pub(super) struct Authenticator {
    ring: Arc<KeyRing>,
    hosts: HostRule,
    /// Whether only programs on this machine can connect.
    is_local: bool,
}

/// The authenticated caller of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Caller {
    /// First 12 hex digits of the key's SHA-256; `None` if no key was required.
    pub(super) key_id: Option<String>,
    /// The key; `None` if no key was required.
    pub(super) key: Option<Arc<ApiKey>>,
    /// The request, if it is for completions, among those that the key may have at once.
    slot: Option<Arc<KeySlot>>,
}

impl Caller {
    /// Begins a request for completions that takes about `tokens` tokens; `None` without a key.
    pub(super) fn begin(&self, tokens: u64) -> Result<Option<KeyPermit>, ApiError> {
        let Some(key) = &self.key else { return Ok(None) };
        let slot = match &self.slot {
            Some(slot) => Arc::clone(slot),
            // A route that is missing in `SAMPLING` counts once its body is read.
            None => key.limiter.enter()?,
        };
        slot.begin(tokens, Instant::now()).map(Some)
    }

    /// The key among which waiting requests take turns.
    pub(super) fn owner(&self) -> Owner {
        self.key_id.as_deref().map(Arc::from)
    }
}

/// What a route requires.
pub(super) enum Access {
    /// Nothing.
    Public,
    /// No key, but a host that requests without a key may name: a page that rebinds its name to this machine
    /// must not read rewards.
    Host,
    /// A key with one of these scopes; any key if there are none.
    Scopes(&'static [KeyScope]),
}

/// The parts of a request that decide whether it is answered.
struct RequestHead<'a> {
    uri: &'a Uri,
    version: Version,
    headers: &'a HeaderMap,
    peer: Option<IpAddr>,
}

/// Passes an authenticated request on with its [`Caller`], or answers 401, 403 or 429. The response has the
/// caller's [`ApiKey`] as an extension.
pub(super) async fn authenticate(
    State(authenticator): State<Arc<Authenticator>>,
    mut request: Request,
    next: Next,
) -> Response {
    let extensions = request.extensions();
    // The matched route decides, not the raw path of the request line.
    let path = extensions.get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
    let head = RequestHead {
        uri: request.uri(),
        version: request.version(),
        headers: request.headers(),
        peer: extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip()),
    };
    // RFC 9112, section 3.2: a proxy could have decided by the other one.
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return ApiError::body("the header Host must not be repeated").into_response();
    }
    let samples = request.method() == Method::POST && SAMPLING.contains(&path);
    let mut caller = match authenticator.check(&access(path), &head, now_ms()) {
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
pub(super) fn access(path: &str) -> Access {
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
    pub(super) fn new(config: &ServerConfig, ring: Arc<KeyRing>) -> Self {
        let is_local = config.bind.ip().to_canonical().is_loopback();
        Self { ring, hosts: HostRule::new(config), is_local }
    }

    fn check(
        &self,
        access: &Access,
        head: &RequestHead<'_>,
        now: UnixMillis,
    ) -> Result<Caller, ApiError> {
        let scopes = match access {
            Access::Public => return Ok(Caller::default()),
            Access::Host => return self.check_client_without_key(head),
            Access::Scopes(scopes) => scopes,
        };
        let keys = self.ring.current();
        let is_admin = scopes.contains(&KeyScope::Admin);
        if is_admin && !keys.requires_admin_keys() {
            return self.check_admin_without_key(head);
        }
        if !is_admin && !keys.requires_client_keys() {
            return self.check_client_without_key(head);
        }
        let Some(presented) = presented(head.headers) else {
            let message = "the header \"Authorization: Bearer KEY\" is required";
            return Err(ApiError::unauthorized(format!("{message}{}", with_scope(scopes))));
        };
        identify(keys.find(&hash_key(presented)), scopes, now)
    }

    fn check_client_without_key(&self, head: &RequestHead<'_>) -> Result<Caller, ApiError> {
        // Beyond loopback the operator accepts every client, whatever name it uses, unless names are listed.
        let checks = self.is_local || self.hosts.are_listed();
        if checks { self.check_host(head) } else { Ok(Caller::default()) }
    }

    fn check_admin_without_key(&self, head: &RequestHead<'_>) -> Result<Caller, ApiError> {
        if !is_local(head) {
            return Err(ApiError::forbidden(
                "no key has the scope admin (server.admin_keys or server.keys), so /admin answers only \
                 programs on the server's own machine",
            ));
        }
        self.check_host(head)
    }

    fn check_host(&self, head: &RequestHead<'_>) -> Result<Caller, ApiError> {
        match self.hosts.refused(head.uri, head.headers) {
            None => Ok(Caller::default()),
            Some(host) => Err(ApiError::wrong_host(&host)),
        }
    }
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
        return Err(ApiError::unauthorized(format!("{message}{}", with_scope(scopes))));
    };
    let name = &key.name;
    if let Some(expiry) = key.expires.filter(|expiry| expiry.has_passed(now)) {
        return Err(ApiError::unauthorized(format!("the key {name:?} expired at {expiry}")));
    }
    if !key.has_one_of(scopes) {
        let (needed, held) = (listed(scopes), listed(&key.scopes).replace(" or ", " and "));
        return Err(ApiError::missing_scope(format!(
            "the key {name:?} lacks the scope {needed}: it has {held}"
        )));
    }
    Ok(Caller { key_id: Some(key.id.clone()), key: Some(Arc::clone(key)), slot: None })
}

/// Whether a program on this machine sent a request, rather than a proxy or a browser.
fn is_local(head: &RequestHead<'_>) -> bool {
    head.peer.is_some_and(|ip| ip.to_canonical().is_loopback())
        // A proxy of nginx without further settings, which adds no header.
        && head.version != Version::HTTP_10
        && !FOREIGN.iter().any(|name| head.headers.contains_key(*name))
}

// The header `Host` of requests that need no key.
//
// A web page whose name an attacker resolves to a loopback address (DNS rebinding) can send requests from
// a browser on this machine, which its own origin policy does not stop. Such requests have the page's
// name as their host. So a request that is accepted because it is local must name this machine.

/// The hosts that requests without a key may name.
struct HostRule {
    bind: IpAddr,
    hosts: Vec<String>,
}

impl HostRule {
    fn new(config: &ServerConfig) -> Self {
        Self { bind: config.bind.ip(), hosts: config.hosts.clone() }
    }

    /// Whether `server.hosts` has names.
    fn are_listed(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// The host of a request that is not allowed. A request without a host is allowed, because browsers
    /// always send one.
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

#[cfg(test)]
mod tests;
