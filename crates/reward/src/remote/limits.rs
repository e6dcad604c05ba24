//! Time, retry and size limits of calls to a service, and the check of its address.

use std::net::IpAddr;
use std::time::Duration;

use reqwest::Url;

use hone_core::config::{Checked, Problem, quoted};

/// How a service is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLimits {
    /// Time for one attempt, from connecting to the last byte.
    pub timeout: Duration,
    /// Attempts after the first.
    pub retries: u32,
    /// Wait before the first retry.
    pub backoff: Duration,
    /// Longest wait between two attempts.
    pub max_backoff: Duration,
    /// Failed attempts in a row that open the circuit.
    pub breaker_failures: u32,
    /// Time that the circuit stays open before a probe.
    pub breaker_cooldown: Duration,
    /// Longest answer in bytes.
    pub max_response_bytes: usize,
}

/// Reads the same-named keys of a parameter struct.
macro_rules! call_limits {
    ($params:expr) => {
        $crate::remote::CallLimits {
            timeout: ::std::time::Duration::from_millis($params.timeout_ms),
            retries: $params.retries,
            backoff: ::std::time::Duration::from_millis($params.backoff_ms),
            max_backoff: ::std::time::Duration::from_millis($params.max_backoff_ms),
            breaker_failures: $params.breaker_failures,
            breaker_cooldown: ::std::time::Duration::from_millis($params.breaker_cooldown_ms),
            max_response_bytes: $params.max_response_bytes,
        }
    };
}
pub(crate) use call_limits;

/// The problem of a secret that the key names although the configuration was read without the environment.
pub(crate) fn unresolved(key: &str, name: &str) -> Problem {
    let why = "was not looked up: the configuration was not read by the loader";
    Problem::new(key, format!(" = `{name}` {why}"))
}

/// Checks the address of a service: https, or http to a loopback address unless `allow_http`.
pub(crate) fn check_url(key: &str, url: &str, allow_http: bool) -> Checked {
    // The address may contain a password.
    let shown = if url.contains('@') { "a hidden value".to_owned() } else { quoted(url) };
    let wrong = |allowed: &str| Err(Problem::value(key, &shown, allowed));
    let Ok(parsed) = Url::parse(url) else {
        return wrong("an address such as \"https://grader.example/score\"");
    };
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return wrong("an address without a user name or password, which logs could show");
    }
    let host = parsed.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    match parsed.scheme() {
        "https" => Ok(()),
        "http" if loopback || allow_http => Ok(()),
        "http" => wrong(
            "https, or http to this machine; allow_http = true permits plain http elsewhere, as \
             on a private network",
        ),
        _ => wrong("an http or https address"),
    }
}
