//! Completes the conversation of a request by what the ledger has: the response that it continues, and the
//! items that its input refers to.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use hone_core::types::{ClientEndpoint, InteractionId, Message, ResponseOptions, Role};

use super::input::InputItem;
use super::items::item_of;
use super::request::ResponseRequest;
use super::stored::{RecordedResponse, find};
use crate::http::auth::Caller;
use crate::http::chat::answer::{MessageItem, WholeMessage};
use crate::http::chat::conversation::ConversationRequest;
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// The conversation of a request: instructions, the messages and the answer of the response that it
/// continues, and the input. The instructions of that response are left out, as in OpenAI's API.
///
/// # Errors
/// 400 for a response that cannot be continued, 404 for an unknown item.
pub(super) async fn complete(
    state: &AppState,
    caller: &Caller,
    request: ResponseRequest,
) -> Result<ConversationRequest, ApiError> {
    let ResponseRequest { conversation, instructions, previous, input, schema_name, .. } = request;
    let mut turns = Turns::default();
    let has_instructions = instructions.is_some();
    if let Some(text) = instructions {
        turns.add(Message::new(Role::System, text));
    }
    let previous = match previous {
        Some(id) => Some(continued(state, caller, &id, &mut turns).await?),
        None => None,
    };
    let mut found = BTreeMap::new();
    for item in input {
        match item {
            InputItem::Message(message) => turns.add(message),
            InputItem::Assistant(item) => turns.add_item(item),
            InputItem::Reference { path, id } => {
                turns.add_item(referred(state, caller, &path, &id, &mut found).await?);
            }
        }
    }
    let options = ResponseOptions { instructions: has_instructions, previous, schema_name };
    Ok(ConversationRequest {
        messages: turns.finish(),
        endpoint: ClientEndpoint::Responses(options),
        ..conversation
    })
}

/// Adds the messages and the answer of a response.
async fn continued(
    state: &AppState,
    caller: &Caller,
    text: &str,
    turns: &mut Turns,
) -> Result<InteractionId, ApiError> {
    if InteractionId::from_completion_id(text).is_some_and(InteractionId::is_unstored) {
        return Err(ApiError::no_previous_response(format!(
            "previous_response_id is {text:?}: nothing of this response was kept (\"store\" is false \
             for its request, its route or its key), so send its items in input"
        )));
    }
    let previous = find(state, caller, "previous_response_id", text).await;
    let previous = previous.map_err(|error| match error.status() {
        404 => ApiError::no_previous_response(error.message().to_owned()),
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
    state: &AppState,
    caller: &Caller,
    path: &str,
    id: &str,
    found: &mut BTreeMap<InteractionId, Vec<MessageItem>>,
) -> Result<MessageItem, ApiError> {
    let unknown = || ApiError::no_such_item(path, id);
    let (response, index) = item_of(id).ok_or_else(unknown)?;
    if response.is_unstored() {
        return Err(ApiError::unstored_completion(path, id));
    }
    let items = match found.entry(response) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            let recorded = find(state, caller, path, &response.response_id()).await;
            let recorded = recorded.map_err(|error| match error.status() {
                404 => unknown(),
                _ => error,
            })?;
            entry.insert(recorded.items)
        }
    };
    items.get(index).cloned().ok_or_else(unknown)
}

/// Makes messages of items. Reasoning, text and calls of the assistant are parts of one message, until the
/// client's next one.
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

/// Whether an item begins another message: one message has its reasoning first, and a second text only
/// after calls.
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
