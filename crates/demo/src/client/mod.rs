//! The demo's HTTP client. It uses only the public API of the daemon.

mod stream;

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use eventsource_stream::{EventStreamError, Eventsource as _};
use futures::StreamExt as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use hone_core::types::{PolicyRecord, PolicyVersion};

use super::task::{MAX_TOKENS, Question, THUMBS};
use stream::{StreamReader, error_message};

pub use stream::StreamedAnswer;

/// Longest wait for a response, streamed or not.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct ClientError {
    /// The request.
    pub what: &'static str,
    /// The message of the HTTP client, the status with the message in the response, or how the response
    /// violates the API.
    pub reason: String,
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

impl UserRequest {
    /// A question of the demo's task, sampled at temperature 1, which the server may record.
    pub fn sampled(question: &Question, metadata: BTreeMap<String, String>, seed: u64) -> Self {
        let (text, max_tokens) = (question.text(), MAX_TOKENS);
        Self { text, metadata, temperature: 1.0, seed, max_tokens, store: true }
    }
}

/// The fields of `GET /admin/train` that the demo needs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct TrainerStatus {
    /// `waiting`, `training`, `publishing`, `paused`, `finished`, `failed` or `disabled`.
    pub state: String,
    /// Optimizer steps taken.
    pub step: u64,
    /// The last published version that the trainer's weights descend from.
    pub policy_version: u64,
    /// Prompts waiting for a group.
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    pub in_flight_groups: u64,
    /// Groups waiting for a step, including those of the step being computed.
    pub ready_groups: u64,
    /// The last failure.
    pub last_error: Option<String>,
    /// Why training pauses, if it began the pause itself.
    pub hold: Option<String>,
}

/// The field of the response to feedback that users need.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct ThumbReply {
    /// Whether the rating is trained on; `None` if that is not known yet.
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
        let response = accepted(WHAT, post).await?;
        let version = response
            .headers()
            .get("x-hone-policy-version")
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .map(PolicyVersion)
            .ok_or_else(|| malformed(WHAT, "no x-hone-policy-version header"))?;
        let mut reader = StreamReader::new(version, sent);
        let mut events = pin!(response.bytes_stream().eventsource());
        while let Some(event) = events.next().await {
            let event = event.map_err(|error| match error {
                EventStreamError::Transport(error) => transport(WHAT, &error),
                other => malformed(WHAT, other.to_string()),
            })?;
            reader.event(&event.data).map_err(|reason| malformed(WHAT, reason))?;
        }
        reader.finish().map_err(|reason| malformed(WHAT, reason))
    }

    /// Posts a thumbs up or down for a completion.
    pub async fn thumb(&self, completion_id: &str, up: bool) -> Result<ThumbReply, ClientError> {
        let body = json!({
            "completion_id": completion_id,
            "choice": 0,
            "name": THUMBS,
            "value": up,
            "idempotency_key": completion_id,
        });
        json("feedback", self.http.post(self.url("/v1/feedback")).json(&body)).await
    }

    /// The trainer's status.
    pub async fn trainer(&self) -> Result<TrainerStatus, ClientError> {
        json("trainer status", self.http.get(self.url("/admin/train"))).await
    }

    /// Every policy version, in order.
    pub async fn policies(&self) -> Result<Vec<PolicyRecord>, ClientError> {
        let request = self.http.get(self.url("/admin/policies"));
        Ok(json::<ListedPolicies>("policy versions", request).await?.data)
    }

    /// Stops the trainer from starting optimizer steps until [`Self::resume`].
    pub async fn pause(&self) -> Result<(), ClientError> {
        accepted("pause", self.http.post(self.url("/admin/train/pause"))).await.map(drop)
    }

    /// Lets the trainer continue.
    pub async fn resume(&self) -> Result<(), ClientError> {
        accepted("resume", self.http.post(self.url("/admin/train/resume"))).await.map(drop)
    }

    /// Makes `version` the active one.
    pub async fn activate(&self, version: PolicyVersion) -> Result<(), ClientError> {
        let path = format!("/admin/policies/{version}/activate");
        accepted("activation", self.http.post(self.url(&path))).await.map(drop)
    }

    /// All metrics.
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
    Err(ClientError { what, reason: format!("HTTP {}: {message}", status.as_u16()) })
}

/// [`accepted`], with the response as JSON.
async fn json<T: DeserializeOwned>(
    what: &'static str,
    request: reqwest::RequestBuilder,
) -> Result<T, ClientError> {
    accepted(what, request).await?.json().await.map_err(|e| transport(what, &e))
}

fn malformed(what: &'static str, reason: impl Into<String>) -> ClientError {
    ClientError { what, reason: reason.into() }
}

/// Reports the innermost cause: reqwest's own message contains only the URL.
fn transport(what: &'static str, error: &reqwest::Error) -> ClientError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    ClientError { what, reason: cause.to_string() }
}

// Reads metrics out of `/metrics`.

/// One scrape in Prometheus' text format.
#[derive(Clone, Debug)]
pub struct Scrape(String);

impl Scrape {
    /// Keeps the text of a response.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The sum over all label values; `None` if the metric is absent.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(|a, b| a + b)
    }

    /// The first sample with this label value; `None` if it is absent.
    pub fn value_of(&self, name: &str, label: &str) -> Option<f64> {
        let quoted = format!("\"{label}\"");
        self.samples(name).find(|(labels, _)| labels.contains(&quoted)).map(|(_, value)| value)
    }

    /// The `q`-quantile of a histogram without other labels, linear within its bucket as
    /// Prometheus' `histogram_quantile`; `None` while the histogram is empty.
    pub fn quantile(&self, name: &str, q: f64) -> Option<f64> {
        let bucket = format!("{name}_bucket");
        let bound = |labels: &str| labels.split('"').nth(1)?.parse::<f64>().ok();
        let mut buckets: Vec<(f64, f64)> = self
            .samples(&bucket)
            .filter_map(|(labels, count)| Some((bound(labels)?, count)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = q * buckets.last().map(|(_, total)| *total).filter(|total| *total > 0.0)?;
        let (mut low, mut below) = (0.0, 0.0);
        for (high, count) in buckets {
            if count >= rank && count > below {
                // The last bucket has no upper bound.
                let inside = (rank - below) / (count - below);
                return Some(if high.is_finite() { low + (high - low) * inside } else { low });
            }
            (low, below) = (high, count);
        }
        None
    }

    /// Labels and value of each sample of a metric. Lines that are not samples are skipped.
    fn samples(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
            let is_whole_name = labels.is_empty() || labels.starts_with('{');
            Some((labels, value.parse().ok().filter(|_| is_whole_name)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use hone_core::metrics::Metrics;

    use super::*;

    #[test]
    fn reads_the_metrics_of_the_daemon() {
        let metrics = Metrics::new().unwrap();
        metrics.policy_published.inc_by(12);
        metrics.train.kl.set(0.25);
        metrics.feedback.with_label_values(&["recorded"]).inc_by(3);
        metrics.feedback.with_label_values(&["unknown"]).inc_by(2);
        let scrape = Scrape::new(metrics.encode().unwrap());
        assert_eq!(scrape.value("hone_policy_published_total"), Some(12.0));
        assert_eq!(scrape.value("hone_train_kl"), Some(0.25));
        assert_eq!(scrape.value("hone_http_feedback_total"), Some(5.0));
        assert_eq!(scrape.value("hone_no_such_thing"), None);
        assert_eq!(scrape.value("hone_train_k"), None);
    }

    #[test]
    fn quantiles_are_linear_within_a_bucket() {
        let metrics = Metrics::new().unwrap();
        assert_eq!(quantile(&metrics, 0.5), None);
        // Buckets … 0.5, 1, 2.5, 5 …: two observations in (1, 2.5], two in (2.5, 5].
        for seconds in [2.0, 2.0, 3.0, 4.0] {
            metrics.feedback_to_policy.observe(seconds);
        }
        assert_eq!(quantile(&metrics, 0.25), Some(1.75));
        assert_eq!(quantile(&metrics, 0.5), Some(2.5));
        assert_eq!(quantile(&metrics, 1.0), Some(5.0));
        // Above the last bound, only the bound is known.
        for _ in 0..100 {
            metrics.feedback_to_policy.observe(5000.0);
        }
        assert_eq!(quantile(&metrics, 0.9), Some(900.0));
    }

    fn quantile(metrics: &Metrics, q: f64) -> Option<f64> {
        Scrape::new(metrics.encode().unwrap()).quantile("hone_feedback_to_policy_seconds", q)
    }
}
