//! What some kinds of reward need besides their parameters.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;

use super::code::{PythonGrader, PythonGraderError};
use super::grader::{
    Backends, CodeFailure, CodeRunner, ModelClient, ModelFailure, ModelReply, ModelRequest,
    TokenUsage,
};
use super::judge::{JudgeModel, JudgeSampling};
use super::sandbox::{Limits, Sandbox};
use crate::telemetry::Metrics;

/// The name under which a model grader asks this server's own base model.
pub const OWN_MODEL: &str = "self";

/// Tokens of an answer where a model grader names no limit.
const ANSWER_TOKENS: u32 = 512;

/// Given to [`super::Routes::with`]. A kind whose tool is missing is refused by name.
#[derive(Clone, Default)]
pub struct Tools {
    /// Where calls are counted.
    pub metrics: Option<Arc<Metrics>>,
    /// This server's base model, for judges with `base_url = "self"`.
    pub own_model: Option<Arc<dyn JudgeModel>>,
    /// For Python.
    pub sandbox: Option<Arc<Sandbox>>,
}

impl Tools {
    /// What OpenAI graders may use of them.
    pub fn backends(&self) -> Backends {
        let model = self.own_model.clone().map(|model| Arc::new(OwnGrader(model)) as _);
        let code = self.sandbox.clone().map(|sandbox| Arc::new(Python(sandbox)) as _);
        Backends { model, code }
    }
}

/// Model graders asked of this server's own model. It is held to no schema: a bare score or label is
/// understood too.
struct OwnGrader(Arc<dyn JudgeModel>);

#[async_trait]
impl ModelClient for OwnGrader {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        if request.model != OWN_MODEL {
            let (asked, own) = (&request.model, OWN_MODEL);
            return Err(ModelFailure::Server(format!(
                "model is \"{asked}\": this server answers for \"{own}\" only"
            )));
        }
        let sampling = JudgeSampling {
            #[expect(clippy::cast_possible_truncation, reason = "a temperature of at most 2")]
            temperature: request.sampling.temperature.unwrap_or(0.0) as f32,
            max_tokens: request.sampling.max_tokens.unwrap_or(ANSWER_TOKENS),
            seed: request.sampling.seed.map_or(0, i64::unsigned_abs),
        };
        let reply = self.0.complete(&request.messages, &sampling).await;
        let reply = reply.map_err(|error| ModelFailure::Server(error.to_string()))?;
        let usage = TokenUsage {
            prompt_tokens: reply.prompt_tokens,
            completion_tokens: reply.completion_tokens,
            total_tokens: reply.prompt_tokens + reply.completion_tokens,
            ..TokenUsage::default()
        };
        Ok(ModelReply { text: reply.text, model: OWN_MODEL.to_owned(), usage })
    }
}

/// Python graders, each call in a sandbox process.
struct Python(Arc<Sandbox>);

#[async_trait]
impl CodeRunner for Python {
    async fn grade(&self, source: &str, sample: &Value, item: &Value) -> Result<f64, CodeFailure> {
        let grader = PythonGrader::new(source, Arc::clone(&self.0), Limits::default());
        grader.grade(sample, item).await.map_err(|error| match error {
            PythonGraderError::Sandbox(error) => CodeFailure::Server(error.to_string()),
            other => CodeFailure::Runtime(other.to_string()),
        })
    }
}
