//! The interfaces to models and sandboxes that graders use.

use std::sync::Arc;

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use hone_core::types::Message;

/// The backends of graders. A grader whose backend is `None` has no value; callers can refuse it at
/// startup with [`Grader::models`](super::Grader::models) and
/// [`Grader::needs_code`](super::Grader::needs_code).
#[derive(Clone, Default)]
pub struct Backends {
    /// Answers `score_model` and `label_model` graders.
    pub model: Option<Arc<dyn ModelClient>>,
    /// Runs `python` graders.
    pub code: Option<Arc<dyn CodeRunner>>,
}

/// Asks models. The implementation limits time, retries, concurrency and costs.
#[async_trait]
pub trait ModelClient: Send + Sync {
    /// Returns one completion.
    /// Errors: if the model does not answer, or refuses to.
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure>;
}

/// A question to a judge.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRequest {
    /// The model's name in the grader.
    pub model: String,
    /// The messages, with rendered templates.
    pub messages: Vec<Message>,
    /// The sampling parameters of the answer.
    pub sampling: GraderSampling,
    /// OpenAI's `response_format`: the JSON schema of the answer, `{steps, result}`. A backend without
    /// schemas may ignore it, because the grader also accepts a bare score or label.
    pub response_format: Value,
}

/// OpenAI's `sampling_params` of a model grader; `None` for parameters that the grader does not set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GraderSampling {
    /// Temperature, 0 to 2.
    pub temperature: Option<f64>,
    /// Nucleus sampling threshold, 0 to 1.
    pub top_p: Option<f64>,
    /// Seed of the sampling.
    pub seed: Option<i64>,
    /// Token limit of the answer.
    pub max_tokens: Option<u32>,
    /// Reasoning effort: `none`, `minimal`, `low`, `medium`, `high` or `xhigh`.
    pub reasoning_effort: Option<String>,
}

/// A judge's answer to a [`ModelRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelReply {
    /// The text of the answer.
    pub text: String,
    /// The model's name, as its server reports it.
    pub model: String,
    /// The tokens it used.
    pub usage: TokenUsage,
}

/// Tokens used, as in `model_grader_token_usage_per_model`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenUsage {
    /// Tokens of the messages.
    pub prompt_tokens: u64,
    /// Tokens of messages and answer.
    pub total_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Cached tokens among those of the messages.
    pub cached_tokens: u64,
}

impl TokenUsage {
    pub(super) fn add(&mut self, other: Self) {
        let sum = |own: &mut u64, more: u64| *own = own.saturating_add(more);
        sum(&mut self.prompt_tokens, other.prompt_tokens);
        sum(&mut self.total_tokens, other.total_tokens);
        sum(&mut self.completion_tokens, other.completion_tokens);
        sum(&mut self.cached_tokens, other.cached_tokens);
    }
}

/// Why a judge did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelFailure {
    /// It could not be reached, failed, or exceeded its time limit.
    #[error("{0}")]
    Server(String),
    /// It refused, with this text.
    #[error("{0}")]
    Refusal(String),
}

/// Runs the code of `python` graders in a sandbox with time and memory limits.
#[async_trait]
pub trait CodeRunner: Send + Sync {
    /// Returns `grade(sample, item)` of this source.
    ///
    /// `sample` has `output_text`, `output_json` where the text is JSON, `output_tools` and
    /// `choices`; `item` is an object.
    /// Errors: if the sandbox fails, or the code returns no number.
    async fn grade(&self, source: &str, sample: &Value, item: &Value) -> Result<f64, CodeFailure>;
}

/// Why code has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeFailure {
    /// The sandbox failed, not the code; contains the reason.
    #[error("{0}")]
    Server(String),
    /// The code raised, returned no number, or exceeded a limit.
    #[error("{0}")]
    Runtime(String),
}
