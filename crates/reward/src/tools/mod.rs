//! What some kinds of reward need besides their parameters.

mod config;
mod endpoint;
mod python;

use std::sync::Arc;

use async_trait::async_trait;

use hone_core::metrics::Metrics;

use super::grader::{Backends, ModelClient, ModelFailure, ModelReply, ModelRequest, TokenUsage};
use super::judge::{JudgeModel, JudgeSampling, OWN_MODEL};
use super::sandbox::Sandbox;

pub use config::GradersConfig;
pub use endpoint::GraderEndpoint;
pub use python::LazySandbox;

/// Tokens of an answer where a model grader names no limit.
const ANSWER_TOKENS: u32 = 512;

/// Given to [`super::Routes::with`]. A kind whose tool is missing is refused by name.
#[derive(Clone, Default)]
pub struct Tools {
    /// Where calls are counted.
    pub metrics: Option<Arc<Metrics>>,
    /// This server's base model, for judges with `base_url = "self"`.
    pub own_model: Option<Arc<dyn JudgeModel>>,
    /// For the other models that graders name.
    pub endpoint: Option<Arc<GraderEndpoint>>,
    /// For Python of routes.
    pub sandbox: Option<Arc<Sandbox>>,
    /// For Python of graders, which may come over HTTP without any route that needs it.
    pub python: Option<Arc<LazySandbox>>,
}

impl Tools {
    /// What OpenAI graders may use of them.
    pub fn backends(&self) -> Backends {
        let models = Models { own: self.own_model.clone(), endpoint: self.endpoint.clone() };
        let code = self.python.clone().map(|python| python as _);
        Backends { model: Some(Arc::new(models)), code }
    }

    /// Whether somebody answers for a model that a grader names.
    ///
    /// # Errors
    /// The rest of a sentence that begins with what asks.
    pub(super) fn check_model(&self, model: &str) -> Result<(), String> {
        match model {
            OWN_MODEL if self.own_model.is_some() => Ok(()),
            OWN_MODEL => Err("it asks this server's own model, and none is served".to_owned()),
            _ if self.endpoint.is_some() => Ok(()),
            other => Err(not_answered(other)),
        }
    }
}

fn not_answered(model: &str) -> String {
    format!(
        "it asks the model {model:?}, and graders.base_url names no endpoint that has it (this \
         server's own base model is {OWN_MODEL:?})"
    )
}

/// The models that graders may ask.
struct Models {
    own: Option<Arc<dyn JudgeModel>>,
    endpoint: Option<Arc<GraderEndpoint>>,
}

#[async_trait]
impl ModelClient for Models {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        match (request.model.as_str(), &self.own, &self.endpoint) {
            (OWN_MODEL, Some(own), _) => ask_own(own.as_ref(), request).await,
            (OWN_MODEL, None, _) => Err(ModelFailure::Server("no model is served".to_owned())),
            (_, _, Some(endpoint)) => endpoint.complete(request).await,
            (other, _, None) => Err(ModelFailure::Server(not_answered(other))),
        }
    }
}

/// This server's own model is held to no schema: a bare score or label is understood too.
async fn ask_own(own: &dyn JudgeModel, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
    let sampling = JudgeSampling {
        #[expect(clippy::cast_possible_truncation, reason = "a temperature of at most 2")]
        temperature: request.sampling.temperature.unwrap_or(0.0) as f32,
        max_tokens: request.sampling.max_tokens.unwrap_or(ANSWER_TOKENS),
        seed: request.sampling.seed.map_or(0, i64::unsigned_abs),
    };
    let reply = own.complete(&request.messages, &sampling).await;
    let reply = reply.map_err(|error| ModelFailure::Server(error.to_string()))?;
    let usage = TokenUsage {
        prompt_tokens: reply.prompt_tokens,
        completion_tokens: reply.completion_tokens,
        total_tokens: reply.prompt_tokens + reply.completion_tokens,
        ..TokenUsage::default()
    };
    Ok(ModelReply { text: reply.text, model: OWN_MODEL.to_owned(), usage })
}
