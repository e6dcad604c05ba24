//! Who may call what.
//!
//! `/v1` needs a client key where any is configured, `/admin` an admin key; the two never stand in
//! for each other. Without admin keys `/admin` answers callers on this machine only. Everything
//! else needs a client key too, but for [`PUBLIC`].

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

/// Open to everybody. Prometheus scrapes `/metrics` without a key: it holds counts and model
/// measurements, no text, key or id. Whoever must hide those binds hone to a private address.
const PUBLIC: [&str; 3] = ["/livez", "/readyz", "/metrics"];

/// Headers by which a proxy or a browser shows that the caller is not a program on this machine.
const FOREIGN: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "origin"];

type Hash = [u8; 32];

/// The keys that open the doors, hashed.
pub(super) struct Gate {
    client: Vec<Hash>,
    admin: Vec<Hash>,
}

/// Who is calling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Caller {
    /// First 12 hex digits of the SHA-256 of the client key; `None` where none is asked for.
    pub(super) key_id: Option<String>,
}

enum Door {
    Public,
    Client,
    Admin,
}

/// Lets a request in or answers 401 or 403.
pub(super) async fn admit(
    State(gate): State<Arc<Gate>>,
    mut request: Request,
    next: Next,
) -> Response {
    let extensions = request.extensions();
    // What matched decides, not what was written in the request line.
    let path = extensions.get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
    let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    match gate.check(&door(path), request.headers(), peer) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

fn door(path: &str) -> Door {
    if PUBLIC.contains(&path) {
        Door::Public
    } else if path == "/admin" || path.starts_with("/admin/") {
        Door::Admin
    } else {
        Door::Client
    }
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

/// Whether any key is this one, in a time that does not depend on which or how nearly: hashes of
/// one length are compared, all of them, to the end.
fn holds(keys: &[Hash], presented: &Hash) -> bool {
    let any = |found: Choice, key: &Hash| found | key.ct_eq(presented);
    keys.iter().fold(Choice::from(0), any).into()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

impl Gate {
    pub(super) fn new(config: &ServerConfig) -> Self {
        let hashes = |keys: &[String]| keys.iter().map(|key| hash(key)).collect();
        Self { client: hashes(&config.client_keys), admin: hashes(&config.admin_keys) }
    }

    fn check(
        &self,
        door: &Door,
        headers: &HeaderMap,
        peer: Option<IpAddr>,
    ) -> Result<Caller, ApiError> {
        let presented = bearer(headers).map(hash);
        match door {
            Door::Public => Ok(Caller::default()),
            Door::Client if self.client.is_empty() => Ok(Caller::default()),
            Door::Client => known(&self.client, presented),
            Door::Admin if !self.admin.is_empty() => known(&self.admin, presented),
            Door::Admin if local(headers, peer) => Ok(Caller::default()),
            Door::Admin => Err(ApiError::forbidden(
                "no admin key is configured (server.admin_keys), so /admin answers only programs \
                 on the server's own machine",
            )),
        }
    }
}

fn known(keys: &[Hash], presented: Option<Hash>) -> Result<Caller, ApiError> {
    let Some(presented) = presented else {
        return Err(ApiError::unauthorized("this needs the header Authorization: Bearer KEY"));
    };
    if !holds(keys, &presented) {
        return Err(ApiError::unauthorized(
            "the key in the header Authorization is not known here",
        ));
    }
    let digits = presented.iter().take(6).map(|byte| format!("{byte:02x}"));
    Ok(Caller { key_id: Some(digits.collect()) })
}

fn local(headers: &HeaderMap, peer: Option<IpAddr>) -> bool {
    peer.is_some_and(|ip| ip.to_canonical().is_loopback())
        && !FOREIGN.iter().any(|name| headers.contains_key(*name))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderValue, StatusCode};

    use super::*;

    fn gate(client: &[&str], admin: &[&str]) -> Gate {
        let own = |keys: &[&str]| keys.iter().map(|k| (*k).to_owned()).collect();
        Gate::new(&ServerConfig {
            client_keys: own(client),
            admin_keys: own(admin),
            ..ServerConfig::default()
        })
    }

    fn ask(gate: &Gate, path: &str, key: Option<&str>, peer: &str) -> Result<Caller, StatusCode> {
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
            headers.insert(header::AUTHORIZATION, value);
        }
        let peer = Some(peer.parse().unwrap());
        let status = |e: ApiError| e.into_response().status();
        gate.check(&door(path), &headers, peer).map_err(status)
    }

    const HERE: &str = "127.0.0.1";
    const THERE: &str = "192.0.2.7";

    #[test]
    fn open_without_keys() {
        let gate = gate(&[], &[]);
        for key in [None, Some("whatever")] {
            assert_eq!(ask(&gate, "/v1/models", key, THERE), Ok(Caller::default()));
        }
        assert_eq!(ask(&gate, "/admin/train", None, HERE), Ok(Caller::default()));
        assert_eq!(ask(&gate, "/admin/train", None, "::1"), Ok(Caller::default()));
        assert_eq!(ask(&gate, "/admin/train", None, "::ffff:127.0.0.1"), Ok(Caller::default()));
        assert_eq!(ask(&gate, "/admin/train", None, THERE), Err(StatusCode::FORBIDDEN));
        assert_eq!(ask(&gate, "/admin/train", Some("x"), THERE), Err(StatusCode::FORBIDDEN));
    }

    #[test]
    fn keys_do_not_stand_in_for_each_other() {
        let gate = gate(&["alice", "bob"], &["root"]);
        let id = |who| ask(&gate, "/v1/feedback", Some(who), THERE).unwrap().key_id.unwrap();
        assert_eq!(id("alice"), "2bd806c97f0e");
        assert_ne!(id("alice"), id("bob"));
        for key in [None, Some("root"), Some("alic"), Some("alicee"), Some("")] {
            assert_eq!(ask(&gate, "/v1/feedback", key, HERE), Err(StatusCode::UNAUTHORIZED));
        }
        assert!(ask(&gate, "/admin/policies", Some("root"), THERE).is_ok());
        for key in [None, Some("alice")] {
            assert_eq!(ask(&gate, "/admin/policies", key, HERE), Err(StatusCode::UNAUTHORIZED));
        }
    }

    #[test]
    fn probes_are_public_and_nothing_else() {
        let gate = gate(&["alice"], &["root"]);
        for path in PUBLIC {
            assert_eq!(ask(&gate, path, None, THERE), Ok(Caller::default()));
        }
        for path in ["/", "/metrics/", "/v1/models", "/livez2", "/adminx"] {
            assert_eq!(ask(&gate, path, None, HERE), Err(StatusCode::UNAUTHORIZED), "{path}");
        }
    }

    #[test]
    fn a_proxy_or_browser_is_not_local() {
        for name in FOREIGN {
            let headers = HeaderMap::from_iter([(
                header::HeaderName::from_static(name),
                HeaderValue::from_static("x"),
            )]);
            assert!(!local(&headers, Some(HERE.parse().unwrap())), "{name}");
        }
        assert!(!local(&HeaderMap::new(), None));
    }
}
