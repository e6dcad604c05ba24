//! The judge models: an OpenAI-compatible endpoint, and this server's own model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::json;

use hone_core::types::Message;

use super::model::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};
use super::params::{JudgeParams, TokenLimitField};
use crate::remote::{CallError, CallEvents, ChatEndpoint};

/// A model at an OpenAI-compatible endpoint.
pub(super) struct EndpointJudge {
    endpoint: ChatEndpoint,
    model: String,
    limit_field: &'static str,
}

impl EndpointJudge {
    pub(super) fn new(params: &JudgeParams, events: Arc<CallEvents>) -> Result<Self, JudgeError> {
        let key = params.api_key.as_ref();
        if key.is_none() && !params.api_key_env.is_empty() {
            return Err(JudgeError::Unresolved(params.api_key_env.clone()));
        }
        Ok(Self {
            endpoint: ChatEndpoint::new(&params.base_url, key, params.limits(), events)?,
            model: params.model.clone(),
            limit_field: match params.token_limit_field {
                TokenLimitField::MaxTokens => "max_tokens",
                TokenLimitField::MaxCompletionTokens => "max_completion_tokens",
            },
        })
    }
}

#[async_trait]
impl JudgeModel for EndpointJudge {
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
        let reply = self.endpoint.complete(&body).await?;
        Ok(JudgeReply {
            text: reply.text.or(reply.refusal).unwrap_or_default(),
            prompt_tokens: reply.usage.prompt_tokens,
            completion_tokens: reply.usage.completion_tokens,
        })
    }
}

/// This server's own model with a time limit; its calls are counted like those of an endpoint.
pub(super) struct SelfJudgeClient {
    pub(super) model: Arc<dyn JudgeModel>,
    pub(super) timeout: Duration,
    pub(super) events: Arc<CallEvents>,
}

#[async_trait]
impl JudgeModel for SelfJudgeClient {
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError> {
        let start = Instant::now();
        let reply = tokio::time::timeout(self.timeout, self.model.complete(messages, params)).await;
        let reply = reply.unwrap_or(Err(CallError::Timeout(self.timeout).into()));
        let outcome = reply.as_ref().map_or_else(JudgeError::reason, |_| "ok");
        self.events.attempt(outcome, start.elapsed());
        reply
    }
}
