//! The demo's HTTP client. It uses only the public API of the daemon.

mod stream;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use hone_core::types::{PolicyRecord, PolicyVersion};

use super::task::THUMBS;
use stream::{StreamReader, error_message};

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

// Decoder of `text/event-stream` bodies.

/// Incremental decoder of server-sent events. Chunks may end anywhere, also inside a UTF-8 sequence
/// or a line end. Fields other than `data` are ignored, because OpenAI's streams have none. An event
/// that the end of the stream cuts off is dropped, as in the HTML standard.
#[derive(Debug, Default)]
pub struct SseDecoder {
    line: Vec<u8>,
    data: Option<String>,
    after_cr: bool,
}

impl SseDecoder {
    /// Adds the next bytes of the body; returns the `data` of each event that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let ends_crlf = self.after_cr && byte == b'\n';
            self.after_cr = byte == b'\r';
            match byte {
                b'\n' if ends_crlf => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                other => self.line.push(other),
            }
        }
        events
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        if line.is_empty() {
            return self.data.take();
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        if field == "data" {
            let value = value.strip_prefix(' ').unwrap_or(value);
            let lines = self.data.take().map(|before| before + "\n").unwrap_or_default();
            self.data = Some(lines + value);
        }
        None
    }
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

    /// The sum over the samples that have a label of this value; 0 without one.
    pub fn labelled(&self, name: &str, label: &str) -> f64 {
        let label = format!("=\"{label}\"");
        let found = self.samples(name).filter(|(labels, _)| labels.contains(&label));
        found.map(|(_, value)| value).sum()
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
    use super::*;

    const STREAM: &str = ": hello\n\ndata: {\"a\":\"é\"}\n\nevent: x\ndata: one\r\ndata:two\r\n\r\n\
                          data: [DONE]\n\ndata: cut off";

    fn all(chunks: impl Iterator<Item = Vec<u8>>) -> Vec<String> {
        let mut decoder = SseDecoder::default();
        chunks.flat_map(|chunk| decoder.push(&chunk)).collect()
    }

    #[test]
    fn any_chunking_gives_the_same_events() {
        let expected = ["{\"a\":\"é\"}", "one\ntwo", "[DONE]"];
        for size in 1..=STREAM.len() {
            let events = all(STREAM.as_bytes().chunks(size).map(<[u8]>::to_vec));
            assert_eq!(events, expected, "in chunks of {size} bytes");
        }
    }

    #[test]
    fn bare_carriage_returns_end_lines() {
        assert_eq!(all([b"data: a\r\rdata: b\r\r".to_vec()].into_iter()), ["a", "b"]);
    }

    #[test]
    fn empty_data_is_an_event_and_other_fields_are_not() {
        let stream = b"data:\n\ndatabase: no\n\nid: 7\n\n".to_vec();
        assert_eq!(all([stream].into_iter()), [""]);
    }

    mod scrape {
        use hone_core::metrics::Metrics;

        use super::super::*;

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
            assert_eq!(scrape.labelled("hone_http_feedback_total", "recorded"), 3.0);
            assert_eq!(scrape.labelled("hone_http_feedback_total", "lost"), 0.0);
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
}
