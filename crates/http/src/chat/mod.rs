//! `POST /v1/chat/completions`, and what every endpoint of conversations shares.
//!
//! `request` reads a body with `constraint` (its grammar). `answer` divides what is sampled
//! into the parts of a message, of which `ChatWire` makes a response. Other dialects share all but the shapes.

pub mod answer;
pub mod constraint;
pub mod request;

use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{Interaction, PolicyVersion, TokenId, ToolCall};
use hone_engine::{Codec, Token};

use super::body::{Call, JsonObject};
use super::error::ApiError;
use super::generate::run::{AnswerRun, RequestRun, begin};
use super::generate::sse::{self, ToWire};
use super::generate::{ChoiceUpdate, Usage, shown_logprob};
use answer::{MessagePart, MessageUpdate, WholeMessage};

pub async fn create(call: Call, JsonObject(body): JsonObject) -> Result<Response, ApiError> {
    let (arrived, state) = (Instant::now(), &call.0);
    let (most, vocab) = (state.config.default_max_tokens, state.engine.info().vocab);
    let (request, include_usage) = request::from_wire(&body, most, vocab)?;
    let stream = request.stream;
    let begun = begin(call, request, arrived).await?;
    sse::respond(ChatWire { begun, include_usage }, stream).await
}

/// Makes chat completions.
///
/// A stream has for each choice a role event, events with the changes of its message and an event with the finish
/// reason; then usage, if requested; then `[DONE]`. A failure after the first byte ends it with an `error` event and
/// without `[DONE]`.
struct ChatWire {
    begun: AnswerRun,
    include_usage: bool,
}

impl ToWire for ChatWire {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.begun.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let updates = self.begun.answers.update(updates)?;
        let mut events = String::new();
        let mut add = |delta, logprobs, token_ids, finish_reason| {
            let choice = StreamChoice { index, delta, logprobs, finish_reason, token_ids };
            events.push_str(&self.chunk(version, vec![choice], None));
        };
        if started {
            let empty = Delta::text(String::new());
            add(Delta { role: Some("assistant"), ..empty }, None, None, None);
        }
        let codec = self.begun.run.state.engine.codec();
        for MessageUpdate { parts, tokens, token_ids, end } in updates {
            let mut deltas: Vec<Delta> = parts.into_iter().map(Delta::from).collect();
            if deltas.is_empty() && !tokens.is_empty() {
                deltas.push(Delta::text(String::new()));
            }
            // The first change has the log-probabilities and ids of all tokens that completed the changes.
            let mut logprobs =
                self.begun.run.wants_logprobs().then(|| Logprobs::new(codec, &tokens));
            let mut token_ids = self.begun.run.wants_token_ids().then_some(token_ids);
            for delta in deltas {
                add(delta, logprobs.take(), token_ids.as_mut().map(std::mem::take), None);
            }
            if let Some(end) = end {
                add(Delta::default(), None, token_ids, Some(end.as_str()));
            }
        }
        Ok(events)
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let version = self.begun.run.version().unwrap_or_default();
            let usage = self.begun.usage();
            events = self.chunk(version, Vec::new(), Some(usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }

    fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError> {
        self.begun.answers.keep(update)
    }

    fn whole(self) -> Result<Response, ApiError> {
        let usage = self.begun.usage();
        let AnswerRun { run, interaction, answers } = self.begun;
        let codec = run.state.engine.codec();
        let choices = answers.into_messages().into_iter().zip(0..).map(|(message, index)| {
            let logprobs = run.wants_logprobs().then(|| Logprobs::new(codec, &message.tokens));
            Choice::new(index, message, logprobs, run.wants_token_ids())
        });
        let version = run.version().unwrap_or_default();
        let completion = ChatCompletion {
            prompt_token_ids: run.wants_token_ids().then(|| interaction.prompt_ids.clone()),
            ..ChatCompletion::new(&interaction, version, choices.collect(), usage)
        };
        Ok(Json(completion).into_response())
    }
}

impl ChatWire {
    fn chunk(
        &self,
        version: PolicyVersion,
        choices: Vec<StreamChoice>,
        usage: Option<Usage>,
    ) -> String {
        let interaction = &self.begun.interaction;
        let begins = choices.iter().any(|choice| choice.delta.role.is_some());
        let prompt_token_ids = (begins && self.begun.run.wants_token_ids())
            .then_some(interaction.prompt_ids.as_slice());
        sse::json_event(&ChatChunk {
            id: &interaction.id.completion_id(),
            object: "chat.completion.chunk",
            created: interaction.created / 1000,
            model: &interaction.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage: self.include_usage.then_some(usage),
            prompt_token_ids,
        })
    }
}

// The shapes of OpenAI's responses.

/// The response without streaming.
#[derive(Serialize, JsonSchema)]
pub struct ChatCompletion {
    pub id: String,
    #[schemars(extend("const" = "chat.completion"))]
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
    pub choices: Vec<Choice>,
    pub usage: Usage,
    /// vLLM's extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

impl ChatCompletion {
    pub fn new(
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
pub struct Choice {
    pub index: u32,
    pub message: AssistantMessage,
    pub logprobs: Option<Logprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls"]))]
    pub finish_reason: &'static str,
    /// vLLM's extension: the sampled tokens, stop token included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

impl Choice {
    pub fn new(
        index: u32,
        whole: WholeMessage,
        logprobs: Option<Logprobs>,
        wants_token_ids: bool,
    ) -> Self {
        let WholeMessage { items, token_ids, end, .. } = whole;
        let (reasoning, content, tool_calls) = WholeMessage::split(items);
        Self {
            index,
            message: AssistantMessage {
                role: "assistant",
                // Null if the message only calls functions.
                content: (!content.is_empty() || tool_calls.is_empty()).then_some(content),
                refusal: None,
                reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
                tool_calls,
            },
            logprobs,
            finish_reason: end.as_str(),
            token_ids: wants_token_ids.then_some(token_ids),
        }
    }
}

/// The message of a [`Choice`].
#[derive(Serialize, JsonSchema)]
pub struct AssistantMessage {
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    pub content: Option<String>,
    pub refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// One event of a stream.
#[derive(Serialize, JsonSchema)]
pub struct ChatChunk<'a> {
    pub id: &'a str,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: String,
    pub choices: Vec<StreamChoice>,
    /// Absent unless requested; then null in every event except the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// vLLM's extension, in the first event of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
}

/// The new part of one choice.
#[derive(Serialize, JsonSchema)]
pub struct StreamChoice {
    pub index: u32,
    pub delta: Delta,
    pub logprobs: Option<Logprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", null]))]
    pub finish_reason: Option<&'static str>,
    /// vLLM's extension: the tokens since the previous event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// The new part of a choice's message.
#[derive(Default, Serialize, JsonSchema)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[CallDelta; 1]>,
}

impl Delta {
    pub fn text(content: String) -> Self {
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
pub struct CallDelta {
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
pub struct Logprobs {
    pub content: Vec<TokenLogprob>,
    pub refusal: Option<()>,
}

impl Logprobs {
    pub fn new(codec: &Codec, tokens: &[Token]) -> Self {
        let content = tokens.iter().map(|token| TokenLogprob::new(codec, token)).collect();
        Self { content, refusal: None }
    }
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TokenLogprob {
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
    pub fn new(codec: &Codec, token: &Token) -> Self {
        let top = token.top.iter().map(|(id, logprob)| TokenScore::new(codec, *id, *logprob));
        Self { top_logprobs: top.collect(), token: TokenScore::new(codec, token.id, token.logprob) }
    }
}
