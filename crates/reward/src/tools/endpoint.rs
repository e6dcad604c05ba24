//! Model graders asked of an OpenAI-compatible endpoint: `[graders]`.

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;

use crate::grader::{ModelClient, ModelFailure, ModelReply, ModelRequest, TokenUsage};
use crate::judge::JudgeError;
use crate::remote::{Endpoint, Events};
use crate::tools::GradersConfig;

/// `POST base_url/chat/completions` for every model but this server's own.
pub struct GraderEndpoint {
    endpoint: Endpoint,
    headers: HeaderMap,
    slots: Semaphore,
    events: Events,
}

impl GraderEndpoint {
    /// `None` where `graders.base_url` is empty. Calls are counted with the judges', under the route
    /// `graders`.
    ///
    /// # Errors
    /// If the API key cannot be sent in a header or the HTTP client cannot be made.
    pub fn new(config: &GradersConfig, metrics: &Metrics) -> Result<Option<Arc<Self>>, JudgeError> {
        if config.base_url.is_empty() {
            return Ok(None);
        }
        let mut headers = HeaderMap::new();
        if let Some(key) = &config.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.expose()));
            let mut value = value.map_err(|_| JudgeError::BadKey)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let url = format!("{}/chat/completions", config.base_url.trim_end_matches('/'));
        Ok(Some(Arc::new(Self {
            endpoint: Endpoint::new(&url, config.limits())?,
            headers,
            slots: Semaphore::new(config.max_concurrency.max(1)),
            events: Events::new("grader", "graders", "model", metrics.reward_judge.calls.clone()),
        })))
    }
}

/// The request's JSON: only what the grader says, so that the endpoint's defaults hold for the rest.
fn body(request: &ModelRequest) -> Value {
    let mut body = Map::new();
    body.insert("model".to_owned(), json!(request.model));
    body.insert("messages".to_owned(), json!(request.messages));
    body.insert("response_format".to_owned(), request.response_format.clone());
    let sampling = &request.sampling;
    let fields = [
        ("temperature", json!(sampling.temperature)),
        ("top_p", json!(sampling.top_p)),
        ("seed", json!(sampling.seed)),
        // The name that OpenAI's reasoning models demand; graders know no other model of theirs.
        ("max_completion_tokens", json!(sampling.max_tokens)),
        ("reasoning_effort", json!(sampling.reasoning_effort)),
    ];
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    body.extend(given.map(|(name, value)| (name.to_owned(), value)));
    Value::Object(body)
}

#[derive(Deserialize)]
struct Completion {
    #[serde(default)]
    model: Option<String>,
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Usage,
}

#[derive(Deserialize)]
struct Choice {
    message: Said,
}

#[derive(Deserialize)]
struct Said {
    content: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Cached,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Cached {
    cached_tokens: u64,
}

#[async_trait]
impl ModelClient for GraderEndpoint {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        let failed = |error: &dyn std::fmt::Display| ModelFailure::Server(error.to_string());
        let _slot = self.slots.acquire().await.map_err(|error| failed(&error))?;
        let body = body(request).to_string().into_bytes();
        let answer = self.endpoint.post(&body, || self.headers.clone(), &self.events).await;
        let answer = answer.map_err(|error| failed(&error))?;
        let completion: Completion = serde_json::from_slice(&answer).map_err(|error| {
            ModelFailure::Server(format!("its answer is not understood: {error}"))
        })?;
        let usage = TokenUsage {
            prompt_tokens: completion.usage.prompt_tokens,
            completion_tokens: completion.usage.completion_tokens,
            total_tokens: completion.usage.prompt_tokens + completion.usage.completion_tokens,
            cached_tokens: completion.usage.prompt_tokens_details.cached_tokens,
        };
        let said = completion.choices.into_iter().next();
        let said =
            said.ok_or_else(|| ModelFailure::Server("its answer has no choice".to_owned()))?;
        match (said.message.content, said.message.refusal) {
            (_, Some(refusal)) if !refusal.is_empty() => Err(ModelFailure::Refusal(refusal)),
            (text, _) => Ok(ModelReply {
                text: text.unwrap_or_default(),
                model: completion.model.unwrap_or_else(|| request.model.clone()),
                usage,
            }),
        }
    }
}
