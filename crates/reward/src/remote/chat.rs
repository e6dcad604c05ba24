//! OpenAI-compatible chat completion endpoints.

use std::sync::Arc;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::Value;

use hone_core::config::Secret;

use super::endpoint::Endpoint;
use super::{CallError, CallEvents, CallLimits};
use crate::grader::TokenUsage;

/// `POST base_url/chat/completions`.
pub(crate) struct ChatEndpoint {
    endpoint: Endpoint,
    headers: HeaderMap,
    events: Arc<CallEvents>,
}

/// The first choice of a chat completion.
pub(crate) struct ChatReply {
    /// The model's name, if the server reports it.
    pub model: Option<String>,
    pub text: Option<String>,
    pub refusal: Option<String>,
    pub usage: TokenUsage,
}

impl ChatEndpoint {
    /// Prepares calls; sends `api_key` as a bearer token.
    /// Errors: if a header cannot carry the key, or the HTTP client cannot be built.
    pub(crate) fn new(
        base_url: &str,
        api_key: Option<&Secret>,
        limits: CallLimits,
        events: Arc<CallEvents>,
    ) -> Result<Self, CallError> {
        let mut headers = HeaderMap::new();
        if let Some(key) = api_key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.expose()));
            let mut value = value.map_err(|_| CallError::BadKey)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let url = format!("{}/chat/completions", base_url.trim_end_matches('/'));
        Ok(Self { endpoint: Endpoint::new(&url, limits)?, headers, events })
    }

    /// Posts a request and reads the first choice of the answer.
    /// Errors: if the call fails, or the answer is not a chat completion.
    pub(crate) async fn complete(&self, request: &Value) -> Result<ChatReply, CallError> {
        let body = request.to_string().into_bytes();
        let answer = self.endpoint.post(&body, || self.headers.clone(), &self.events).await?;
        let answer: Value = serde_json::from_slice(&answer).map_err(CallError::BadAnswer)?;
        let message = answer.pointer("/choices/0/message").ok_or(CallError::NoChoice)?;
        let text = |name: &str| Option::deserialize(&message[name]).map_err(CallError::BadAnswer);
        let count = |name: &str| answer["usage"].pointer(name).and_then(Value::as_u64).unwrap_or(0);
        let (prompt_tokens, completion_tokens) =
            (count("/prompt_tokens"), count("/completion_tokens"));
        Ok(ChatReply {
            model: answer["model"].as_str().map(str::to_owned),
            text: text("content")?,
            refusal: text("refusal")?,
            usage: TokenUsage {
                prompt_tokens,
                completion_tokens,
                total_tokens: prompt_tokens + completion_tokens,
                cached_tokens: count("/prompt_tokens_details/cached_tokens"),
            },
        })
    }
}
