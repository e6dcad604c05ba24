//! HTTP calls to webhooks, judges and graders' endpoints.
//!
//! An [`Endpoint`] posts JSON to one URL. Each attempt has a deadline and a size limit; failures are
//! retried with backoff where the service has not processed the request, and a circuit breaker stops
//! the calls while the service keeps failing. [`ChatEndpoint`] adds the OpenAI chat protocol. Calls
//! run in the caller's task; every attempt, circuit change and missing value goes to [`CallEvents`],
//! which logs and counts it.

mod chat;
mod endpoint;
mod limits;

use std::time::Duration;

use hone_core::metrics::CallMetrics;

pub(super) use chat::ChatEndpoint;
pub(super) use endpoint::Endpoint;
pub use limits::CallLimits;
pub(super) use limits::{call_limits, check_url, unresolved};

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
