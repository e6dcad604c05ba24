//! HTTP calls to webhooks, judges and graders' endpoints.
//!
//! An [`Endpoint`] posts JSON to one URL. Each attempt has a deadline and a size limit; failures are
//! retried with backoff where the service has not processed the request, and a circuit breaker stops
//! the calls while the service keeps failing. [`ChatEndpoint`] adds the OpenAI chat protocol. Calls
//! run in the caller's task; every attempt, circuit change and missing value goes to [`CallEvents`],
//! which logs and counts it.

mod chat;
mod endpoint;

use std::net::IpAddr;
use std::time::Duration;

use reqwest::Url;

use hone_core::config::{Checked, Problem, quoted};
use hone_core::metrics::CallMetrics;

pub(super) use chat::ChatEndpoint;
pub(super) use endpoint::Endpoint;

/// Logs and counts the calls of one part.
pub(crate) struct CallEvents {
    metrics: CallMetrics,
    /// "webhook", "judge" or "grader", for logs.
    what: &'static str,
    pub(crate) route: String,
    pub(crate) part: String,
}

impl CallEvents {
    /// Events of the part `part` of `route`. Both are names from the configuration, so metric labels
    /// stay bounded. The circuit begins closed.
    pub(crate) fn new(what: &'static str, route: &str, part: &str, metrics: CallMetrics) -> Self {
        metrics.circuit_open.with_label_values(&[route, part]).set(0);
        Self { metrics, what, route: route.to_owned(), part: part.to_owned() }
    }

    pub(crate) fn attempt(&self, outcome: &'static str, took: Duration) {
        let Self { metrics, what, route, part } = self;
        metrics.requests.with_label_values(&[route.as_str(), part, outcome]).inc();
        metrics.duration.with_label_values(&[route, part]).observe(took.as_secs_f64());
        tracing::debug!(what, route, part, outcome, ?took, "asked for rewards");
    }

    fn circuit(&self, open: bool) {
        let Self { metrics, what, route, part } = self;
        metrics.circuit_open.with_label_values(&[route, part]).set(i64::from(open));
        if open {
            tracing::warn!(
                what,
                route,
                part,
                "it keeps failing: its rewards are missing until it answers again"
            );
        } else {
            tracing::info!(what, route, part, "it answers again");
        }
    }

    /// `count` values are missing for one reason; `detail` is for the log.
    pub(crate) fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        if count == 0 {
            return;
        }
        let Self { metrics, what, route, part } = self;
        let counter = metrics.missing.with_label_values(&[route.as_str(), part, reason]);
        counter.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
        if reason == "circuit_open" {
            // Logged as a warning when the circuit opened.
            tracing::debug!(what, route, part, count, "rewards are missing");
        } else {
            tracing::warn!(what, route, part, reason, count, detail, "rewards are missing");
        }
    }
}

/// Why a service returned no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The HTTP client cannot be built, for example because this machine has no certificates.
    #[error("the HTTP client cannot be made: {}", root_cause(.0))]
    Client(#[source] reqwest::Error),
    /// An HTTP header cannot carry the API key.
    #[error("api_key_env: the key must be printable ASCII")]
    BadKey,
    /// The service kept failing, so it is not called for now.
    #[error("it is not asked while its circuit is open")]
    CircuitOpen,
    /// The connection was not established.
    #[error("no connection: {}", root_cause(.0))]
    Connect(#[source] reqwest::Error),
    /// The attempt exceeded this time limit.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The connection ended before the answer did.
    #[error("the connection broke: {}", root_cause(.0))]
    Broken(#[source] reqwest::Error),
    /// A status other than 2xx, with the `Retry-After` header; redirects are not followed.
    #[error("it answered with status {0}")]
    Status(u16, Option<Duration>),
    /// The answer is longer than `max_response_bytes`.
    #[error("its answer is longer than {0} bytes")]
    TooLarge(usize),
    /// The answer is not the expected JSON.
    #[error("its answer is no chat completion: {0}")]
    BadAnswer(#[source] serde_json::Error),
    /// The answer has no message.
    #[error("its answer is no chat completion: no choice")]
    NoChoice,
}

impl CallError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Client(_) | Self::BadKey => "client",
            Self::CircuitOpen => "circuit_open",
            Self::Connect(_) => "connect",
            Self::Timeout(_) => "timeout",
            Self::Broken(_) => "broken",
            Self::Status(429, _) => "rate_limited",
            Self::Status(300..=399, _) => "redirect",
            Self::Status(400..=499, _) => "client_error",
            Self::Status(..) => "server_error",
            Self::TooLarge(_) => "too_large",
            Self::BadAnswer(_) | Self::NoChoice => "bad_answer",
        }
    }

    /// Whether the service has not processed the request and may accept it later.
    fn is_retryable(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Status(408 | 429 | 500..=599, _))
    }

    /// Whether the service is down or stuck, as opposed to rejecting this request.
    fn is_service_failure(&self) -> bool {
        matches!(
            self,
            Self::Connect(_)
                | Self::Timeout(_)
                | Self::Broken(_)
                | Self::Status(408 | 500..=599, _)
        )
    }
}

/// The innermost cause, which is the informative one.
fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

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
