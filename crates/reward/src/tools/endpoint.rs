//! The endpoint of model graders: `[graders]`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use hone_core::config::{Checked, Secret, from_environment};
use hone_core::metrics::Metrics;

use crate::grader::{ModelClient, ModelFailure, ModelReply, ModelRequest};
use crate::remote::{CallError, CallEvents, CallLimits, ChatEndpoint, check_url};

/// How the endpoint is called.
const LIMITS: CallLimits = CallLimits {
    timeout: Duration::from_secs(60),
    retries: 2,
    backoff: Duration::from_millis(200),
    max_backoff: Duration::from_secs(10),
    breaker_failures: 5,
    breaker_cooldown: Duration::from_secs(10),
    max_response_bytes: 1 << 20,
};
/// Requests at the same time.
const CONCURRENCY: usize = 4;

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
            endpoint: ChatEndpoint::new(&config.base_url, key, LIMITS, events)?,
            slots: Semaphore::new(CONCURRENCY),
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

hone_core::parameters! {
    /// The models of `score_model` and `label_model` graders. The name `self` is this server's own base
    /// model; the endpoint serves every other name.
    pub struct GradersConfig {
        /// An OpenAI-compatible endpoint such as `https://api.example/v1`; empty for none.
        pub base_url: String = String::new(),
        /// Environment variable that contains the API key; empty sends no key.
        pub api_key_env: String = String::new(),
        /// Whether plain http to other machines is allowed.
        pub allow_http: bool = false,
        ;
        /// The key that the loader read from `api_key_env`.
        pub api_key: Option<Secret>,
    }
}

impl GradersConfig {
    /// Looks up the environment variable that `api_key_env` names.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.api_key = from_environment(&self.api_key_env, lookup)?;
        Ok(())
    }

    /// Checks the address.
    ///
    /// # Errors
    /// An address that cannot be called.
    pub fn check(&self) -> Checked {
        if !self.base_url.is_empty() {
            check_url("graders.base_url", &self.base_url, self.allow_http)?;
        }
        Ok(())
    }
}
