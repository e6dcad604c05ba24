//! How completions are sampled, and why they end.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::ids::TokenId;

/// Sampling parameters. The behavior policy is `softmax(logits / temperature)`, truncated by
/// `top_k`, then `top_p`, then `min_p`, and renormalized over the remaining tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy decoding.
    pub temperature: f32,
    /// Keeps the smallest set of tokens whose probability mass is at least this; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens with at least this fraction of the top token's probability; 0 keeps all.
    pub min_p: f32,
    /// OpenAI's presence penalty: subtracted from the logits of tokens already sampled.
    pub presence_penalty: f32,
    /// OpenAI's frequency penalty: subtracted once for each time that a token was sampled.
    pub frequency_penalty: f32,
    /// Added to logits, by token id.
    pub logit_bias: BTreeMap<TokenId, f32>,
    /// Seed of this request's random numbers.
    pub seed: u64,
    /// Largest number of sampled tokens, the stop token included.
    pub max_tokens: u32,
    /// Divides positive and multiplies negative logits of tokens of the prompt and of those already
    /// sampled (Keskar et al. 2019, "CTRL", as transformers implements it); 1 changes nothing.
    pub repetition_penalty: f32,
    /// Number of tokens before which no stop token is sampled.
    pub min_tokens: u32,
    /// Whether the model's own stop tokens are never sampled.
    pub ignore_eos: bool,
    /// Tokens that end the completion, beside the model's own.
    pub stop_token_ids: Vec<TokenId>,
    /// Whether the text contains the stop string, or the text of the stop token, that ended it.
    pub include_stop: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
            max_tokens: 256,
            repetition_penalty: 1.0,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            include_stop: false,
        }
    }
}

impl SamplingParams {
    /// Why samples with these parameters cannot be trained on, as a short label; `None` if they
    /// can.
    ///
    /// The trainer recomputes log-probabilities under `softmax(logits / temperature)`. Penalties
    /// and biases change the logits of the behavior policy, which would bias the importance ratio.
    /// Truncation does not, and neither do stop tokens that `min_tokens` or `ignore_eos` exclude:
    /// [`Sample::kept`](super::Sample::kept) has the mass that remained.
    pub fn untrainable_reason(&self) -> Option<&'static str> {
        if self.temperature <= 0.0 {
            Some("greedy")
        } else if self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
        {
            Some("penalty")
        } else if !self.logit_bias.is_empty() {
            Some("logit_bias")
        } else {
            None
        }
    }

    /// Whether some tokens may be cut off before sampling (`top_p`, `top_k` or `min_p`).
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// These parameters with the rules of another request on where a completion ends, apart from its
    /// token limit. A completion with them can be compared with those of that request.
    pub fn ending_as(self, other: &Self) -> Self {
        Self {
            min_tokens: other.min_tokens.min(self.max_tokens),
            ignore_eos: other.ignore_eos,
            stop_token_ids: other.stop_token_ids.clone(),
            include_stop: other.include_stop,
            ..self
        }
    }
}

/// The rules of a request on where its completions end, apart from their token limit. Completions under
/// different rules cannot be compared: the model may stop where the other one must not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndRules {
    /// Strings that end the text, without the order in which the client listed them.
    pub stop: BTreeSet<String>,
    /// Tokens that end the completion, beside the model's own; also without order.
    pub stop_token_ids: BTreeSet<TokenId>,
    /// Number of tokens before which no stop token is sampled.
    pub min_tokens: u32,
    /// Whether the model's own stop tokens are never sampled.
    pub ignore_eos: bool,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// `max_tokens` or the model's context length.
    Length,
    /// The client disconnected.
    Cancelled,
}

impl FinishReason {
    /// The value of OpenAI's `finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}
