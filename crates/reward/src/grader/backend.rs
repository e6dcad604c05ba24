//! What graders ask others for: a model's judgement, and running code.

use std::sync::Arc;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;

use hone_core::types::Message;

/// What graders may use. A grader that needs what is `None` gives no value; see
/// [`Grader::needs_model`](super::Grader::needs_model) and
/// [`Grader::needs_code`](super::Grader::needs_code) to refuse it at the start.
#[derive(Clone, Default)]
pub struct Backends {
    /// Judges for `score_model` and `label_model`.
    pub model: Option<Arc<dyn ModelClient>>,
    /// A sandbox for `python`.
    pub code: Option<Arc<dyn CodeRunner>>,
}

/// Asks a model. Time limits, retries, concurrency and costs are the implementation's matter.
#[async_trait]
pub trait ModelClient: Send + Sync {
    /// One completion.
    ///
    /// # Errors
    /// If there is none, or the model refuses.
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure>;
}

/// What a judge is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRequest {
    /// The model that the grader names.
    pub model: String,
    /// The messages, templates filled in.
    pub messages: Vec<Message>,
    /// How to sample.
    pub sampling: JudgeSampling,
    /// OpenAI's `response_format`: the JSON schema of the answer, `{steps, result}`. A judge that
    /// cannot be held to a schema may leave it out: a bare score or label is understood too.
    pub response_format: Value,
}

/// OpenAI's `sampling_params` of a model grader; `None` where the grader does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JudgeSampling {
    /// 0 to 2.
    pub temperature: Option<f64>,
    /// 0 to 1.
    pub top_p: Option<f64>,
    /// The seed.
    pub seed: Option<i64>,
    /// Most tokens of the answer.
    pub max_tokens: Option<u32>,
    /// `none`, `minimal`, `low`, `medium`, `high` or `xhigh`.
    pub reasoning_effort: Option<String>,
}

/// A judge's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelReply {
    /// What it said.
    pub text: String,
    /// The model that said it, as its server names it.
    pub model: String,
    /// What it cost.
    pub usage: TokenUsage,
}

/// Tokens used, as in `model_grader_token_usage_per_model`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TokenUsage {
    /// Tokens of the messages.
    pub prompt_tokens: u64,
    /// Both together.
    pub total_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Those of the messages that were cached.
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

/// Why a judge gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelFailure {
    /// It could not be reached, or failed, or took too long.
    #[error("{0}")]
    Server(String),
    /// It declined to answer, in these words.
    #[error("the model refused: {0}")]
    Refusal(String),
}

/// Runs a `python` grader's code, in a sandbox with limits of time and memory.
#[async_trait]
pub trait CodeRunner: Send + Sync {
    /// What `grade(sample, item)` of this source returns.
    ///
    /// `sample` has `output_text`, `output_json` where the text is JSON, `output_tools` and
    /// `choices`; `item` is an object.
    ///
    /// # Errors
    /// If it returns no number.
    async fn grade(&self, source: &str, sample: &Value, item: &Value) -> Result<f64, CodeFailure>;
}

/// Why code gave no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeFailure {
    /// The sandbox failed, not the code: a short name of the kind, such as `unavailable`.
    #[error("{0}")]
    Server(String),
    /// The code raised, returned no number, or went past a limit.
    #[error("{0}")]
    Runtime(String),
}
