//! The keys of `kind = "webhook"`, and the limits that it shares with the judge.

use std::net::IpAddr;
use std::time::Duration;

use reqwest::Url;
use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::quoted;
use hone_core::config::range::between;
use hone_core::config::secret::{Secret, from_environment};

/// A reward that another service computes, asked over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookParams {
    /// Where batches are posted: https, or plain http to this machine (see `allow_http`).
    pub url: String,
    /// Environment variable with the secret of the HMAC signature; empty sends none.
    #[serde(default)]
    pub secret_env: String,
    /// What the loader found in `secret_env`.
    #[serde(skip)]
    pub secret: Option<Secret>,
    /// Samples in one request.
    #[serde(default = "max_batch")]
    pub max_batch: usize,
    /// Requests at once.
    #[serde(default = "max_concurrency")]
    pub max_concurrency: usize,
    /// Milliseconds for one attempt, from connecting to the last byte.
    #[serde(default = "timeout_ms")]
    pub timeout_ms: u64,
    /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
    #[serde(default = "retries")]
    pub retries: u32,
    /// Milliseconds before the first retry; each further one waits twice as long, jittered.
    #[serde(default = "backoff_ms")]
    pub backoff_ms: u64,
    /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
    #[serde(default = "max_backoff_ms")]
    pub max_backoff_ms: u64,
    /// Failed attempts in a row that open the circuit.
    #[serde(default = "breaker_failures")]
    pub breaker_failures: u32,
    /// Milliseconds that an open circuit rests before one request probes the service.
    #[serde(default = "breaker_cooldown_ms")]
    pub breaker_cooldown_ms: u64,
    /// Longest answer in bytes.
    #[serde(default = "max_response_bytes")]
    pub max_response_bytes: usize,
    /// Whether plain http may leave this machine.
    #[serde(default)]
    pub allow_http: bool,
}

pub(super) fn max_batch() -> usize {
    32
}
pub(super) fn max_concurrency() -> usize {
    4
}
pub(super) fn timeout_ms() -> u64 {
    5_000
}
pub(super) fn retries() -> u32 {
    2
}
pub(super) fn backoff_ms() -> u64 {
    200
}
pub(super) fn max_backoff_ms() -> u64 {
    10_000
}
pub(super) fn breaker_failures() -> u32 {
    5
}
pub(super) fn breaker_cooldown_ms() -> u64 {
    10_000
}
pub(super) fn max_response_bytes() -> usize {
    1 << 20
}

/// How a remote service is called, whichever reward calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLimits {
    /// For one attempt.
    pub timeout: Duration,
    /// Attempts after the first.
    pub retries: u32,
    /// Before the first retry.
    pub backoff: Duration,
    /// Between any two attempts, at most.
    pub max_backoff: Duration,
    /// Failed attempts in a row that open the circuit.
    pub breaker_failures: u32,
    /// How long the circuit stays open before a probe.
    pub breaker_cooldown: Duration,
    /// Longest answer in bytes.
    pub max_response_bytes: usize,
}

/// Reads the same-named keys of a parameter struct; checks them with [`CallLimits::check`].
macro_rules! call_limits {
    ($params:expr) => {
        $crate::config::CallLimits {
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

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl CallLimits {
    /// Checks the ranges of the keys below `key`.
    pub(crate) fn check(&self, key: &str) -> Result<(), Problem> {
        let of = |name: &str| format!("{key}.{name}");
        between(&of("timeout_ms"), milliseconds(self.timeout), 1, 600_000)?;
        between(&of("retries"), self.retries, 0, 10)?;
        between(&of("backoff_ms"), milliseconds(self.backoff), 1, 60_000)?;
        let backoff = milliseconds(self.backoff);
        between(&of("max_backoff_ms"), milliseconds(self.max_backoff), backoff, 300_000)?;
        between(&of("breaker_failures"), self.breaker_failures, 1, 1000)?;
        between(&of("breaker_cooldown_ms"), milliseconds(self.breaker_cooldown), 1, 3_600_000)?;
        between(&of("max_response_bytes"), self.max_response_bytes, 64, 1 << 26)
    }
}

/// Checks the address of a service: https, or http to a loopback address unless `allow_http`.
pub(crate) fn check_url(key: &str, url: &str, allow_http: bool) -> Result<(), Problem> {
    // A password in the address is not repeated.
    let shown = match url.contains('@') {
        true => "a hidden value".to_owned(),
        false => quoted(url),
    };
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

impl WebhookParams {
    /// A webhook at `url`, everything else at its default.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secret_env: String::new(),
            secret: None,
            max_batch: max_batch(),
            max_concurrency: max_concurrency(),
            timeout_ms: timeout_ms(),
            retries: retries(),
            backoff_ms: backoff_ms(),
            max_backoff_ms: max_backoff_ms(),
            breaker_failures: breaker_failures(),
            breaker_cooldown_ms: breaker_cooldown_ms(),
            max_response_bytes: max_response_bytes(),
            allow_http: false,
        }
    }

    /// How the service is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Puts the secret in its place; the loader calls it with the environment.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key `secret_env`.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.secret = from_environment(&self.secret_env, lookup)?;
        Ok(())
    }

    /// Checks every range; `key` is the part's, as in `route[0].reward[1]`.
    ///
    /// # Errors
    /// The first value that is out of range, as a sentence.
    pub fn check(&self, key: &str) -> Result<(), Problem> {
        check_url(&format!("{key}.url"), &self.url, self.allow_http)?;
        between(&format!("{key}.max_batch"), self.max_batch, 1, 4096)?;
        between(&format!("{key}.max_concurrency"), self.max_concurrency, 1, 1024)?;
        self.limits().check(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(params: &WebhookParams) -> String {
        params.check("reward[0]").unwrap_err().sentence()
    }

    #[test]
    fn defaults_stand_in_the_text_and_in_new() {
        let read: WebhookParams = toml::from_str("url = \"https://grader.example/score\"").unwrap();
        assert_eq!(read, WebhookParams::new("https://grader.example/score"));
        assert_eq!(read.check("reward[0]"), Ok(()));
        let error = toml::from_str::<WebhookParams>("url = \"x\"\nurls = 1").unwrap_err();
        assert!(error.to_string().contains("urls"), "{error}");
        // The secret itself has no key, and is never written.
        assert!(toml::from_str::<WebhookParams>("url = \"x\"\nsecret = \"s\"").is_err());
        let mut signed = read;
        signed.secret_env = "GRADER_SECRET".to_owned();
        signed.resolve(|_| Some("hunter2".to_owned())).unwrap();
        assert!(!toml::to_string(&signed).unwrap().contains("hunter2"));
        assert!(!format!("{signed:?}").contains("hunter2"));
    }

    #[test]
    fn addresses_are_https_or_loopback() {
        for good in
            ["https://a.example/x", "http://localhost:1/x", "http://127.0.0.9/", "http://[::1]:8/"]
        {
            assert_eq!(WebhookParams::new(good).check("r"), Ok(()), "{good}");
        }
        let far = WebhookParams::new("http://grader:8000/score");
        insta::assert_snapshot!(refusal(&far), @r#"reward[0].url is "http://grader:8000/score": it must be https, or http to this machine; allow_http = true permits plain http elsewhere, as on a private network"#);
        assert_eq!(WebhookParams { allow_http: true, ..far }.check("r"), Ok(()));
        insta::assert_snapshot!(refusal(&WebhookParams::new("ftp://x/")), @r#"reward[0].url is "ftp://x/": it must be an http or https address"#);
        insta::assert_snapshot!(refusal(&WebhookParams::new("grader")), @r#"reward[0].url is "grader": it must be an address such as "https://grader.example/score""#);
        insta::assert_snapshot!(refusal(&WebhookParams::new("https://me:hunter2@x/")), @"reward[0].url is a hidden value: it must be an address without a user name or password, which logs could show");
    }

    #[test]
    fn ranges_are_named() {
        let base = WebhookParams::new("https://a.example/");
        insta::assert_snapshot!(refusal(&WebhookParams { max_batch: 0, ..base.clone() }), @"reward[0].max_batch is 0: it must be from 1 to 4096");
        insta::assert_snapshot!(refusal(&WebhookParams { retries: 11, ..base.clone() }), @"reward[0].retries is 11: it must be from 0 to 10");
        insta::assert_snapshot!(refusal(&WebhookParams { max_backoff_ms: 5, ..base }), @"reward[0].max_backoff_ms is 5: it must be from 200 to 300000");
    }
}
