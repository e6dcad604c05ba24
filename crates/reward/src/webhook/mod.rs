//! `webhook`: a reward that another service computes. Batches of samples are posted to it as signed
//! JSON.
//!
//! The request is `{id, route, name, samples: [{index, messages, completion, completion_tokens,
//! metadata}]}`. The answer is `{rewards: [0.5, null, ...]}`, one value for each sample in order, or
//! `{rewards: [{index, value}, ...]}`. Requests run as futures on the caller's task, at most
//! `max_concurrency` at a time. Every failure makes values missing, never 0, and is counted by
//! reason. Range and typical weight depend on the service.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use hmac::{Hmac, Mac};
use regex::{Captures, Regex};
use reqwest::header::{HeaderMap, HeaderName};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::sync::Semaphore;

use hone_core::config::{Problem, Secret};
use hone_core::digest::hex;
use hone_core::metrics::Metrics;
use hone_core::types::{new_uuid, now_ms};

use crate::kinds::define::define_kind;
use crate::remote::{CallError, CallEvents, CallLimits, Endpoint, call_limits, unresolved};
use crate::{RewardFn, ScoreInput};

/// The header that identifies a request: all its attempts have the same value.
pub const IDEMPOTENCY_HEADER: &str = "idempotency-key";

/// Asks a service for rewards.
pub struct Webhook {
    endpoint: Endpoint,
    secret: Option<Secret>,
    max_batch: usize,
    slots: Semaphore,
    events: CallEvents,
}

impl Webhook {
    /// Prepares the part `part` of `route`.
    /// Errors: if a secret is named but not resolved, or the HTTP client cannot be built.
    pub fn new(
        params: &WebhookParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, Problem> {
        if params.secret.is_none() && !params.secret_env.is_empty() {
            return Err(unresolved("secret_env", &params.secret_env));
        }
        Ok(Self {
            endpoint: Endpoint::new(&params.url, params.limits())
                .map_err(|error| Problem::new("url", format!(" {error}")))?,
            secret: params.secret.clone(),
            max_batch: params.max_batch.max(1),
            slots: Semaphore::new(params.max_concurrency.max(1)),
            events: CallEvents::new("webhook", route, part, metrics.reward_webhook.clone()),
        })
    }

    async fn batch(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let parsed = match self.ask(samples).await {
            Ok(answer) => ParsedRewards::parse(&answer, samples.len()),
            Err(e) => ParsedRewards::all_missing(e.reason(), samples.len(), e.to_string()),
        };
        for (reason, count) in &parsed.missing {
            self.events.missing(reason, *count, &parsed.detail);
        }
        parsed.values
    }

    async fn ask(&self, samples: &[ScoreInput]) -> Result<Vec<u8>, CallError> {
        // Acquiring cannot fail: the semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let id = new_uuid().to_string();
        let body = request_body(&id, &self.events.route, &self.events.part, samples);
        // Each attempt has its own signature, so that a late retry does not look like a replay.
        let headers = || self.headers(&id, &body);
        self.endpoint.post(&body, headers, &self.events).await
    }

    fn headers(&self, id: &str, body: &[u8]) -> HeaderMap {
        let sign = |secret| sign(secret, now_ms() / 1000, body);
        let signature = self.secret.as_ref().map(sign);
        [(IDEMPOTENCY_HEADER, Some(id.to_owned())), (HEADER, signature)]
            .into_iter()
            .filter_map(|(name, value)| Some((HeaderName::from_static(name), value?.parse().ok()?)))
            .collect()
    }
}

#[async_trait]
impl RewardFn for Webhook {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let batches = samples.chunks(self.max_batch).map(|batch| self.batch(batch));
        futures::future::join_all(batches).await.concat()
    }
}

// `Hone-Signature: t=SECONDS,v1=HEX`: authenticates the sender and the time of a request.
//
// `HEX` is the HMAC-SHA256 (RFC 2104) of `SECONDS`, a full stop and the body's bytes with the shared
// secret, as in Stripe's webhooks. A receiver should compare in constant time and refuse an old `t`.

/// The header's name.
pub const HEADER: &str = "hone-signature";

/// The header's value for a body sent at `seconds` since the Unix epoch.
pub fn sign(secret: &Secret, seconds: u64, body: &[u8]) -> String {
    // Cannot fail: HMAC accepts keys of any length.
    let mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes()).map(|mac| {
        hex(&mac.chain_update(format!("{seconds}.")).chain_update(body).finalize().into_bytes())
    });
    format!("t={seconds},v1={}", mac.unwrap_or_default())
}

/// The body of a request for the rewards of `samples`.
fn request_body(id: &str, route: &str, name: &str, samples: &[ScoreInput]) -> Vec<u8> {
    let sample = |(index, input): (usize, &ScoreInput)| {
        json!({
            "index": index,
            "messages": *input.messages,
            "completion": input.text,
            "completion_tokens": input.ids.len(),
            "metadata": *input.metadata,
        })
    };
    let samples: Vec<Value> = samples.iter().enumerate().map(sample).collect();
    let body = json!({"id": id, "route": route, "name": name, "samples": samples});
    body.to_string().into_bytes()
}

#[derive(Deserialize)]
struct WebhookAnswer {
    rewards: Vec<Value>,
}

#[derive(Debug, Default, PartialEq)]
struct ParsedRewards {
    /// One value for each sample.
    values: Vec<Option<f64>>,
    /// The number of missing values by reason.
    missing: BTreeMap<&'static str, usize>,
    /// The error, for the log.
    detail: String,
}

impl ParsedRewards {
    /// Values that are all missing for one reason.
    fn all_missing(reason: &'static str, samples: usize, detail: String) -> Self {
        Self { values: vec![None; samples], missing: BTreeMap::from([(reason, samples)]), detail }
    }

    /// Parses the answer for `samples` samples.
    ///
    /// A list of numbers must be as long as the batch. Otherwise it is unknown which sample each number
    /// belongs to, so all are missing. Entries `{index, value}` may be in any order and number.
    fn parse(answer: &[u8], samples: usize) -> Self {
        let text = String::from_utf8_lossy(answer);
        let rewards = match serde_json::from_str::<WebhookAnswer>(&quote_non_finite(&text)) {
            Ok(answer) => answer.rewards,
            Err(error) => return Self::all_missing("bad_answer", samples, error.to_string()),
        };
        let entries = rewards.first().is_some_and(Value::is_object);
        if !entries && rewards.len() != samples {
            let reason = if rewards.len() < samples { "too_few" } else { "too_many" };
            let detail = format!("{} rewards for {samples} samples", rewards.len());
            return Self::all_missing(reason, samples, detail);
        }
        let ordered =
            if entries { by_index(&rewards, samples) } else { rewards.iter().map(Some).collect() };
        let mut parsed = Self::default();
        for value in ordered {
            let value = value.map_or(Err("too_few"), number);
            if let Err(reason) = value {
                *parsed.missing.entry(reason).or_default() += 1;
            }
            parsed.values.push(value.ok());
        }
        parsed
    }
}

/// Puts `{index, value}` entries in order. Ignores indices outside the batch. A repeated index has an
/// invalid value, because it is unknown which entry counts.
fn by_index(rewards: &[Value], samples: usize) -> Vec<Option<&Value>> {
    const REPEATED: &Value = &Value::Bool(false);
    let mut values = vec![None; samples];
    for entry in rewards {
        let index =
            entry.get("index").and_then(Value::as_u64).and_then(|i| usize::try_from(i).ok());
        if let Some(place) = index.and_then(|i| values.get_mut(i)) {
            let value = entry.get("value").unwrap_or(&Value::Null);
            *place = Some(if place.is_some() { REPEATED } else { value });
        }
    }
    values
}

fn number(value: &Value) -> Result<f64, &'static str> {
    match value {
        Value::Null => Err("null"),
        Value::Number(n) => n.as_f64().filter(|v| v.is_finite()).ok_or("non_finite"),
        Value::String(text) if text == NON_FINITE => Err("non_finite"),
        _ => Err("not_a_number"),
    }
}

const NON_FINITE: &str = "non-finite";

/// A text in quotes, or a word that may be a number.
static WORD: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"(?s)"(?:[^"\\]|\\.)*"|[-+.0-9A-Za-z]+"#).ok());

/// Replaces `NaN` and `Infinity`, which Python's `json` writes although they are not JSON, and numbers
/// beyond 64-bit floats by a string, so that one such value does not invalidate the others.
fn quote_non_finite(text: &str) -> Cow<'_, str> {
    let Some(word) = &*WORD else { return Cow::Borrowed(text) };
    word.replace_all(text, |word: &Captures<'_>| match word[0].parse::<f64>() {
        Ok(number) if !number.is_finite() => format!("\"{NON_FINITE}\""),
        _ => word[0].to_owned(),
    })
}

define_kind! {
    /// The service that computes the values, and how it is called.
    pub struct WebhookParams {
        /// Address that batches are posted to: https, or plain http to this machine (see `allow_http`).
        pub url: String,
        /// Environment variable with the secret of the HMAC signature; empty sends no signature.
        pub secret_env: String = String::new(),
        /// Most samples in one request.
        pub max_batch: usize = 32 => between(1, 4096),
        /// Most requests at a time.
        pub max_concurrency: usize = 4 => between(1, 1024),
        /// Milliseconds for one attempt, from connecting to the last byte.
        pub timeout_ms: u64 = 5_000 => between(1, 600_000),
        /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
        pub retries: u32 = 2 => between(0, 10),
        /// Milliseconds before the first retry; each further one waits twice as long, jittered.
        pub backoff_ms: u64 = 200 => between(1, 60_000),
        /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
        pub max_backoff_ms: u64 = 10_000,
        /// Failed attempts in a row that open the circuit.
        pub breaker_failures: u32 = 5 => between(1, 1000),
        /// Milliseconds that an open circuit waits before one request probes the service.
        pub breaker_cooldown_ms: u64 = 10_000 => between(1, 3_600_000),
        /// Longest answer in bytes.
        pub max_response_bytes: usize = 1_048_576 => between(64, 1 << 26),
        /// Whether plain http may leave this machine.
        pub allow_http: bool = false,
        ;
        /// The value of `secret_env`, which [`Kind::resolve`](crate::kinds::Kind::resolve) looks up.
        pub secret: Option<Secret>,
    }
    kind: "webhook",
    range: "the service's",
    typical_weight: "1.0",
    example: "url = \"http://127.0.0.1:9/score\"",
    calls_out: true,
    bounds: [f64::NEG_INFINITY, f64::INFINITY],
    formula: "the answer of a service to batches of {messages, completion, metadata}; missing while it does not answer",
}

impl WebhookParams {
    /// How the service is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// A webhook at `url` with every default.
    #[cfg(test)]
    pub fn new(url: impl Into<String>) -> Self {
        serde_json::from_value(serde_json::json!({ "url": url.into() })).unwrap()
    }
}

#[cfg(test)]
pub(crate) mod tests;
