//! Who is asked: an OpenAI-compatible endpoint, or this server's own model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::json;

use hone_core::types::Message;

use super::params::{JudgeParams, TokenLimitField};
use super::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};
use crate::CallError;
use crate::remote::{Endpoint, Events};

/// `POST base_url/chat/completions`.
pub(super) struct OpenAi {
    endpoint: Endpoint,
    model: String,
    limit_field: &'static str,
    headers: HeaderMap,
    events: Arc<Events>,
}

impl OpenAi {
    pub(super) fn new(params: &JudgeParams, events: Arc<Events>) -> Result<Self, JudgeError> {
        let mut headers = HeaderMap::new();
        if let Some(key) = &params.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.expose()));
            let mut value = value.map_err(|_| JudgeError::BadKey)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        } else if !params.api_key_env.is_empty() {
            return Err(JudgeError::Unresolved(params.api_key_env.clone()));
        }
        let url = format!("{}/chat/completions", params.base_url.trim_end_matches('/'));
        Ok(Self {
            endpoint: Endpoint::new(&url, params.limits())?,
            model: params.model.clone(),
            limit_field: match params.token_limit_field {
                TokenLimitField::MaxTokens => "max_tokens",
                TokenLimitField::MaxCompletionTokens => "max_completion_tokens",
            },
            headers,
            events,
        })
    }
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
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
}

#[async_trait]
impl JudgeModel for OpenAi {
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError> {
        let mut body = json!({
            "model": self.model,
            "messages": messages,
            "temperature": params.temperature,
            "seed": params.seed,
        });
        body[self.limit_field] = params.max_tokens.into();
        let body = body.to_string().into_bytes();
        let answer = self.endpoint.post(&body, || self.headers.clone(), &self.events).await?;
        let completion: Completion =
            serde_json::from_slice(&answer).map_err(|e| JudgeError::BadAnswer(e.to_string()))?;
        let usage = completion.usage.unwrap_or_default();
        let choice = completion.choices.into_iter().next();
        let said = choice.ok_or_else(|| JudgeError::BadAnswer("no choice".to_owned()))?.message;
        Ok(JudgeReply {
            text: said.content.or(said.refusal).unwrap_or_default(),
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
        })
    }
}

/// This server's own model, bounded in time and counted like any other.
pub(super) struct Own {
    model: Arc<dyn JudgeModel>,
    timeout: Duration,
    events: Arc<Events>,
}

impl Own {
    pub(super) fn new(model: Arc<dyn JudgeModel>, timeout: Duration, events: Arc<Events>) -> Self {
        Self { model, timeout, events }
    }
}

#[async_trait]
impl JudgeModel for Own {
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError> {
        let start = Instant::now();
        let answer =
            tokio::time::timeout(self.timeout, self.model.complete(messages, params)).await;
        let answer = answer.unwrap_or(Err(CallError::Timeout(self.timeout).into()));
        let outcome = answer.as_ref().map_or_else(JudgeError::reason, |_| "ok");
        self.events.attempt(outcome, start.elapsed());
        answer
    }
}
