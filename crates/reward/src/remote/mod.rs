//! Calls to services that give rewards: one address, bounded in time, retries and size, and left
//! alone while it keeps failing. Webhooks and judges share this.

mod breaker;
mod events;
mod limits;
mod retry;

use std::time::{Duration, Instant, SystemTime};

use breaker::{Breaker, Change, Pass};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Response, StatusCode, Url, redirect};

pub(super) use events::Events;
pub use limits::CallLimits;
pub(super) use limits::{call_limits, check_url};

/// Why a service gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The HTTP client cannot be made at all (no certificates on this machine, for example).
    #[error("the HTTP client cannot be made: {0}")]
    Client(String),
    /// It kept failing and is not asked for now.
    #[error("it is not asked while its circuit is open")]
    CircuitOpen,
    /// Nobody listens there.
    #[error("no connection: {0}")]
    Connect(String),
    /// It took too long.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The connection ended before the answer did.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// Any status but 2xx; redirects are not followed.
    #[error("it answered with status {0}")]
    Status(u16),
    /// The answer passes `max_response_bytes`.
    #[error("its answer is longer than {0} bytes")]
    TooLarge(usize),
}

impl CallError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Client(_) => "client",
            Self::CircuitOpen => "circuit_open",
            Self::Connect(_) => "connect",
            Self::Timeout(_) => "timeout",
            Self::Broken(_) => "broken",
            Self::Status(429) => "rate_limited",
            Self::Status(300..=399) => "redirect",
            Self::Status(400..=499) => "client_error",
            Self::Status(_) => "server_error",
            Self::TooLarge(_) => "too_large",
        }
    }

    /// Whether the service may answer the same request later: it has not been worked on.
    fn is_worth_a_retry(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Status(408 | 429 | 500..=599))
    }

    /// Whether the service is down or stuck, rather than unhappy with this request.
    fn is_a_failure_of_the_service(&self) -> bool {
        matches!(
            self,
            Self::Connect(_) | Self::Timeout(_) | Self::Broken(_) | Self::Status(408 | 500..=599)
        )
    }
}

/// One attempt that did not succeed, and how long the service asks to be left alone.
struct Failure {
    error: CallError,
    retry_after: Option<Duration>,
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self { error, retry_after: None }
    }
}

/// One address that JSON is posted to.
pub(super) struct Endpoint {
    client: reqwest::Client,
    url: String,
    limits: CallLimits,
    breaker: Breaker,
}

impl Endpoint {
    /// Prepares calls to `url`.
    ///
    /// # Errors
    /// If the HTTP client cannot be made.
    pub(super) fn new(url: &str, limits: CallLimits) -> Result<Self, CallError> {
        // No proxy from the environment, which only the configuration may read.
        let mut builder = reqwest::Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .timeout(limits.timeout);
        if Url::parse(url).is_ok_and(|u| u.scheme() == "http") {
            // Needs none of the system's certificates, which a bare container lacks.
            builder = builder.tls_certs_only([]);
        }
        let client = builder.build().map_err(|e| CallError::Client(cause(e)))?;
        let breaker = Breaker::new(limits.breaker_failures, limits.breaker_cooldown);
        Ok(Self { client, url: url.to_owned(), limits, breaker })
    }

    /// Posts `body`, again where that may help; `headers` makes each attempt's own.
    ///
    /// # Errors
    /// What the last attempt ran into.
    pub(super) async fn post(
        &self,
        body: &[u8],
        headers: impl Fn() -> HeaderMap,
        events: &Events,
    ) -> Result<Vec<u8>, CallError> {
        let mut retries = 0;
        loop {
            let Some(pass) = self.breaker.admit(Instant::now()) else {
                return Err(CallError::CircuitOpen);
            };
            let failure = match self.watched(body, headers(), pass, events).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            if retries == self.limits.retries || !failure.error.is_worth_a_retry() {
                return Err(failure.error);
            }
            let asked = failure.retry_after.unwrap_or_default();
            if asked > self.limits.max_backoff {
                // Asking earlier than it wants is rude, waiting that long holds up the group.
                return Err(failure.error);
            }
            let delay = retry::backoff(&self.limits, retries, rand::random());
            tokio::time::sleep(delay.max(asked)).await;
            retries += 1;
        }
    }

    /// One attempt, told to the circuit breaker and the metrics.
    async fn watched(
        &self,
        body: &[u8],
        headers: HeaderMap,
        pass: Pass<'_>,
        events: &Events,
    ) -> Result<Vec<u8>, Failure> {
        let start = Instant::now();
        let result = self.attempt(body, headers).await;
        let outcome = result.as_ref().map_or_else(|f| f.error.reason(), |_| "ok");
        events.attempt(outcome, start.elapsed());
        let failed = result.as_ref().is_err_and(|f| f.error.is_a_failure_of_the_service());
        let change = if failed { pass.failed(Instant::now()) } else { pass.succeeded() };
        match change {
            Change::None => {}
            Change::Opened => events.circuit(true),
            Change::Closed => events.circuit(false),
        }
        result
    }

    async fn attempt(&self, body: &[u8], headers: HeaderMap) -> Result<Vec<u8>, Failure> {
        let request = self
            .client
            .post(&self.url)
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .headers(headers)
            .body(body.to_vec());
        let response = request.send().await.map_err(|e| self.transport(e))?;
        let status = response.status();
        if !status.is_success() {
            return Err(refusal(status, &response));
        }
        self.read(response).await.map_err(Failure::from)
    }

    /// The answer's bytes, never more than the limit.
    async fn read(&self, mut response: Response) -> Result<Vec<u8>, CallError> {
        let limit = self.limits.max_response_bytes;
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.transport(e))? {
            if answer.len() + chunk.len() > limit {
                return Err(CallError::TooLarge(limit));
            }
            answer.extend_from_slice(&chunk);
        }
        Ok(answer)
    }

    fn transport(&self, error: reqwest::Error) -> CallError {
        if error.is_connect() {
            CallError::Connect(cause(error))
        } else if error.is_timeout() {
            CallError::Timeout(self.limits.timeout)
        } else {
            CallError::Broken(cause(error))
        }
    }
}

fn refusal(status: StatusCode, response: &Response) -> Failure {
    let wait = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok());
    Failure {
        error: CallError::Status(status.as_u16()),
        retry_after: wait.and_then(|v| retry::retry_after(v, SystemTime::now())),
    }
}

/// The innermost cause, without the address: that is what helps.
fn cause(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
