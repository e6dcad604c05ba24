//! The shapes of OpenAI's answers.

use serde::Serialize;

use hone_core::types::TokenId;
use hone_engine::{Codec, Token};

/// What stands for a probability of 0, whose logarithm JSON cannot hold (OpenAI's value).
const NEVER: f32 = -9999.0;

/// A whole answer.
#[derive(Serialize)]
pub(super) struct ChatCompletion {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) system_fingerprint: String,
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Usage,
}

/// One of its choices.
#[derive(Serialize)]
pub(super) struct Choice {
    pub(super) index: u32,
    pub(super) message: AssistantMessage,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: &'static str,
}

/// What the model said.
#[derive(Serialize)]
pub(super) struct AssistantMessage {
    pub(super) role: &'static str,
    pub(super) content: String,
    pub(super) refusal: Option<()>,
}

/// Token counts; sampled stop tokens are counted.
#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
}

/// One event of a stream.
#[derive(Serialize)]
pub(super) struct ChatChunk<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: String,
    pub(super) choices: Vec<ChunkChoice>,
    /// Absent unless asked for; then null in every event but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

/// What is new of one choice.
#[derive(Serialize)]
pub(super) struct ChunkChoice {
    pub(super) index: u32,
    pub(super) delta: Delta,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// What is new of its message.
#[derive(Default, Serialize)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
}

/// Natural-log probabilities of the sampled tokens, the stop token left out as in the text.
#[derive(Serialize)]
pub(super) struct Logprobs {
    pub(super) content: Vec<TokenLogprob>,
    pub(super) refusal: Option<()>,
}

impl Logprobs {
    pub(super) fn new(content: Vec<TokenLogprob>) -> Self {
        Self { content, refusal: None }
    }
}

/// One sampled token.
#[derive(Serialize)]
pub(super) struct TokenLogprob {
    #[serde(flatten)]
    token: Scored,
    top_logprobs: Vec<Scored>,
}

#[derive(Serialize)]
struct Scored {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Scored {
    fn new(codec: &Codec, id: TokenId, logprob: f32) -> Self {
        let bytes = codec.token_bytes(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        // Not `max`, which would pass NaN.
        let logprob = if logprob > NEVER { logprob } else { NEVER };
        Self { token, logprob, bytes }
    }
}

impl TokenLogprob {
    pub(super) fn new(codec: &Codec, token: &Token) -> Self {
        let top = token.top.iter().map(|(id, logprob)| Scored::new(codec, *id, *logprob));
        Self { top_logprobs: top.collect(), token: Scored::new(codec, token.id, token.logprob) }
    }
}
