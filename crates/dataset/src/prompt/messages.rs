//! Conversations in a row's columns, in the layouts of TRL's datasets.

use serde_json::Value;

use hone_core::text::shortened;
use hone_core::types::{Message, Role};

use crate::config::DatasetConfig;
use crate::error::{BadRow, RowPlace};
use crate::read::DatasetRow;

/// Columns of completions, which TRL's datasets hold as text or as a list of messages.
const COMPLETIONS: [&str; 3] = [COMPLETION, "chosen", "rejected"];
const COMPLETION: &str = "completion";

/// Brings TRL's layouts into one form; returns whether the conversation had a reply.
///
/// - The assistant's turns at the end of `messages_column` become the column `completion`, unless
///   the row has one: such rows come from supervised training.
/// - A list of messages in a completion's or the answer's column becomes the text of its assistant
///   messages.
///
/// Invalid values stay, for [`parse_messages`] to report.
pub(crate) fn normalize(row: &mut DatasetRow, config: &DatasetConfig) -> bool {
    let mut reply = None;
    let conversation = row.columns.get_mut(&config.messages_column);
    if let Some(value) = conversation.filter(|_| config.template.is_empty()) {
        if let (Value::String(text), true) = (&*value, row.cells_are_text)
            && let Ok(list @ Value::Array(_)) = serde_json::from_str(text)
        {
            *value = list;
        }
        reply = value.as_array_mut().and_then(take_reply);
    }
    let has_reply = reply.is_some();
    if let Some(reply) = reply {
        let column = row.columns.entry(COMPLETION).or_insert(Value::Null);
        if column.is_null() {
            *column = Value::from(reply);
        }
    }
    for name in COMPLETIONS.into_iter().chain([config.answer_column.as_str()]) {
        if let Some(value) = row.columns.get_mut(name)
            && let Some(text) = assistant_text(value)
        {
            *value = Value::from(text);
        }
    }
    has_reply
}

/// Removes the assistant's turns at the end of a conversation and returns their text. Leaves a
/// conversation of which nothing else would remain.
fn take_reply(messages: &mut Vec<Value>) -> Option<String> {
    let is_assistant = |message: &Value| message.get("role").is_some_and(|r| r == "assistant");
    let kept = messages.iter().rposition(|message| !is_assistant(message))? + 1;
    let reply = joined(messages.get(kept..)?)?;
    messages.truncate(kept);
    Some(reply)
}

/// The text of the assistant's messages in a list of messages; `None` for any other value.
fn assistant_text(value: &Value) -> Option<String> {
    let messages = value.as_array()?;
    let is_message = |item: &Value| item.get("role").is_some() && item.get("content").is_some();
    if !messages.iter().all(is_message) {
        return None;
    }
    let replies = messages.iter().filter(|message| message["role"] == "assistant");
    joined(&replies.cloned().collect::<Vec<_>>())
}

/// The messages' texts, one per line; `None` without any message or with one that is not text.
fn joined(messages: &[Value]) -> Option<String> {
    let texts = messages.iter().map(|message| content(message.get("content")?).ok());
    let texts: Vec<String> = texts.collect::<Option<_>>()?;
    (!texts.is_empty()).then(|| texts.join("\n"))
}

/// The text of a message: a text, or a list of text parts, which are concatenated. The error is a
/// phrase that continues the key.
fn content(value: &Value) -> Result<String, String> {
    match value {
        Value::Null => Err("is missing".to_owned()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| match (part.get("type").and_then(Value::as_str), part.get("text")) {
                (Some("text"), Some(Value::String(text))) => Ok(text.as_str()),
                (Some(other), _) if other != "text" => {
                    let other = shortened(other, 40);
                    Err(format!("has a part of type {other:?}: only \"text\" is supported"))
                }
                _ => Err("is not a text".to_owned()),
            })
            .collect(),
        _ => Err("is not a text".to_owned()),
    }
}

/// Reads a conversation, which must end with a user or tool message. Ignores other keys of a
/// message.
pub(super) fn parse_messages(
    place: RowPlace,
    column: &str,
    value: &Value,
) -> Result<Vec<Message>, BadRow> {
    let bad = |reason: &str| BadRow::column(place, column, reason);
    let Value::Array(items) = value else {
        return Err(bad("is not a list of {role, content}"));
    };
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let at = |key: &str| format!("{column}[{index}]{key}");
        let Value::Object(item) = item else {
            return Err(BadRow::column(place, at(""), "is not an object {role, content}"));
        };
        let role = item.get("role").cloned().unwrap_or_default();
        let role = serde_json::from_value(role.clone()).map_err(|_| {
            let allowed = "it must be system, developer, user, assistant or tool";
            let reason = match role {
                Value::Null => format!("is missing: {allowed}"),
                other => format!("is {}: {allowed}", shortened(&other.to_string(), 40)),
            };
            BadRow::column(place, at(".role"), reason)
        })?;
        let content = content(item.get("content").unwrap_or(&Value::Null))
            .map_err(|reason| BadRow::column(place, at(".content"), reason))?;
        messages.push(Message::new(role, content));
    }
    match messages.last().map(|last| last.role) {
        None => Err(bad("is empty")),
        Some(Role::Assistant) => {
            Err(bad("ends with the assistant's turn, so there is no reply to sample"))
        }
        Some(Role::System | Role::Developer) => {
            Err(bad("ends with a system message, so there is no question to answer"))
        }
        Some(Role::User | Role::Tool) => Ok(messages),
    }
}
