//! The endpoint of model graders: `[graders]`.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;

use super::config::GradersConfig;
use crate::CallError;
use crate::grader::{ModelClient, ModelFailure, ModelReply, ModelRequest};
use crate::remote::{CallEvents, ChatEndpoint};

/// Sends the questions of model graders to an OpenAI-compatible endpoint.
pub struct GraderEndpoint {
    endpoint: ChatEndpoint,
    slots: Semaphore,
}

impl GraderEndpoint {
    /// Prepares calls; `None` if `graders.base_url` is empty. Calls are counted with the judges',
    /// under the route `graders`.
    ///
    /// # Errors
    /// If a header cannot carry the API key, or the HTTP client cannot be built.
    pub fn new(config: &GradersConfig, metrics: &Metrics) -> Result<Option<Arc<Self>>, CallError> {
        if config.base_url.is_empty() {
            return Ok(None);
        }
        let metrics = metrics.reward_judge.calls.clone();
        let events = Arc::new(CallEvents::new("grader", "graders", "model", metrics));
        let key = config.api_key.as_ref();
        Ok(Some(Arc::new(Self {
            endpoint: ChatEndpoint::new(&config.base_url, key, config.limits(), events)?,
            slots: Semaphore::new(config.max_concurrency.max(1)),
        })))
    }
}

/// The request's JSON. Leaves out the fields that the grader does not set, so that the endpoint's
/// defaults apply.
fn body(request: &ModelRequest) -> Value {
    let sampling = &request.sampling;
    let fields = [
        ("model", json!(request.model)),
        ("messages", json!(request.messages)),
        ("response_format", request.response_format.clone()),
        ("temperature", json!(sampling.temperature)),
        ("top_p", json!(sampling.top_p)),
        ("seed", json!(sampling.seed)),
        // OpenAI's reasoning models require this name, and its graders use only such models.
        ("max_completion_tokens", json!(sampling.max_tokens)),
        ("reasoning_effort", json!(sampling.reasoning_effort)),
    ];
    let set = fields.into_iter().filter(|(_, value)| !value.is_null());
    Value::Object(set.map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>())
}

#[async_trait]
impl ModelClient for GraderEndpoint {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        let failed = |error: &dyn std::fmt::Display| ModelFailure::Server(error.to_string());
        let _slot = self.slots.acquire().await.map_err(|error| failed(&error))?;
        let reply = self.endpoint.complete(&body(request)).await.map_err(|error| failed(&error))?;
        match reply.refusal {
            Some(refusal) if !refusal.is_empty() => Err(ModelFailure::Refusal(refusal)),
            _ => Ok(ModelReply {
                text: reply.text.unwrap_or_default(),
                model: reply.model.unwrap_or_else(|| request.model.clone()),
                usage: reply.usage,
            }),
        }
    }
}
