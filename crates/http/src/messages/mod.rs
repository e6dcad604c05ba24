//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! `request` reads a body with `turns` (its messages). `wire` defines the shapes of responses, of which
//! `MessageWire` makes one, and of errors.

pub mod request;
mod turns;
pub mod wire;

use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use hone_core::types::TokenId;

use super::body::JsonObject;
use super::chat::answer::{MessageEnd, MessagePart, MessageUpdate};
use super::error::{ApiError, JsonResult};
use super::generate::prompt::tokenize;
use super::generate::run::{AnswerRun, RequestRun, begin, check_model};
use super::generate::sse::{self, ToWire};
use super::generate::{ChoiceUpdate, Usage};
use super::observe::RequestId;
use super::state::{AppState, Call};
use request::{MessagesPrompt, from_wire, read_prompt};
use wire::{
    BlockDelta, ContentBlock, MessageError, MessageEvent, MessageObject, StopInfo, TokenCount,
};

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

    fn whole(mut self, updates: Vec<ChoiceUpdate>) -> Result<Response, ApiError> {
        self.begun.answers.keep(updates)?;
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
