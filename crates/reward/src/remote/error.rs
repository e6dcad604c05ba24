//! Why a call to a service failed.

use std::time::Duration;

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
    pub(super) fn is_retryable(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Status(408 | 429 | 500..=599, _))
    }

    /// Whether the service is down or stuck, as opposed to rejecting this request.
    pub(super) fn is_service_failure(&self) -> bool {
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
