//! The demo's HTTP client: what any user of the daemon could do with curl, and nothing else.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use hone_core::types::PolicyVersion;

use super::scrape::Scrape;
use super::sse::SseDecoder;

/// Longest wait for one answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request counts as failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No answer, or a connection that broke.
    #[error("{what}: {reason}")]
    Transport {
        /// Which request.
        what: &'static str,
        /// What the HTTP client said.
        reason: String,
    },
    /// An answer other than 200.
    #[error("{what}: HTTP {status}: {message}")]
    Status {
        /// Which request.
        what: &'static str,
        /// The status code.
        status: u16,
        /// The error's message.
        message: String,
    },
    /// An answer that is not what it should be.
    #[error("{what}: {reason}")]
    Malformed {
        /// Which request.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// One question as it goes over the wire, sampled at plain temperature 1.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The user's message.
    pub text: String,
    /// The request's `metadata`.
    pub metadata: BTreeMap<String, String>,
    /// Seed of the sampling.
    pub seed: u64,
    /// Token limit.
    pub max_tokens: u32,
}

/// A streamed answer, whole.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What feedback refers to.
    pub completion_id: String,
    /// The text.
    pub text: String,
    /// The one policy version that wrote it.
    pub version: PolicyVersion,
    /// From sending the request to the first text.
    pub first_token: Duration,
    /// From each piece of text to the next.
    pub gaps: Vec<Duration>,
}

/// What `GET /admin/train` says, as far as the demo needs it.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TrainerStatus {
    /// `waiting`, `training`, `publishing`, `paused`, `finished`, `failed` or `disabled`.
    pub state: String,
    /// Optimiser steps taken.
    pub step: u64,
    /// The version that the trainer's weights come after.
    #[serde(default)]
    pub policy_version: u64,
    /// Prompts waiting for a group.
    #[serde(default)]
    pub queued_prompts: u64,
    /// Groups being sampled or scored.
    #[serde(default)]
    pub in_flight_groups: u64,
    /// Groups waiting for a step, those of the step in hand included.
    #[serde(default)]
    pub ready_groups: u64,
    /// What went wrong last.
    #[serde(default)]
    pub last_error: Option<String>,
}

impl TrainerStatus {
    /// Whether the trainer is computing.
    pub fn busy(&self) -> bool {
        matches!(self.state.as_str(), "training" | "publishing")
    }

    /// Whether nothing more will change by itself.
    pub fn settled(&self) -> bool {
        matches!(self.state.as_str(), "paused" | "finished" | "failed" | "disabled")
    }
}

/// Talks to one daemon. Cheap to clone.
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
        // Loopback only: no proxy from the environment, and no need of the system's certificates,
        // which a bare container lacks.
        let http = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .timeout(REQUEST_TIMEOUT)
            .build()
            .map_err(|e| transport("client", &e))?;
        Ok(Self { http, base: base.trim_end_matches('/').to_owned() })
    }

    /// Where the daemon listens.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Asks, streamed, and reads the answer to its `[DONE]`.
    ///
    /// # Errors
    /// Anything but a whole, well-formed stream from exactly one policy version.
    pub async fn ask(&self, ask: &Ask) -> Result<Answer, ClientError> {
        const WHAT: &str = "chat completion";
        let body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": ask.text}],
            "metadata": ask.metadata,
            "seed": ask.seed,
            "max_tokens": ask.max_tokens,
            "temperature": 1.0,
            "stream": true,
        });
        let sent = Instant::now();
        let request = self.http.post(self.url("/v1/chat/completions")).json(&body);
        let mut response = accepted(WHAT, request).await?;
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

    /// Posts a thumb for an answer.
    ///
    /// # Errors
    /// Anything but 200.
    pub async fn thumb(&self, completion_id: &str, up: bool) -> Result<(), ClientError> {
        let body = json!({
            "completion_id": completion_id,
            "choice": 0,
            "name": super::config::THUMBS,
            "value": up,
            "idempotency_key": completion_id,
        });
        let request = self.http.post(self.url("/v1/feedback")).json(&body);
        accepted("feedback", request).await.map(drop)
    }

    /// What the trainer is doing.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn trainer(&self) -> Result<TrainerStatus, ClientError> {
        const WHAT: &str = "trainer status";
        let response = accepted(WHAT, self.http.get(self.url("/admin/train"))).await?;
        response.json().await.map_err(|e| transport(WHAT, &e))
    }

    /// Takes no further optimiser step until [`Self::resume`].
    ///
    /// # Errors
    /// Anything but success.
    pub async fn pause(&self) -> Result<(), ClientError> {
        accepted("pause", self.http.post(self.url("/admin/train/pause"))).await.map(drop)
    }

    /// Lets the trainer go on.
    ///
    /// # Errors
    /// Anything but success.
    pub async fn resume(&self) -> Result<(), ClientError> {
        accepted("resume", self.http.post(self.url("/admin/train/resume"))).await.map(drop)
    }

    /// Every metric.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn metrics(&self) -> Result<Scrape, ClientError> {
        const WHAT: &str = "metrics";
        let response = accepted(WHAT, self.http.get(self.url("/metrics"))).await?;
        Ok(Scrape::parse(&response.text().await.map_err(|e| transport(WHAT, &e))?))
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Errors
    /// The last refusal, when `limit` has passed.
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

/// What a stream has said so far, and whether it keeps its promises.
struct StreamReader {
    version: PolicyVersion,
    sent: Instant,
    first_token: Option<Duration>,
    /// When the last text came.
    last: Duration,
    gaps: Vec<Duration>,
    id: Option<String>,
    text: String,
    finished: bool,
    done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    id: String,
    system_fingerprint: Option<String>,
    #[serde(default)]
    choices: Vec<ChunkChoice>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    delta: ChunkDelta,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct ChunkDelta {
    content: Option<String>,
}

impl StreamReader {
    fn new(version: PolicyVersion, sent: Instant) -> Self {
        Self {
            version,
            sent,
            first_token: None,
            last: Duration::ZERO,
            gaps: Vec::new(),
            id: None,
            text: String::new(),
            finished: false,
            done: false,
        }
    }

    fn event(&mut self, data: &str) -> Result<(), String> {
        if self.done {
            return Err("an event after [DONE]".to_owned());
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let value: Value = serde_json::from_str(data).map_err(|e| format!("not JSON: {e}"))?;
        if let Some(error) = value.get("error") {
            return Err(format!("the stream failed: {}", error_message(error)));
        }
        let chunk: Chunk =
            serde_json::from_value(value).map_err(|e| format!("not a chunk: {e}"))?;
        self.chunk(chunk)
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), String> {
        let expected = self.version.fingerprint();
        match chunk.system_fingerprint {
            Some(said) if said != expected => {
                return Err(format!("a chunk of {said} in a stream of {expected}"));
            }
            _ => {}
        }
        if self.id.get_or_insert_with(|| chunk.id.clone()) != &chunk.id {
            return Err("the completion's id changed within the stream".to_owned());
        }
        for choice in chunk.choices {
            if let Some(content) = choice.delta.content.filter(|content| !content.is_empty()) {
                let now = self.sent.elapsed();
                match self.first_token {
                    None => self.first_token = Some(now),
                    Some(_) => self.gaps.push(now.saturating_sub(self.last)),
                }
                self.last = now;
                self.text.push_str(&content);
            }
            self.finished |= choice.finish_reason.is_some();
        }
        Ok(())
    }

    fn finish(self) -> Result<Answer, String> {
        if !self.done {
            return Err("the stream ended without [DONE]".to_owned());
        }
        if !self.finished {
            return Err("the stream ended without a finish_reason".to_owned());
        }
        let completion_id = self.id.ok_or("the stream held no chunk")?;
        // An answer without any text has its end as its first news.
        let first_token = self.first_token.unwrap_or_else(|| self.sent.elapsed());
        let Self { text, version, gaps, .. } = self;
        Ok(Answer { completion_id, text, version, first_token, gaps })
    }
}

/// Sends, and turns every status but success into an error with the server's message.
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

fn error_message(error: &Value) -> String {
    match error.get("message").and_then(Value::as_str) {
        Some(message) => message.to_owned(),
        None => error.to_string(),
    }
}

fn malformed(what: &'static str, reason: impl Into<String>) -> ClientError {
    ClientError::Malformed { what, reason: reason.into() }
}

/// reqwest's message names the URL; the cause is what helps.
fn transport(what: &'static str, error: &reqwest::Error) -> ClientError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    ClientError::Transport { what, reason: cause.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[&str]) -> Result<Answer, String> {
        let mut reader = StreamReader::new(PolicyVersion(3), Instant::now());
        for event in events {
            reader.event(event)?;
        }
        reader.finish()
    }

    const ROLE: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const TEXT: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{"content":"4"},"finish_reason":null}]}"#;
    const END: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
    const USAGE: &str = r#"{"id":"chatcmpl-1","choices":[],"usage":{"total_tokens":3}}"#;

    #[test]
    fn a_whole_stream_is_an_answer() {
        let answer = read(&[ROLE, TEXT, TEXT, END, USAGE, "[DONE]"]).unwrap();
        assert_eq!((answer.text.as_str(), answer.completion_id.as_str()), ("44", "chatcmpl-1"));
        assert_eq!(answer.version, PolicyVersion(3));
    }

    #[test]
    fn broken_streams_are_failures() {
        let other = TEXT.replace("hone-v3", "hone-v4");
        let elsewhere = TEXT.replace("chatcmpl-1", "chatcmpl-2");
        let failed = r#"{"error":{"message":"engine failure","type":"server_error"}}"#;
        for (events, reason) in [
            (vec![ROLE, TEXT, END], "without [DONE]"),
            (vec![ROLE, TEXT, "[DONE]"], "without a finish_reason"),
            (vec![ROLE, &other], "hone-v4 in a stream of hone-v3"),
            (vec![ROLE, &elsewhere], "id changed"),
            (vec![ROLE, TEXT, failed], "engine failure"),
            (vec![ROLE, "{"], "not JSON"),
            (vec![END, "[DONE]", TEXT], "after [DONE]"),
        ] {
            let error = read(&events).unwrap_err();
            assert!(error.contains(reason), "{error:?} should say {reason:?}");
        }
    }
}
