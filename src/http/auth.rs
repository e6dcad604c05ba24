//! Authentication by bearer keys.
//!
//! `/admin` requires an admin key; every other route except [`PUBLIC`] requires a client key. Neither
//! kind of key is accepted in place of the other. Without configured client keys, no client key is
//! required. Without configured admin keys, `/admin` answers only programs on the same machine.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use crate::config::ServerConfig;

/// Routes that need no key. Prometheus scrapes `/metrics` without one: it contains counts and model
/// measurements, but no text, key or id. To hide those too, bind Hone to a private address.
const PUBLIC: [&str; 3] = ["/livez", "/readyz", "/metrics"];

/// Headers that only proxies and browsers set: such a caller is not a program on this machine.
const FOREIGN: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "origin"];

type Hash = [u8; 32];

/// The configured keys, hashed.
pub(super) struct Authenticator {
    client: Vec<Hash>,
    admin: Vec<Hash>,
}

/// The authenticated caller of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Caller {
    /// First 12 hex digits of the key's SHA-256; `None` if no key was required.
    pub(super) key_id: Option<String>,
}

/// The key that a route requires.
enum Access {
    Public,
    Client,
    Admin,
}

/// Passes an authenticated request on with its [`Caller`], or answers 401 or 403.
pub(super) async fn authenticate(
    State(authenticator): State<Arc<Authenticator>>,
    mut request: Request,
    next: Next,
) -> Response {
    let extensions = request.extensions();
    // The matched route decides, not the raw path of the request line.
    let path = extensions.get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
    let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    match authenticator.check(&access(path), request.headers(), peer) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

fn access(path: &str) -> Access {
    if PUBLIC.contains(&path) {
        Access::Public
    } else if path == "/admin" || path.starts_with("/admin/") {
        Access::Admin
    } else {
        Access::Client
    }
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

/// Whether `keys` contains `presented`, in constant time: every hash is compared to its end, so that
/// the time reveals neither which key matched nor how much of it.
fn contains(keys: &[Hash], presented: &Hash) -> bool {
    let any = |found: Choice, key: &Hash| found | key.ct_eq(presented);
    keys.iter().fold(Choice::from(0), any).into()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

impl Authenticator {
    pub(super) fn new(config: &ServerConfig) -> Self {
        let hashes = |keys: &[String]| keys.iter().map(|key| hash(key)).collect();
        Self { client: hashes(&config.client_keys), admin: hashes(&config.admin_keys) }
    }

    fn check(
        &self,
        access: &Access,
        headers: &HeaderMap,
        peer: Option<IpAddr>,
    ) -> Result<Caller, ApiError> {
        let presented = bearer(headers).map(hash);
        match access {
            Access::Public => Ok(Caller::default()),
            Access::Client if self.client.is_empty() => Ok(Caller::default()),
            Access::Client => identify(&self.client, presented),
            Access::Admin if !self.admin.is_empty() => identify(&self.admin, presented),
            Access::Admin if is_local(headers, peer) => Ok(Caller::default()),
            Access::Admin => Err(ApiError::forbidden(
                "no admin key is configured (server.admin_keys), so /admin answers only programs \
                 on the server's own machine",
            )),
        }
    }
}

fn identify(keys: &[Hash], presented: Option<Hash>) -> Result<Caller, ApiError> {
    let Some(presented) = presented else {
        return Err(ApiError::unauthorized("the header \"Authorization: Bearer KEY\" is required"));
    };
    if !contains(keys, &presented) {
        return Err(ApiError::unauthorized("the key in the header Authorization is unknown"));
    }
    let digits = presented.iter().take(6).map(|byte| format!("{byte:02x}"));
    Ok(Caller { key_id: Some(digits.collect()) })
}

fn is_local(headers: &HeaderMap, peer: Option<IpAddr>) -> bool {
    peer.is_some_and(|ip| ip.to_canonical().is_loopback())
        && !FOREIGN.iter().any(|name| headers.contains_key(*name))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderValue, StatusCode};

    use super::*;

    fn authenticator(client: &[&str], admin: &[&str]) -> Authenticator {
        let own = |keys: &[&str]| keys.iter().map(|k| (*k).to_owned()).collect();
        Authenticator::new(&ServerConfig {
            client_keys: own(client),
            admin_keys: own(admin),
            ..ServerConfig::default()
        })
    }

    fn ask(
        authenticator: &Authenticator,
        path: &str,
        key: Option<&str>,
        peer: &str,
    ) -> Result<Caller, StatusCode> {
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
            headers.insert(header::AUTHORIZATION, value);
        }
        let peer = Some(peer.parse().unwrap());
        let status = |e: ApiError| e.into_response().status();
        authenticator.check(&access(path), &headers, peer).map_err(status)
    }

    const LOCAL: &str = "127.0.0.1";
    const REMOTE: &str = "192.0.2.7";

    #[test]
    fn without_keys_v1_is_open_and_admin_is_local() {
        let authenticator = authenticator(&[], &[]);
        for key in [None, Some("any")] {
            assert_eq!(ask(&authenticator, "/v1/models", key, REMOTE), Ok(Caller::default()));
        }
        assert_eq!(ask(&authenticator, "/admin/train", None, LOCAL), Ok(Caller::default()));
        assert_eq!(ask(&authenticator, "/admin/train", None, "::1"), Ok(Caller::default()));
        assert_eq!(
            ask(&authenticator, "/admin/train", None, "::ffff:127.0.0.1"),
            Ok(Caller::default())
        );
        assert_eq!(ask(&authenticator, "/admin/train", None, REMOTE), Err(StatusCode::FORBIDDEN));
        assert_eq!(
            ask(&authenticator, "/admin/train", Some("x"), REMOTE),
            Err(StatusCode::FORBIDDEN)
        );
    }

    #[test]
    fn client_and_admin_keys_are_separate() {
        let authenticator = authenticator(&["alice", "bob"], &["root"]);
        let id =
            |who| ask(&authenticator, "/v1/feedback", Some(who), REMOTE).unwrap().key_id.unwrap();
        assert_eq!(id("alice"), "2bd806c97f0e");
        assert_ne!(id("alice"), id("bob"));
        for key in [None, Some("root"), Some("alic"), Some("alicee"), Some("")] {
            assert_eq!(
                ask(&authenticator, "/v1/feedback", key, LOCAL),
                Err(StatusCode::UNAUTHORIZED)
            );
        }
        assert!(ask(&authenticator, "/admin/policies", Some("root"), REMOTE).is_ok());
        for key in [None, Some("alice")] {
            assert_eq!(
                ask(&authenticator, "/admin/policies", key, LOCAL),
                Err(StatusCode::UNAUTHORIZED)
            );
        }
    }

    #[test]
    fn only_probes_and_metrics_are_public() {
        let authenticator = authenticator(&["alice"], &["root"]);
        for path in PUBLIC {
            assert_eq!(ask(&authenticator, path, None, REMOTE), Ok(Caller::default()));
        }
        for path in ["/", "/metrics/", "/v1/models", "/livez2", "/adminx"] {
            assert_eq!(
                ask(&authenticator, path, None, LOCAL),
                Err(StatusCode::UNAUTHORIZED),
                "{path}"
            );
        }
    }

    #[test]
    fn proxies_and_browsers_are_not_local() {
        for name in FOREIGN {
            let headers = HeaderMap::from_iter([(
                header::HeaderName::from_static(name),
                HeaderValue::from_static("x"),
            )]);
            assert!(!is_local(&headers, Some(LOCAL.parse().unwrap())), "{name}");
        }
        assert!(!is_local(&HeaderMap::new(), None));
    }
}
