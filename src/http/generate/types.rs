//! What the endpoints give to a run, and what they get from it.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{FinishReason, Interaction, PolicyVersion, TokenId};
use hone_engine::{CompiledGrammar, Token};

/// What a request asks for.
pub struct SamplingRequest {
    /// One or more prompts with the same sampling parameters and stop strings.
    pub prompts: Vec<Arc<Interaction>>,
    /// Number of choices for each prompt.
    pub choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub logprobs: Option<u8>,
    /// What constrains the text.
    pub grammar: Option<Arc<CompiledGrammar>>,
    /// Whether the response has the ids of the sampled tokens.
    pub token_ids: bool,
    /// Whether log-probabilities include that of a stop token, which has no text.
    pub reports_stop: bool,
    /// The client's id of its end user, who meets one version throughout a canary.
    pub user: Option<String>,
    /// Whether the prompts and choices are recorded and learned from.
    pub stored: bool,
}

/// The progress of one choice since its last update.
pub struct ChoiceUpdate {
    /// Index among the choices of all prompts, those of the first prompt first.
    pub index: u32,
    pub version: PolicyVersion,
    pub started: bool,
    /// The token that was sampled; `None` at the start and at the end.
    pub id: Option<TokenId>,
    /// Text that became complete with this token, or at the end.
    pub text: String,
    /// The tokens that `text` completes, without stop tokens; empty unless log-probabilities are
    /// requested.
    pub tokens: Vec<Token>,
    /// The tokens since the last update that had some; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub finish: Option<FinishReason>,
}

/// A whole choice.
pub struct FinishedChoice {
    /// As in [`ChoiceUpdate`].
    pub index: u32,
    pub text: String,
    /// All tokens except the stop token; empty unless log-probabilities are requested.
    pub tokens: Vec<Token>,
    pub finish: FinishReason,
}

/// Reported for a probability of 0, whose logarithm JSON cannot represent; OpenAI's value.
const MIN_LOGPROB: f32 = -9999.0;

/// A log-probability as responses have it.
pub fn shown_logprob(logprob: f32) -> f32 {
    // A NaN compares as false, so it is replaced too.
    if logprob > MIN_LOGPROB { logprob } else { MIN_LOGPROB }
}

/// Token counts. Sampled stop tokens are included.
#[derive(Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    /// Absent for a recorded completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokens>,
    /// Absent if the model has no reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokens>,
}

/// Parts of the prompt's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct PromptTokens {
    /// Those whose keys and values came from the engine's prefix cache.
    pub cached_tokens: usize,
}

/// Parts of the completion's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct CompletionTokens {
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }
    }

    /// Tokens of the prompt that came from the engine's prefix cache; 0 if that is unknown.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }
}
