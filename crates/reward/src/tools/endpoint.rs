//! The endpoint of model graders: `[graders]`.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use hone_core::config::{Checked, Secret, from_environment};
use hone_core::metrics::Metrics;

use crate::grader::{ModelClient, ModelFailure, ModelReply, ModelRequest};
use crate::kinds::define::KindParameters;
use crate::remote::{CallError, CallEvents, CallLimits, ChatEndpoint, call_limits, check_url};

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

// The keys of `[graders]`: the endpoint of the models that OpenAI's graders name.

hone_core::parameters! {
    /// The models of `score_model` and `label_model` graders. The name `self` is this server's own base
    /// model; the endpoint serves every other name.
    pub struct GradersConfig {
        /// An OpenAI-compatible endpoint such as `https://api.example/v1`; empty for none.
        pub base_url: String = String::new(),
        /// Environment variable that contains the API key; empty sends no key.
        pub api_key_env: String = String::new(),
        /// Requests at the same time.
        #[serde(skip)]
        pub max_concurrency: usize = 4,
        /// Milliseconds for one attempt, from connecting to the last byte.
        #[serde(skip)]
        pub timeout_ms: u64 = 60_000,
        /// Retries, only after a failed connection, 408, 429 or 5xx.
        #[serde(skip)]
        pub retries: u32 = 2,
        /// Milliseconds before the first retry; doubles for each further one, with jitter.
        #[serde(skip)]
        pub backoff_ms: u64 = 200,
        /// Longest delay between attempts in milliseconds; also limits `Retry-After`.
        #[serde(skip)]
        pub max_backoff_ms: u64 = 10_000,
        /// Consecutive failed attempts that open the circuit.
        #[serde(skip)]
        pub breaker_failures: u32 = 5,
        /// Milliseconds that the circuit stays open before one request probes the service.
        #[serde(skip)]
        pub breaker_cooldown_ms: u64 = 10_000,
        /// Size limit of an answer in bytes.
        #[serde(skip)]
        pub max_response_bytes: usize = 1 << 20,
        /// Whether plain http to other machines is allowed.
        pub allow_http: bool = false,
        ;
        /// The key that the loader read from `api_key_env`.
        pub api_key: Option<Secret>,
    }
}

impl GradersConfig {
    /// The endpoint's call limits.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Looks up the environment variable that `api_key_env` names.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.api_key = from_environment(&self.api_key_env, lookup)?;
        Ok(())
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        if !self.base_url.is_empty() {
            check_url("graders.base_url", &self.base_url, self.allow_http)?;
        }
        let checked = self.check_ranges().and_then(|()| self.limits().check());
        checked.map_err(|problem| problem.prefixed("graders."))
    }
}
