//! One URL that JSON is posted to.

use std::time::{Duration, Instant, SystemTime};

use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Response, Url, redirect};

use super::breaker::{Breaker, CircuitChange, Permit};
use super::error::CallError;
use super::events::CallEvents;
use super::limits::CallLimits;
use super::retry;

/// One URL that JSON is posted to.
pub(crate) struct Endpoint {
    client: reqwest::Client,
    url: String,
    limits: CallLimits,
    breaker: Breaker,
}

impl Endpoint {
    /// Prepares calls to `url`.
    ///
    /// # Errors
    /// If the HTTP client cannot be built.
    pub(crate) fn new(url: &str, limits: CallLimits) -> Result<Self, CallError> {
        // No proxy from the environment, which only the configuration may read.
        let mut builder = reqwest::Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .timeout(limits.timeout);
        if Url::parse(url).is_ok_and(|u| u.scheme() == "http") {
            // Needs no system certificates, which a minimal container lacks.
            builder = builder.tls_certs_only([]);
        }
        let client = builder.build().map_err(|e| CallError::Client(e.without_url()))?;
        let breaker = Breaker::new(limits.breaker_failures, limits.breaker_cooldown);
        Ok(Self { client, url: url.to_owned(), limits, breaker })
    }

    /// Posts `body`, with retries; `headers` builds the headers of each attempt.
    ///
    /// # Errors
    /// The last attempt's.
    pub(crate) async fn post(
        &self,
        body: &[u8],
        headers: impl Fn() -> HeaderMap,
        events: &CallEvents,
    ) -> Result<Vec<u8>, CallError> {
        let mut retries = 0;
        loop {
            let permit = self.breaker.admit(Instant::now()).ok_or(CallError::CircuitOpen)?;
            let error = match self.tracked_attempt(body, headers(), permit, events).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let requested = match error {
                CallError::Status(_, retry_after) => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            // A longer `Retry-After` would delay the group; an earlier retry would be refused.
            if retries == self.limits.retries
                || !error.is_retryable()
                || requested > self.limits.max_backoff
            {
                return Err(error);
            }
            let delay = retry::backoff(&self.limits, retries, rand::random());
            tokio::time::sleep(delay.max(requested)).await;
            retries += 1;
        }
    }

    /// One attempt, reported to the circuit breaker and to `events`.
    async fn tracked_attempt(
        &self,
        body: &[u8],
        headers: HeaderMap,
        permit: Permit<'_>,
        events: &CallEvents,
    ) -> Result<Vec<u8>, CallError> {
        let start = Instant::now();
        let result = self.attempt(body, headers).await;
        let outcome = result.as_ref().map_or_else(CallError::reason, |_| "ok");
        events.attempt(outcome, start.elapsed());
        let failed = result.as_ref().is_err_and(CallError::is_service_failure);
        match if failed { permit.failed(Instant::now()) } else { permit.succeeded() } {
            CircuitChange::None => {}
            CircuitChange::Opened => events.circuit(true),
            CircuitChange::Closed => events.circuit(false),
        }
        result
    }

    async fn attempt(&self, body: &[u8], headers: HeaderMap) -> Result<Vec<u8>, CallError> {
        let request = self
            .client
            .post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .headers(headers)
            .body(body.to_vec());
        let response = request.send().await.map_err(|e| self.transport_error(e))?;
        if !response.status().is_success() {
            let wait = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok());
            let wait = wait.and_then(|v| retry::retry_after(v, SystemTime::now()));
            return Err(CallError::Status(response.status().as_u16(), wait));
        }
        self.read(response).await
    }

    /// Reads the answer up to the size limit.
    async fn read(&self, mut response: Response) -> Result<Vec<u8>, CallError> {
        let limit = self.limits.max_response_bytes;
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.transport_error(e))? {
            if answer.len() + chunk.len() > limit {
                return Err(CallError::TooLarge(limit));
            }
            answer.extend_from_slice(&chunk);
        }
        Ok(answer)
    }

    fn transport_error(&self, error: reqwest::Error) -> CallError {
        let error = error.without_url();
        if error.is_connect() {
            CallError::Connect(error)
        } else if error.is_timeout() {
            CallError::Timeout(self.limits.timeout)
        } else {
            CallError::Broken(error)
        }
    }
}
