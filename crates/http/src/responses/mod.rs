//! OpenAI's Responses: `POST /v1/responses`.
//!
//! `request` reads the body, which is completed by earlier responses in the ledger.
//! [`chat`](super::chat) divides the answer like that of a chat completion. `wire` defines the shapes and makes the items
//! of the answer, `ResponseWire` makes a response.

pub mod request;
pub mod wire;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};

use hone_core::types::{ClientEndpoint, InteractionId, Message, ResponseOptions, Role, now_ms};

use super::body::{Call, JsonObject};
use super::chat::TokenLogprob;
use super::chat::answer::{MessageEnd, MessageItem, MessagePart, MessageUpdate, WholeMessage};
use super::error::{ApiError, ErrorCode};
use super::generate::run::{AnswerRun, RequestRun, begin};
use super::generate::sse::{self, ToWire};
use super::generate::{ChoiceUpdate, ClientRequest};
use super::stored::{RecordedResponse, find_response};
use request::{InputItem, ResponseRequest, from_wire};
use wire::{ResponseEvent, ResponseObject, ResponseOutput, item_of};

pub async fn create(call: Call, JsonObject(body): JsonObject) -> Result<Response, ApiError> {
    let (arrived, state) = (Instant::now(), &call.0);
    let (most, vocab) = (state.config.default_max_tokens, state.engine.info().vocab);
    let request = complete(&call, from_wire(&body, most, vocab)?).await?;
    let stream = request.stream;
    let begun = begin(call, request, arrived).await?;
    let (output, end) = (ResponseOutput::new(begun.interaction.id), MessageEnd::Cancelled);
    sse::respond(ResponseWire { begun, output, end, sequence: 0 }, stream).await
}

/// Makes responses.
///
/// A stream has `response.created` and `response.in_progress`; for each item its beginning, its growth and its end;
/// then `response.completed` or `response.incomplete`. A failure after the first byte ends it with
/// `response.failed`.
struct ResponseWire {
    begun: AnswerRun,
    output: ResponseOutput,
    end: MessageEnd,
    /// The number of the next event.
    sequence: u64,
}

impl ToWire for ResponseWire {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.begun.run
    }

    fn first(&mut self) -> String {
        let response = self.begun();
        let created = ResponseEvent::response("response.created", response.clone());
        self.write(vec![created, ResponseEvent::response("response.in_progress", response)])
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let events = self.update(updates)?;
        Ok(self.write(events))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let mut output = Vec::new();
        if !self.output.items().is_empty() {
            self.output.finish(MessageEnd::Cancelled);
            output.extend_from_slice(self.output.items());
        }
        let response = self.begun().failed(error, output);
        self.end(response)
    }

    fn last(&mut self) -> String {
        let response = self.ended();
        self.end(response)
    }

    fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError> {
        self.update(vec![update]).map(drop)
    }

    fn whole(self) -> Result<Response, ApiError> {
        Ok(Json(self.ended()).into_response())
    }
}

impl ResponseWire {
    /// The events of updates, perhaps none.
    fn update(&mut self, updates: Vec<ChoiceUpdate>) -> Result<Vec<ResponseEvent>, ApiError> {
        let updates = self.begun.answers.update(updates)?;
        Ok(updates.into_iter().flat_map(|update| self.add(update)).collect())
    }

    fn add(&mut self, update: MessageUpdate) -> Vec<ResponseEvent> {
        let MessageUpdate { parts, tokens, end, .. } = update;
        let codec = self.begun.run.state.engine.codec();
        let mut logprobs: Vec<TokenLogprob> =
            tokens.iter().map(|token| TokenLogprob::new(codec, token)).collect();
        let mut events = Vec::new();
        for part in parts {
            let is_text = matches!(part, MessagePart::Text(_));
            let own = if is_text { std::mem::take(&mut logprobs) } else { Vec::new() };
            events.extend(self.output.add(part, own));
        }
        // Tokens of a stop string, which is no text.
        if !logprobs.is_empty() && self.output.is_in_text() {
            events.extend(self.output.add(MessagePart::Text(String::new()), logprobs));
        }
        if let Some(end) = end {
            self.end = end;
            events.extend(self.output.finish(end));
        }
        events
    }

    /// The response before its output.
    fn begun(&self) -> ResponseObject {
        ResponseObject::new(&self.begun.interaction, self.begun.run.version())
    }

    /// The response after its end.
    fn ended(&self) -> ResponseObject {
        let usage = self.begun.usage().into();
        self.begun().ended(self.end, self.output.items().to_vec(), usage, now_ms())
    }

    fn end(&mut self, response: ResponseObject) -> String {
        self.write(vec![ResponseEvent::response(response.last_event(), response)])
    }

    fn write(&mut self, events: Vec<ResponseEvent>) -> String {
        let mut text = String::new();
        for mut event in events {
            event.sequence_number = self.sequence;
            self.sequence += 1;
            text.push_str(&sse::named_event(&event));
        }
        text
    }
}

// Completes a conversation by the response that it continues, and the items that its input refers to.

/// The conversation of a request: instructions, the messages and the answer of the response that it
/// continues, and the input. The instructions of that response are left out, as in OpenAI's API.
///
/// # Errors
/// 400 for a response that cannot be continued, 404 for an unknown item.
async fn complete(call: &Call, request: ResponseRequest) -> Result<ClientRequest, ApiError> {
    let ResponseRequest { request, instructions, previous, input, schema_name } = request;
    let mut turns = Turns::default();
    let has_instructions = instructions.is_some();
    if let Some(text) = instructions {
        turns.add(Message::new(Role::System, text));
    }
    let previous = match previous {
        Some(id) => Some(continued(call, &id, &mut turns).await?),
        None => None,
    };
    let mut found = BTreeMap::new();
    for item in input {
        match item {
            InputItem::Message(message) => turns.add(message),
            InputItem::Assistant(item) => turns.add_item(item),
            InputItem::Reference { path, id } => {
                turns.add_item(referred(call, &path, &id, &mut found).await?);
            }
        }
    }
    let options = ResponseOptions { instructions: has_instructions, previous, schema_name };
    let endpoint = ClientEndpoint::Responses(options);
    Ok(ClientRequest { messages: turns.finish(), endpoint, ..request })
}

/// Adds the messages and the answer of a response.
async fn continued(call: &Call, text: &str, turns: &mut Turns) -> Result<InteractionId, ApiError> {
    if InteractionId::from_completion_id(text).is_some_and(InteractionId::is_unstored) {
        return Err(no_previous_response(format!(
            "previous_response_id is {text:?}: nothing of this response was kept (\"store\" is false \
             for its request, its route or its key), so send its items in input"
        )));
    }
    let previous = find_response(call, "previous_response_id", text).await;
    let previous = previous.map_err(|error| match error.status() {
        404 => no_previous_response(error.message),
        _ => error,
    })?;
    let RecordedResponse { interaction, options, items, .. } = previous;
    let instructions = usize::from(options.instructions);
    for message in interaction.messages.into_iter().skip(instructions) {
        turns.add(message);
    }
    turns.add(assistant(items));
    Ok(interaction.id)
}

/// 400 for a response that cannot be continued, as in OpenAI's API.
fn no_previous_response(message: String) -> ApiError {
    ApiError::new(ErrorCode::PreviousResponseNotFound, message).param("previous_response_id")
}

/// The message of an answer.
fn assistant(items: Vec<MessageItem>) -> Message {
    let (reasoning, content, tool_calls) = WholeMessage::split(items);
    Message {
        reasoning: Some(reasoning).filter(|text| !text.is_empty()),
        tool_calls,
        ..Message::new(Role::Assistant, content)
    }
}

/// The item with an id. `found` has the items of the responses that were read.
async fn referred(
    call: &Call,
    path: &str,
    id: &str,
    found: &mut BTreeMap<InteractionId, Vec<MessageItem>>,
) -> Result<MessageItem, ApiError> {
    let unknown = || {
        let message = format!("{path} is {id:?}: there is no such item");
        ApiError::new(ErrorCode::CompletionNotFound, message).param(path)
    };
    let (response, index) = item_of(id).ok_or_else(unknown)?;
    if response.is_unstored() {
        return Err(ApiError::unstored_completion(path, id));
    }
    let items = match found.entry(response) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            let recorded = find_response(call, path, &response.response_id()).await;
            let recorded = recorded.map_err(|error| match error.status() {
                404 => unknown(),
                _ => error,
            })?;
            entry.insert(recorded.items)
        }
    };
    items.get(index).cloned().ok_or_else(unknown)
}

/// Makes messages of items. Those of the assistant are parts of one message, until the client's next one.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    /// The assistant's message that the next item may belong to.
    open: Option<Message>,
}

impl Turns {
    fn add(&mut self, message: Message) {
        self.messages.extend(self.open.take());
        self.messages.push(message);
    }

    fn add_item(&mut self, item: MessageItem) {
        if self.open.as_ref().is_some_and(|open| begins_message(open, &item)) {
            self.messages.extend(self.open.take());
        }
        let open = self.open.get_or_insert_with(|| Message::new(Role::Assistant, ""));
        match item {
            MessageItem::Reasoning(text) if text.is_empty() => {}
            MessageItem::Reasoning(text) => {
                open.reasoning.get_or_insert_default().push_str(&text);
            }
            MessageItem::Text(text) => open.content.push_str(&text),
            MessageItem::Call(call) => open.tool_calls.push(call),
        }
    }

    fn finish(mut self) -> Vec<Message> {
        self.messages.extend(self.open.take());
        self.messages
    }
}

/// Whether an item begins another message: one has its reasoning first, and a second text only after calls.
fn begins_message(open: &Message, item: &MessageItem) -> bool {
    match item {
        MessageItem::Reasoning(_) => !open.content.is_empty() || !open.tool_calls.is_empty(),
        MessageItem::Text(_) => !open.content.is_empty() && open.tool_calls.is_empty(),
        MessageItem::Call(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use hone_core::types::ToolCall;

    use super::*;

    fn call(id: &str) -> ToolCall {
        ToolCall { id: id.to_owned(), name: "add".to_owned(), arguments: "{}".to_owned() }
    }

    fn text(text: &str) -> MessageItem {
        MessageItem::Text(text.to_owned())
    }

    fn thought(text: &str) -> MessageItem {
        MessageItem::Reasoning(text.to_owned())
    }

    #[test]
    fn the_items_of_a_turn_are_one_message() {
        let mut turns = Turns::default();
        turns.add(Message::new(Role::User, "2 + 3"));
        for item in [thought("Hm."), text("I add."), MessageItem::Call(call("a")), text("Done.")] {
            turns.add_item(item);
        }
        turns.add(Message::new(Role::Tool, "5"));
        for item in [text("5"), text("Really."), thought("Why?"), MessageItem::Call(call("b"))] {
            turns.add_item(item);
        }
        let message = |reasoning: &str, content: &str, calls: &[&str]| Message {
            reasoning: Some(reasoning.to_owned()).filter(|text| !text.is_empty()),
            tool_calls: calls.iter().map(|id| call(id)).collect(),
            ..Message::new(Role::Assistant, content)
        };
        let expected = [
            Message::new(Role::User, "2 + 3"),
            message("Hm.", "I add.Done.", &["a"]),
            Message::new(Role::Tool, "5"),
            message("", "5", &[]),
            message("", "Really.", &[]),
            message("Why?", "", &["b"]),
        ];
        assert_eq!(turns.finish(), expected);
    }
}
