//! The shapes of OpenAI's responses.

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{Interaction, PolicyVersion, TokenId, ToolCall};
use hone_engine::{Codec, Token};

use super::answer::{MessagePart, WholeMessage};
use crate::http::generate::{Usage, shown_logprob};

/// The response without streaming.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct ChatCompletion {
    pub(super) id: String,
    #[schemars(extend("const" = "chat.completion"))]
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) system_fingerprint: String,
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Usage,
    /// vLLM's extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<TokenId>>,
}

impl ChatCompletion {
    /// The response to a request.
    pub(super) fn new(
        interaction: &Interaction,
        version: PolicyVersion,
        choices: Vec<Choice>,
        usage: Usage,
    ) -> Self {
        Self {
            id: interaction.id.completion_id(),
            object: "chat.completion",
            created: interaction.created / 1000,
            model: interaction.model.clone(),
            system_fingerprint: version.fingerprint(),
            choices,
            usage,
            prompt_token_ids: None,
        }
    }
}

/// A choice of a [`ChatCompletion`].
#[derive(Serialize, JsonSchema)]
pub(super) struct Choice {
    pub(super) index: u32,
    pub(super) message: AssistantMessage,
    pub(super) logprobs: Option<Logprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls"]))]
    pub(super) finish_reason: &'static str,
    /// vLLM's extension: the sampled tokens, stop token included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<TokenId>>,
}

impl Choice {
    pub(super) fn new(
        index: u32,
        whole: WholeMessage,
        logprobs: Option<Logprobs>,
        wants_token_ids: bool,
    ) -> Self {
        let WholeMessage { items, token_ids, end, .. } = whole;
        let (reasoning, content, calls) = WholeMessage::split(items);
        Self {
            index,
            message: AssistantMessage::new(reasoning, content, calls),
            logprobs,
            finish_reason: end.as_str(),
            token_ids: wants_token_ids.then_some(token_ids),
        }
    }
}

/// The message of a [`Choice`].
#[derive(Serialize, JsonSchema)]
pub(super) struct AssistantMessage {
    #[schemars(extend("const" = "assistant"))]
    pub(super) role: &'static str,
    pub(super) content: Option<String>,
    pub(super) refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// The message of a choice. Its content is null if it only calls functions.
    pub(super) fn new(reasoning: String, content: String, tool_calls: Vec<ToolCall>) -> Self {
        Self {
            role: "assistant",
            content: (!content.is_empty() || tool_calls.is_empty()).then_some(content),
            refusal: None,
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            tool_calls,
        }
    }
}

/// One event of a stream.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct ChatChunk<'a> {
    pub(super) id: &'a str,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: String,
    pub(super) choices: Vec<StreamChoice>,
    /// Absent unless requested; then null in every event except the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    /// vLLM's extension, in the first event of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
}

/// The new part of one choice.
#[derive(Serialize, JsonSchema)]
pub(super) struct StreamChoice {
    pub(super) index: u32,
    pub(super) delta: Delta,
    pub(super) logprobs: Option<Logprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", null]))]
    pub(super) finish_reason: Option<&'static str>,
    /// vLLM's extension: the tokens since the previous event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<TokenId>>,
}

/// The new part of a choice's message.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<[CallDelta; 1]>,
}

impl Delta {
    /// More of the text.
    pub(super) fn text(content: String) -> Self {
        Self { content: Some(content), ..Self::default() }
    }

    fn call(call: CallDelta) -> Self {
        Self { tool_calls: Some([call]), ..Self::default() }
    }
}

impl From<MessagePart> for Delta {
    fn from(part: MessagePart) -> Self {
        match part {
            MessagePart::Reasoning(text) => {
                Self { reasoning_content: Some(text), ..Self::default() }
            }
            MessagePart::Text(text) => Self::text(text),
            MessagePart::Call { index, id, name } => Self::call(CallDelta {
                index,
                id: Some(id),
                r#type: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            }),
            MessagePart::Arguments { index, json: arguments } => {
                let function = FunctionDelta { name: None, arguments };
                Self::call(CallDelta { index, id: None, r#type: None, function })
            }
        }
    }
}

/// The new part of one call.
#[derive(Serialize, JsonSchema)]
pub(super) struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta,
}

/// The new part of a call's function.
#[derive(Serialize, JsonSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Natural-log probabilities of the sampled tokens. The stop token is left out, as in the text.
#[derive(Serialize, JsonSchema)]
pub(super) struct Logprobs {
    pub(super) content: Vec<TokenLogprob>,
    pub(super) refusal: Option<()>,
}

impl Logprobs {
    pub(super) fn new(codec: &Codec, tokens: &[Token]) -> Self {
        let content = tokens.iter().map(|token| TokenLogprob::new(codec, token)).collect();
        Self { content, refusal: None }
    }
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(in crate::http) struct TokenLogprob {
    #[serde(flatten)]
    token: TokenScore,
    top_logprobs: Vec<TokenScore>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct TokenScore {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl TokenScore {
    fn new(codec: &Codec, id: TokenId, logprob: f32) -> Self {
        let bytes = codec.token_bytes(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Self { token, logprob: shown_logprob(logprob), bytes }
    }
}

impl TokenLogprob {
    pub(in crate::http) fn new(codec: &Codec, token: &Token) -> Self {
        let top = token.top.iter().map(|(id, logprob)| TokenScore::new(codec, *id, *logprob));
        Self { top_logprobs: top.collect(), token: TokenScore::new(codec, token.id, token.logprob) }
    }
}
