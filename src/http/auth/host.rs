//! The header `Host` of requests that need no key.
//!
//! A web page whose name an attacker resolves to a loopback address (DNS rebinding) can send requests from
//! a browser on this machine, which its own origin policy does not stop. Such requests have the page's
//! name as their host. So a request that is accepted because it is local must name this machine.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};

use crate::config::ServerConfig;

/// The hosts that requests without a key may name.
pub(super) struct HostRule {
    bind: IpAddr,
    hosts: Vec<String>,
}

impl HostRule {
    pub(super) fn new(config: &ServerConfig) -> Self {
        Self { bind: config.bind.ip(), hosts: config.hosts.clone() }
    }

    /// Whether `server.hosts` has names.
    pub(super) fn are_listed(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// The host of a request that is not allowed. A request without a host is allowed, because browsers
    /// always send one.
    pub(super) fn refused(&self, uri: &Uri, headers: &HeaderMap) -> Option<String> {
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
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn rule() -> HostRule {
        HostRule {
            bind: "192.0.2.7".parse().unwrap(),
            hosts: ["hone.example".to_owned(), "10.0.0.7".to_owned()].into(),
        }
    }

    #[test]
    fn only_names_of_this_machine_are_allowed() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1:8080",
            "127.1.2.3",
            "[::1]:8080",
            "[::ffff:127.0.0.1]",
            "192.0.2.7:8080",
            "hone.example",
            "HONE.example:443",
            "10.0.0.7:80",
        ] {
            assert!(rule().allows(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "notlocalhost",
            "192.0.2.8",
            "[::2]",
            "a b",
        ] {
            assert!(!rule().allows(host), "{host}");
        }
    }

    #[test]
    fn every_host_of_a_request_counts() {
        let mut headers = HeaderMap::new();
        let plain = Uri::from_static("/v1/models");
        assert_eq!(rule().refused(&plain, &headers), None);
        headers.insert(header::HOST, HeaderValue::from_static("localhost:8080"));
        assert_eq!(rule().refused(&plain, &headers), None);
        let absolute = Uri::from_static("http://evil.example/v1/models");
        assert_eq!(rule().refused(&absolute, &headers).as_deref(), Some("evil.example"));
        headers.append(header::HOST, HeaderValue::from_static("second.example"));
        assert_eq!(rule().refused(&plain, &headers).as_deref(), Some("second.example"));
    }
}
