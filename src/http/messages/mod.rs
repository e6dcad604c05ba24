//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! `fields` declares the fields of requests. [`read`] validates a body with `turns` (its messages) and `tools`,
//! and translates it into a [`ConversationRequest`](super::chat::conversation::ConversationRequest). `wire`
//! defines the shapes of responses, which are sent as server-sent events too, and `error` gives errors of
//! these routes Anthropic's shape.

mod error;
pub(super) mod fields;
mod tools;
mod turns;
pub(super) mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value};

use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Interaction, Message, PolicyVersion, Role, TokenId,
};

use self::wire::TokenCount;
use super::AppState;
use super::auth::Caller;
use super::body::JsonObject;
use super::chat::conversation::{begin, collect};
use super::generate::prompt::tokenize;
use super::generate::{models, with_version};
use crate::http::body::{Fields, invalid};
use crate::http::chat::answer::{Answers, MessageEnd, MessagePart, MessageUpdate};
use crate::http::chat::constraint::RequestedGrammar;
use crate::http::chat::conversation::{AnswerRun, ConversationRequest, FieldNames};
use crate::http::chat::fields::{stop_form, stop_texts};
use crate::http::chat::params;
use crate::http::chat::tools::refuse_others;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use crate::http::generate::{ChoiceUpdate, Usage};
use crate::http::observe::RequestId;
use fields::{COUNT_FIELDS, FIELDS, MAX_STOP};
use wire::{BlockDelta, ContentBlock, MessageEvent, MessageObject, StopInfo};

pub(super) use error::{MessageError, shape_errors};

/// `POST /v1/messages`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Extension(request_id): Extension<RequestId>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let MessagesRequest { conversation, stream } = read(&body, state.engine.info().vocab)?;
    let begun = begin(state, caller, conversation, arrived).await?;
    if stream {
        let (version, response) = respond(begun, request_id).await?;
        return Ok(with_version(response, version));
    }
    let AnswerRun { mut run, interaction, answers } = begun;
    let (mut messages, usage) = collect(answers, &mut run).await?;
    let message = messages.pop().ok_or_else(ApiError::internal)?;
    let codec = run.state.engine.codec();
    let stop = StopInfo::new(message.end, codec, &interaction.stop, &message.token_ids);
    let object = MessageObject {
        content: message.items.into_iter().map(Into::into).collect(),
        stop,
        ..MessageObject::new(&interaction, usage)
    };
    Ok(with_version(Json(object).into_response(), Some(run.version())))
}

/// `POST /v1/messages/count_tokens`. Nothing is sampled or recorded.
pub(super) async fn count_tokens(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<TokenCount>, ApiError> {
    let MessagesPrompt { model, messages, chat, .. } = read_prompt(&body)?;
    models::check(&state, &model)?;
    let ids = tokenize(&state, "messages", &messages, &chat, true).await?;
    Ok(Json(TokenCount { input_tokens: ids.len() }))
}

// Validates a Messages request, field by field, and translates it into a [`ConversationRequest`].

/// The entry of `metadata` that names the end user.
const USER: &str = "user_id";

/// A valid request for a message.
#[derive(Debug, PartialEq)]
pub struct MessagesRequest {
    pub conversation: ConversationRequest,
    pub stream: bool,
}

/// What determines the prompt of a request and the form of its answer.
#[derive(Debug, PartialEq)]
pub struct MessagesPrompt {
    pub model: String,
    pub messages: Vec<Message>,
    /// Tools, and variables of the chat template.
    pub chat: ChatOptions,
    /// What constrains the text.
    pub grammar: Option<RequestedGrammar>,
}

/// Validates the body of a request for a message. `vocab` is the size of the vocabulary.
pub fn read(body: &Map<String, Value>, vocab: usize) -> Result<MessagesRequest, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let MessagesPrompt { model, messages, chat, grammar } = prompt(&fields)?;
    if messages.last().is_some_and(|last| last.role == Role::Assistant) {
        let message = "the last of messages is of the assistant: it must be of the user, because an answer \
                       cannot be continued";
        return Err(ApiError::field("messages", message));
    }
    if fields.get("max_tokens").is_none() {
        return Err(fields.missing("max_tokens", "a whole number of at least 1"));
    }
    let stop = stop_sequences(&fields)?;
    let (user, metadata) = metadata(&fields)?;
    let conversation = ConversationRequest {
        model,
        endpoint: ClientEndpoint::Messages,
        messages,
        chat,
        // `max_tokens` is present.
        params: params(&fields, 0, vocab)?,
        grammar,
        choices: 1,
        logprobs: None,
        // The tokens show which stop sequence ended the text.
        token_ids: !stop.is_empty(),
        stop,
        metadata,
        user,
        store: fields.boolean("store")?,
        fields: FieldNames {
            max_tokens: "max_tokens",
            messages: "messages",
            parameters: "input_schema",
        },
    };
    Ok(MessagesRequest { conversation, stream: fields.boolean("stream")?.unwrap_or(false) })
}

/// Validates the body of a request to count the tokens of a prompt.
pub fn read_prompt(body: &Map<String, Value>) -> Result<MessagesPrompt, ApiError> {
    prompt(&Fields::of(body, COUNT_FIELDS)?)
}

fn prompt(fields: &Fields<'_>) -> Result<MessagesPrompt, ApiError> {
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model", "a model's name"))?;
    let (chat, grammar) = (tools::read(fields)?, output_format(fields)?);
    if chat.forces_call() && grammar.is_some() {
        let allowed = "of the type \"auto\" or \"none\" beside output_config.format";
        return Err(fields.invalid("tool_choice", allowed));
    }
    Ok(MessagesPrompt { model: model.to_owned(), messages: turns::read(fields)?, chat, grammar })
}

/// The grammar of `output_config.format`.
fn output_format(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    const TYPE: &str = "\"json_schema\"";
    let Some(value) = fields.get("output_config") else { return Ok(None) };
    let config = Fields::at("output_config", value)?;
    refuse_others(&config, &["effort", "format"])?;
    let Some(value) = config.get("format") else { return Ok(None) };
    let format = Fields::at("output_config.format", value)?;
    refuse_others(&format, &["type", "schema"])?;
    match format.text("type")? {
        Some("json_schema") => {}
        Some(_) => return Err(format.invalid("type", TYPE)),
        None => return Err(format.missing("type", TYPE)),
    }
    let schema = format.object("schema")?.ok_or_else(|| format.missing("schema", "an object"))?;
    let spec = GrammarSpec::JsonSchema(Value::Object(schema.clone()).to_string());
    Ok(Some(RequestedGrammar { spec, field: format.path("schema") }))
}

fn stop_sequences(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let convert = |value: &Value| stop_texts(value.as_array()?, MAX_STOP);
    Ok(fields.read("stop_sequences", stop_form(MAX_STOP), convert)?.unwrap_or_default())
}

/// The end user, and the other entries of `metadata`, which are those of a chat request.
fn metadata(fields: &Fields<'_>) -> Result<(Option<String>, BTreeMap<String, String>), ApiError> {
    let Some(map) = fields.object("metadata")? else { return Ok((None, BTreeMap::new())) };
    let user = match map.get(USER) {
        None | Some(Value::Null) => None,
        Some(value) => {
            let not_text = || invalid("metadata.user_id", value, "a string");
            Some(value.as_str().ok_or_else(not_text)?.to_owned())
        }
    };
    let mut others = map.clone();
    others.shift_remove(USER);
    let others = Map::from_iter([("metadata".to_owned(), Value::Object(others))]);
    Ok((user, super::chat::metadata(&Fields::new(&others))?))
}

// Streams a message as server-sent events: `message_start`; for each content block `content_block_start`,
// `content_block_delta` and `content_block_stop`; `message_delta` with the reason of the end and the usage; and
// `message_stop`. A `ping` follows the beginning of the first block. A failure after the first byte ends the
// stream with an `error` event.

struct MessageStream {
    run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    request_id: RequestId,
    /// The kind of the block that has not ended.
    open: Option<BlockKind>,
    /// Number of blocks that have ended.
    closed: usize,
    /// The tokens, if the request has stop sequences.
    ids: Vec<TokenId>,
}

/// What distinguishes consecutive blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    /// The call with this number.
    Call(usize),
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version, if the run has started.
pub async fn respond(
    begun: AnswerRun,
    request_id: RequestId,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let AnswerRun { mut run, interaction, answers } = begun;
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let events = MessageStream {
        run,
        interaction,
        answers,
        request_id,
        open: None,
        closed: 0,
        ids: Vec::new(),
    };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for MessageStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let started = updates.iter().any(|update| update.started);
        let updates = self.answers.update(updates)?;
        let mut events = String::new();
        if started {
            let prompt = self.interaction.prompt_ids.len();
            let message = MessageObject::new(&self.interaction, Usage::new(prompt, 0));
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
        sse::named_event("error", &MessageError::new(error, Some(&self.request_id.0)))
    }

    /// The update that ends the message has them.
    fn last(&mut self) -> String {
        String::new()
    }
}

impl MessageStream {
    fn add_part(&mut self, events: &mut String, part: MessagePart) {
        let (kind, begun, delta) = match part {
            MessagePart::Reasoning(thinking) => (
                BlockKind::Thinking,
                ContentBlock::Thinking { thinking: String::new(), signature: "" },
                Some(BlockDelta::Thinking { thinking }),
            ),
            MessagePart::Text(text) => (
                BlockKind::Text,
                ContentBlock::Text { text: String::new() },
                Some(BlockDelta::Text { text }),
            ),
            MessagePart::Call { index, id, name } => {
                (BlockKind::Call(index), ContentBlock::call(id, name), None)
            }
            MessagePart::Arguments { index, json } => (
                BlockKind::Call(index),
                ContentBlock::call(String::new(), String::new()),
                Some(BlockDelta::InputJson { partial_json: json }),
            ),
        };
        if self.open != Some(kind) {
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
        let codec = self.run.state.engine.codec();
        let delta = StopInfo::new(end, codec, &self.interaction.stop, &self.ids);
        let usage = self.answers.usage(self.run.usage()).into();
        add(events, &MessageEvent::MessageDelta { delta, usage });
        add(events, &MessageEvent::MessageStop);
    }
}

fn add(events: &mut String, event: &MessageEvent) {
    events.push_str(&sse::named_event(event.name(), event));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::http::body::testing::assert_agreement;

    fn body(more: &Value) -> Map<String, Value> {
        let mut body = json!({"model": "default", "max_tokens": 9,
                              "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.as_object().unwrap().clone()
    }

    #[test]
    fn fields_are_translated() {
        let request = read(
            &body(&json!({
                "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stream": true, "store": false,
                "stop_sequences": ["a", "b"], "service_tier": "auto", "cache_control": {"type": "ephemeral"},
                "metadata": {"user_id": "ann", "session_id": "s"},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}},
            })),
            100,
        );
        let MessagesRequest { conversation, stream } = request.unwrap();
        let params = &conversation.params;
        assert_eq!((params.temperature, params.top_p, params.top_k), (0.5, 0.9, 5));
        assert_eq!((params.seed, params.max_tokens, stream), (7, 9, true));
        assert_eq!(conversation.stop, ["a", "b"]);
        assert_eq!(conversation.user.as_deref(), Some("ann"));
        let metadata = [("session_id".to_owned(), "s".to_owned())].into();
        assert_eq!((conversation.metadata, conversation.store), (metadata, Some(false)));
        let grammar = conversation.grammar.unwrap();
        assert_eq!(grammar.spec, GrammarSpec::JsonSchema("{\"type\":\"null\"}".to_owned()));
        assert_eq!(grammar.field, "output_config.format.schema");
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        let schema = json!({"type": "json_schema", "schema": {}});
        let tool = json!({"name": "a", "input_schema": {}});
        for (more, expected) in [
            (json!({"model": null}), "model is missing"),
            (json!({"max_tokens": null}), "max_tokens is missing"),
            (json!({"max_tokens": 0}), "max_tokens is 0"),
            (json!({"temperature": 1.5}), "temperature is 1.5: it must be a number from 0 to 1"),
            (json!({"top_k": -1}), "top_k is -1"),
            (json!({"stop_sequences": ["a", ""]}), "stop_sequences is a list"),
            (json!({"stop_sequences": "a"}), "stop_sequences is \\\"a\\\""),
            (json!({"stop": "a"}), "stop is not a known field"),
            (json!({"container": "x"}), "container is not a known field"),
            (json!({"metadata": {"user_id": 5}}), "metadata.user_id is 5"),
            (json!({"metadata": {"answer": 5}}), "metadata.answer is 5"),
            (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
            (json!({"output_config": {"form": 5}}), "output_config.form is not a known field"),
            (
                json!({"output_config": {"format": schema}, "tools": [tool],
                       "tool_choice": {"type": "any"}}),
                "tool_choice is an object",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "Hi"}]}),
                "the last of messages is of the assistant",
            ),
        ] {
            let error = read(&body(&more), 100).unwrap_err().to_json();
            assert!(error.contains(expected), "{more}: {error}");
        }
        let error = read_prompt(&body(&json!({}))).unwrap_err().to_json();
        assert!(error.contains("max_tokens is not a field: the fields are model"), "{error}");
    }

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let tool = json!({"name": "a", "input_schema": {}});
        let base = Value::Object(body(&json!({"tools": [tool]})));
        assert_agreement(FIELDS, &base, &[], |body| read(body, 1000).map(drop));
        let mut base = base;
        base.as_object_mut().unwrap().remove("max_tokens");
        assert_agreement(COUNT_FIELDS, &base, &[], |body| read_prompt(body).map(drop));
    }
}
