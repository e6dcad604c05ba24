//! The interface to judge models.

use std::error::Error;

use async_trait::async_trait;

use hone_core::types::Message;

use crate::remote::CallError;

/// The sampling parameters of a judge's answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgeSampling {
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// Token limit of the answer.
    pub max_tokens: u32,
    /// Seed for models that sample reproducibly.
    pub seed: u64,
}

/// A judge's answer and its cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JudgeReply {
    /// The text of the answer.
    pub text: String,
    /// Tokens of the question.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
}

/// Why a judge did not answer.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// `base_url` is `self`, but this server serves no model.
    #[error("base_url = `self`: no model of this server can judge here")]
    NoSelfJudge,
    /// The call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// This server's model failed.
    #[error("the model failed: {0}")]
    Model(#[source] Box<dyn Error + Send + Sync>),
}

impl JudgeError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Call(error) => error.reason(),
            Self::NoSelfJudge | Self::Model(_) => "model",
        }
    }
}

/// A model that can judge.
#[async_trait]
pub trait JudgeModel: Send + Sync {
    /// Answers a conversation.
    /// Errors: if there is no answer; the judgement is then missing.
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError>;
}
