//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! `request` reads a body, and `MessageWire` makes the response.

pub mod request;

use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use hone_core::types::{Interaction, TokenId, ToolCall};
use hone_engine::{Codec, TextStream};

use super::body::{Call, JsonObject};
use super::chat::answer::{MessageEnd, MessageItem, MessagePart, MessageUpdate};
use super::error::{ApiError, JsonResult};
use super::generate::prompt::tokenize;
use super::generate::run::{AnswerRun, RequestRun, begin, check_model};
use super::generate::sse::{self, ToWire};
use super::generate::{ChoiceUpdate, Usage};
use super::observe::RequestId;
use super::state::AppState;
use request::{INVALID_JSON, MessagesPrompt, from_wire, read_prompt};

pub async fn create(
    call: Call,
    Extension(request_id): Extension<RequestId>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let request = from_wire(&body, call.0.engine.info().vocab)?;
    let stream = request.stream;
    let begun = begin(call, request, arrived).await?;
    let wire = MessageWire { begun, request_id, open: None, closed: 0, ids: Vec::new() };
    sse::respond(wire, stream).await
}

/// `POST /v1/messages/count_tokens`. Nothing is sampled or recorded.
pub async fn count_tokens(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> JsonResult<TokenCount> {
    let MessagesPrompt { model, messages, chat, .. } = read_prompt(&body)?;
    check_model(&state, &model)?;
    let ids = tokenize(&state, "messages", &messages, &chat, true).await?;
    Ok(Json(TokenCount { input_tokens: ids.len() }))
}

/// Makes messages.
///
/// A stream has `message_start`; for each content block `content_block_start`, `content_block_delta` and
/// `content_block_stop`; `message_delta` with the reason of the end and the usage; and `message_stop`. A `ping`
/// follows the beginning of the first block. A failure after the first byte ends it with an `error` event.
struct MessageWire {
    begun: AnswerRun,
    request_id: RequestId,
    /// The kind of the block that has not ended.
    open: Option<Discriminant<ContentBlock>>,
    /// Number of blocks that have ended.
    closed: usize,
    /// The tokens, if the request has stop sequences.
    ids: Vec<TokenId>,
}

impl ToWire for MessageWire {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.begun.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let started = updates.iter().any(|update| update.started);
        let updates = self.begun.answers.update(updates)?;
        let mut events = String::new();
        if started {
            let prompt = self.begun.interaction.prompt_ids.len();
            let message = MessageObject::new(&self.begun.interaction, Usage::new(prompt, 0));
            add(&mut events, &MessageEvent::MessageStart { message });
        }
        for MessageUpdate { parts, token_ids, end, .. } in updates {
            self.ids.extend(token_ids);
            for part in parts {
                self.add_part(&mut events, part);
            }
            if let Some(end) = end {
                self.finish(&mut events, end);
            }
        }
        Ok(events)
    }

    fn failed(&mut self, error: &ApiError) -> String {
        sse::named_event(&MessageError::new(error, Some(&self.request_id.0)))
    }

    /// The update that ends the message has them.
    fn last(&mut self) -> String {
        String::new()
    }

    fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError> {
        self.begun.answers.keep(update)
    }

    fn whole(self) -> Result<Response, ApiError> {
        let usage = self.begun.usage();
        let AnswerRun { run, interaction, answers } = self.begun;
        let message = answers.into_messages().pop().ok_or_else(ApiError::internal)?;
        let codec = run.state.engine.codec();
        let stop = StopInfo::new(message.end, codec, &interaction.stop, &message.token_ids);
        let object = MessageObject {
            content: message.items.into_iter().map(Into::into).collect(),
            stop,
            ..MessageObject::new(&interaction, usage)
        };
        Ok(Json(object).into_response())
    }
}

impl MessageWire {
    fn add_part(&mut self, events: &mut String, part: MessagePart) {
        let is_call = matches!(part, MessagePart::Call { .. });
        let (begun, delta) = match part {
            MessagePart::Reasoning(thinking) => (
                ContentBlock::Thinking { thinking: String::new(), signature: "" },
                Some(BlockDelta::Thinking { thinking }),
            ),
            MessagePart::Text(text) => {
                (ContentBlock::Text { text: String::new() }, Some(BlockDelta::Text { text }))
            }
            MessagePart::Call { id, name, .. } => (ContentBlock::call(id, name), None),
            // A call begins before its arguments.
            MessagePart::Arguments { json: partial_json, .. } => (
                ContentBlock::call(String::new(), String::new()),
                Some(BlockDelta::InputJson { partial_json }),
            ),
        };
        let kind = discriminant(&begun);
        if is_call || self.open != Some(kind) {
            self.close_block(events);
            let index = self.closed;
            add(events, &MessageEvent::ContentBlockStart { index, content_block: begun });
            if index == 0 {
                add(events, &MessageEvent::Ping);
            }
            self.open = Some(kind);
        }
        if let Some(delta) = delta {
            add(events, &MessageEvent::ContentBlockDelta { index: self.closed, delta });
        }
    }

    fn close_block(&mut self, events: &mut String) {
        if self.open.take().is_some() {
            add(events, &MessageEvent::ContentBlockStop { index: self.closed });
            self.closed += 1;
        }
    }

    fn finish(&mut self, events: &mut String, end: MessageEnd) {
        self.close_block(events);
        let codec = self.begun.run.state.engine.codec();
        let delta = StopInfo::new(end, codec, &self.begun.interaction.stop, &self.ids);
        let usage = self.begun.usage().into();
        add(events, &MessageEvent::MessageDelta { delta, usage });
        add(events, &MessageEvent::MessageStop);
    }
}

fn add(events: &mut String, event: &MessageEvent) {
    events.push_str(&sse::named_event(event));
}

// The shapes of Anthropic's responses and errors.

/// The response to a request for a message, and the beginning of its stream.
#[derive(Serialize, JsonSchema)]
pub struct MessageObject {
    pub id: String,
    #[schemars(extend("const" = "message"))]
    pub r#type: &'static str,
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    pub model: String,
    pub content: Vec<ContentBlock>,
    #[serde(flatten)]
    pub stop: StopInfo,
    pub usage: MessageUsage,
}

impl MessageObject {
    pub fn new(interaction: &Interaction, usage: Usage) -> Self {
        Self {
            id: interaction.id.message_id(),
            r#type: "message",
            role: "assistant",
            model: interaction.model.clone(),
            content: Vec::new(),
            stop: StopInfo::default(),
            usage: usage.into(),
        }
    }
}

/// A part of a message.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    Thinking {
        thinking: String,
        /// Always empty: nothing is signed.
        signature: &'static str,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
}

impl ContentBlock {
    /// A call that has no arguments yet.
    pub fn call(id: String, name: String) -> Self {
        Self::ToolUse { id, name, input: Value::Object(Map::new()) }
    }
}

impl From<MessageItem> for ContentBlock {
    fn from(item: MessageItem) -> Self {
        match item {
            MessageItem::Reasoning(thinking) => Self::Thinking { thinking, signature: "" },
            MessageItem::Text(text) => Self::Text { text },
            MessageItem::Call(ToolCall { id, name, arguments }) => {
                Self::ToolUse { id, name, input: input(arguments) }
            }
        }
    }
}

/// A call's arguments as an object.
fn input(arguments: String) -> Value {
    if arguments.is_empty() {
        return Value::Object(Map::new());
    }
    match serde_json::from_str(&arguments) {
        Ok(Value::Object(object)) => Value::Object(object),
        // Cut off by the token limit, or not checked because they are long.
        _ => Value::from_iter([(INVALID_JSON, arguments)]),
    }
}

/// Why a message ended; nulls before its end.
#[derive(Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StopInfo {
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

impl StopInfo {
    /// The end of the message with the tokens `ids`, which are needed only with stop sequences `stop`.
    pub fn new(end: MessageEnd, codec: &Arc<Codec>, stop: &[String], ids: &[TokenId]) -> Self {
        let stop_sequence = match end {
            MessageEnd::Stop => reached(codec, stop, ids),
            _ => None,
        };
        let stop_reason = match end {
            MessageEnd::Calls => "tool_use",
            MessageEnd::Length => "max_tokens",
            _ if stop_sequence.is_some() => "stop_sequence",
            _ => "end_turn",
        };
        Self { stop_reason: Some(stop_reason), stop_sequence }
    }
}

/// The stop sequence that ended a text; `None` if a stop token did.
fn reached(codec: &Arc<Codec>, stop: &[String], ids: &[TokenId]) -> Option<String> {
    let mut stream = TextStream::new(Arc::clone(codec), stop).including_stop(true);
    let ids = ids.iter().filter(|id| !codec.stop_ids().contains(id));
    let mut text: String = ids.map(|id| stream.push(*id).text).collect();
    let last = stream.finish();
    text.push_str(&last.text);
    // The text ends with the sequence that begins first.
    let ends = stop.iter().filter(|sequence| last.stopped && text.ends_with(sequence.as_str()));
    ends.max_by_key(|sequence| sequence.len()).cloned()
}

/// Token counts. Sampled stop tokens are included.
#[derive(Serialize, JsonSchema)]
pub struct MessageUsage {
    /// Those of the prompt that the engine computed.
    input_tokens: usize,
    /// Always 0: entries of the engine's cache cost nothing.
    cache_creation_input_tokens: usize,
    /// The others, whose keys and values came from the engine's prefix cache.
    cache_read_input_tokens: usize,
    output_tokens: usize,
    /// Absent if the model has no reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputTokens>,
}

/// Parts of the message's tokens.
#[derive(Serialize, JsonSchema)]
struct OutputTokens {
    thinking_tokens: usize,
}

impl From<Usage> for MessageUsage {
    fn from(usage: Usage) -> Self {
        let details = usage.completion_tokens_details;
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens()),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens(),
            output_tokens: usage.completion_tokens,
            output_tokens_details: details
                .map(|details| OutputTokens { thinking_tokens: details.reasoning_tokens }),
        }
    }
}

/// The response to a request to count tokens.
#[derive(Serialize, JsonSchema)]
pub struct TokenCount {
    pub input_tokens: usize,
}

/// An event of a stream, whose name is its type.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessageEvent {
    MessageStart { message: MessageObject },
    ContentBlockStart { index: usize, content_block: ContentBlock },
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: StopInfo, usage: MessageUsage },
    MessageStop,
    Ping,
}

/// More of a content block.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
pub enum BlockDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// The body of an error, and the data of an event that ends a stream.
#[derive(Serialize, JsonSchema)]
pub struct MessageError<'a> {
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    error: ErrorDetail<'a>,
    request_id: Option<&'a str>,
}

/// What is wrong.
#[derive(Serialize, JsonSchema)]
struct ErrorDetail<'a> {
    r#type: &'static str,
    message: &'a str,
}

impl<'a> MessageError<'a> {
    pub fn new(error: &'a ApiError, request_id: Option<&'a str>) -> Self {
        let error = ErrorDetail { r#type: kind(error.status()), message: &error.message };
        Self { r#type: "error", error, request_id }
    }
}

/// Anthropic's type of an error with this status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_are_an_object_whatever_the_model_wrote() {
        for (arguments, expected) in [
            ("", json!({})),
            ("{}", json!({})),
            ("{\"b\": 1, \"a\": [2]}", json!({"b": 1, "a": [2]})),
            ("{\"a\": ", json!({"INVALID_JSON": "{\"a\": "})),
            ("[1]", json!({"INVALID_JSON": "[1]"})),
        ] {
            assert_eq!(input(arguments.to_owned()), expected, "{arguments}");
        }
    }
}
