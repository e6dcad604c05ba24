//! The demo's HTTP client. It uses only the public API of the daemon.

mod scrape;
mod sse;
mod stream;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use sse::SseDecoder;
use stream::{StreamReader, error_message};

use hone_core::types::{PolicyRecord, PolicyVersion};

use super::task::THUMBS;

pub use scrape::Scrape;
pub use stream::StreamedAnswer;

/// Longest wait for a response, streamed or not.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request failed. `what` names the request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No response, or a broken connection.
    #[error("{what}: {reason}")]
    Transport {
        /// The request.
        what: &'static str,
        /// The message of the HTTP client.
        reason: String,
    },
    /// A status other than success.
    #[error("{what}: HTTP {status}: {message}")]
    Status {
        /// The request.
        what: &'static str,
        /// The status code.
        status: u16,
        /// The message in the response.
        message: String,
    },
    /// A response that violates the API.
    #[error("{what}: {reason}")]
    Malformed {
        /// The request.
        what: &'static str,
        /// The violation.
        reason: String,
    },
}

/// A chat completion to request.
#[derive(Clone, Debug)]
pub struct UserRequest {
    /// The user's message.
    pub text: String,
    /// The request's `metadata`, which selects the route.
    pub metadata: BTreeMap<String, String>,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// Seed of the sampling.
    pub seed: u64,
    /// Token limit.
    pub max_tokens: u32,
    /// Whether the server may record the completion.
    pub store: bool,
}

/// The fields of `GET /admin/train` that the demo needs.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TrainerStatus {
    /// `waiting`, `training`, `publishing`, `paused`, `finished`, `failed` or `disabled`.
    pub state: String,
    /// Optimizer steps taken.
    pub step: u64,
    /// The last published version that the trainer's weights descend from.
    #[serde(default)]
    pub policy_version: u64,
    /// Prompts waiting for a group.
    #[serde(default)]
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    #[serde(default)]
    pub in_flight_groups: u64,
    /// Groups waiting for a step, including those of the step being computed.
    #[serde(default)]
    pub ready_groups: u64,
    /// The last failure.
    #[serde(default)]
    pub last_error: Option<String>,
    /// Why training pauses, if it began the pause itself.
    #[serde(default)]
    pub hold: Option<String>,
}

/// The field of the response to feedback that users need.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct ThumbReply {
    /// Whether the rating is trained on; `None` if that is not known yet.
    #[serde(default)]
    pub trained: Option<bool>,
}

#[derive(Deserialize)]
struct ListedPolicies {
    data: Vec<PolicyRecord>,
}

impl TrainerStatus {
    /// Whether the trainer is computing.
    pub fn busy(&self) -> bool {
        matches!(self.state.as_str(), "training" | "publishing")
    }

    /// Whether the state changes only on request.
    pub fn settled(&self) -> bool {
        matches!(self.state.as_str(), "paused" | "finished" | "failed" | "disabled")
    }
}

/// A client of one daemon. Clones share a connection pool.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
}

impl Client {
    /// A client of the daemon at `base`, such as `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// If the HTTP client cannot be built.
    pub fn new(base: &str) -> Result<Self, ClientError> {
        // Loopback only: no proxy from the environment, and no system certificates, which a minimal
        // container lacks.
        let http = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .timeout(REQUEST_TIMEOUT)
            .build()
            .map_err(|e| transport("client", &e))?;
        Ok(Self { http, base: base.trim_end_matches('/').to_owned() })
    }

    /// Requests a streamed completion and reads it to its `[DONE]`.
    ///
    /// # Errors
    /// If the stream is incomplete, malformed, or mixes policy versions.
    pub async fn ask(&self, request: &UserRequest) -> Result<StreamedAnswer, ClientError> {
        const WHAT: &str = "chat completion";
        let body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": request.text}],
            "metadata": request.metadata,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "store": request.store,
            "stream": true,
        });
        let sent = Instant::now();
        let post = self.http.post(self.url("/v1/chat/completions")).json(&body);
        let mut response = accepted(WHAT, post).await?;
        let version = response
            .headers()
            .get("x-hone-policy-version")
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .map(PolicyVersion)
            .ok_or_else(|| malformed(WHAT, "no x-hone-policy-version header"))?;
        let mut decoder = SseDecoder::default();
        let mut reader = StreamReader::new(version, sent);
        while let Some(bytes) = response.chunk().await.map_err(|e| transport(WHAT, &e))? {
            for event in decoder.push(&bytes) {
                reader.event(&event).map_err(|reason| malformed(WHAT, reason))?;
            }
        }
        reader.finish().map_err(|reason| malformed(WHAT, reason))
    }

    /// Posts a thumbs up or down for a completion.
    ///
    /// # Errors
    /// If the daemon does not accept it.
    pub async fn thumb(&self, completion_id: &str, up: bool) -> Result<ThumbReply, ClientError> {
        const WHAT: &str = "feedback";
        let body = json!({
            "completion_id": completion_id,
            "choice": 0,
            "name": THUMBS,
            "value": up,
            "idempotency_key": completion_id,
        });
        let request = self.http.post(self.url("/v1/feedback")).json(&body);
        let response = accepted(WHAT, request).await?;
        response.json().await.map_err(|e| transport(WHAT, &e))
    }

    /// The trainer's status.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn trainer(&self) -> Result<TrainerStatus, ClientError> {
        const WHAT: &str = "trainer status";
        let response = accepted(WHAT, self.http.get(self.url("/admin/train"))).await?;
        response.json().await.map_err(|e| transport(WHAT, &e))
    }

    /// Every policy version, in order.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn policies(&self) -> Result<Vec<PolicyRecord>, ClientError> {
        const WHAT: &str = "policy versions";
        let response = accepted(WHAT, self.http.get(self.url("/admin/policies"))).await?;
        let listed: ListedPolicies = response.json().await.map_err(|e| transport(WHAT, &e))?;
        Ok(listed.data)
    }

    /// Stops the trainer from starting optimizer steps until [`Self::resume`].
    ///
    /// # Errors
    /// If the request fails.
    pub async fn pause(&self) -> Result<(), ClientError> {
        accepted("pause", self.http.post(self.url("/admin/train/pause"))).await.map(drop)
    }

    /// Makes `version` the active one.
    ///
    /// # Errors
    /// If the request fails or the version cannot be served.
    pub async fn activate(&self, version: PolicyVersion) -> Result<(), ClientError> {
        let path = format!("/admin/policies/{version}/activate");
        accepted("activation", self.http.post(self.url(&path))).await.map(drop)
    }

    /// Lets the trainer continue.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn resume(&self) -> Result<(), ClientError> {
        accepted("resume", self.http.post(self.url("/admin/train/resume"))).await.map(drop)
    }

    /// All metrics.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn metrics(&self) -> Result<Scrape, ClientError> {
        const WHAT: &str = "metrics";
        let response = accepted(WHAT, self.http.get(self.url("/metrics"))).await?;
        Ok(Scrape::new(response.text().await.map_err(|e| transport(WHAT, &e))?))
    }

    /// Waits until `/readyz` succeeds.
    ///
    /// # Errors
    /// The last failure, once `limit` has passed.
    pub async fn wait_ready(&self, limit: Duration) -> Result<(), ClientError> {
        let deadline = Instant::now() + limit;
        loop {
            match accepted("readiness", self.http.get(self.url("/readyz"))).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

/// Sends a request; a status other than success becomes an error with the server's message.
async fn accepted(
    what: &'static str,
    request: reqwest::RequestBuilder,
) -> Result<reqwest::Response, ClientError> {
    let response = request.send().await.map_err(|e| transport(what, &e))?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    let message = serde_json::from_str::<Value>(&text)
        .ok()
        .and_then(|body| body.get("error").map(error_message))
        .unwrap_or(text);
    Err(ClientError::Status { what, status: status.as_u16(), message })
}

fn malformed(what: &'static str, reason: impl Into<String>) -> ClientError {
    ClientError::Malformed { what, reason: reason.into() }
}

/// Reports the innermost cause: reqwest's own message contains only the URL.
fn transport(what: &'static str, error: &reqwest::Error) -> ClientError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    ClientError::Transport { what, reason: cause.to_string() }
}
