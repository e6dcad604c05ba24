//! Reads `input`.
//!
//! Fields of items that change nothing, such as `status`, are ignored, because clients send back items as
//! they received them.

use serde_json::{Value, json};

use hone_core::types::{Message, Role, ToolCall};

use crate::body::{Fields, list_of, open, text_schema};
use crate::chat::answer::MessageItem;
use crate::error::ApiError;

/// An item of the input.
#[derive(Debug, PartialEq)]
pub enum InputItem {
    /// A message of the client, or the result of a call.
    Message(Message),
    /// A part of the assistant's turn.
    Assistant(MessageItem),
    /// An item of an earlier response.
    Reference {
        /// The path of the field with the id.
        path: String,
        id: String,
    },
}

/// Reads `input`, which has at least one item.
pub fn read(fields: &Fields<'_>) -> Result<Vec<InputItem>, ApiError> {
    const ALLOWED: &str = "a text or a list of at least one item";
    match fields.get("input") {
        None => Err(fields.missing("input", ALLOWED)),
        Some(Value::String(text)) => Ok(vec![InputItem::Message(Message::new(Role::User, text))]),
        Some(Value::Array(list)) if !list.is_empty() => {
            let items = fields.entries("input")?.into_iter().flatten();
            items.map(|(path, value)| item(&path, value)).collect()
        }
        Some(_) => Err(fields.invalid("input", ALLOWED)),
    }
}

fn item(path: &str, value: &Value) -> Result<InputItem, ApiError> {
    let fields = Fields::at(path, value)?;
    match fields.text("type")? {
        // The type of a reference and of a message may be absent.
        None if fields.get("role").is_none() && fields.get("id").is_some() => reference(&fields),
        None | Some("message") => message(&fields),
        Some("item_reference") => reference(&fields),
        Some("function_call") => Ok(InputItem::Assistant(MessageItem::Call(ToolCall {
            id: required(&fields, "call_id")?,
            name: required(&fields, "name")?,
            arguments: required(&fields, "arguments")?,
        }))),
        Some("function_call_output") => {
            let mut result = Message::new(Role::Tool, text(&fields, "output")?);
            result.tool_call_id = Some(required(&fields, "call_id")?);
            Ok(InputItem::Message(result))
        }
        Some("reasoning") => reasoning(&fields),
        Some(kind) => {
            let reason = format_args!(
                "is {kind:?}: only \"message\", \"function_call\", \"function_call_output\", \
                 \"reasoning\" and \"item_reference\" are supported"
            );
            Err(fields.unsupported("type", reason))
        }
    }
}

fn required(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    Ok(fields.required(name, "a string")?.to_owned())
}

fn reference(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    Ok(InputItem::Reference { path: fields.path("id"), id: required(fields, "id")? })
}

fn message(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    let roles = "\"user\", \"assistant\", \"system\" or \"developer\"";
    let role = match fields.required("role", roles)? {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        "developer" => Role::Developer,
        _ => return Err(fields.invalid("role", roles)),
    };
    let text = text(fields, "content")?;
    Ok(match role {
        Role::Assistant => InputItem::Assistant(MessageItem::Text(text)),
        role => InputItem::Message(Message::new(role, text)),
    })
}

/// A string, or parts of text, which are joined.
fn text(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    const ALLOWED: &str = "a string or a list of text parts";
    match fields.get(name) {
        None => Err(fields.missing(name, ALLOWED)),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) if !parts.is_empty() => parts_of(fields, name, &TEXT_PARTS),
        Some(_) => Err(fields.invalid(name, ALLOWED)),
    }
}

/// The types of parts of text, each with the field of the text.
const TEXT_PARTS: [(&str, &str); 3] =
    [("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];

/// The joined texts of parts. `known` has their types, each with the field of the text.
fn parts_of(fields: &Fields<'_>, name: &str, known: &[(&str, &str)]) -> Result<String, ApiError> {
    let quoted: Vec<_> = known.iter().map(|(kind, _)| format!("{kind:?}")).collect();
    let allowed = format!("one of {}", quoted.join(", "));
    let mut all = String::new();
    for (path, value) in fields.entries(name)?.into_iter().flatten() {
        let part = Fields::at(&path, value)?;
        let kind = part.required("type", &allowed)?;
        let Some((_, field)) = known.iter().find(|(name, _)| *name == kind) else {
            let reason = format_args!("is {kind:?}, which is not supported: it must be {allowed}");
            return Err(part.unsupported("type", reason));
        };
        all.push_str(&required(&part, field)?);
    }
    Ok(all)
}

/// The text of a reasoning item. Its summary is no text of the model.
fn reasoning(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    if fields.get("encrypted_content").is_some() {
        let reason = "is not supported: send the content, or leave the item out";
        return Err(fields.unsupported("encrypted_content", reason));
    }
    fields.list("summary")?;
    let text = parts_of(fields, "content", &[("reasoning_text", "text")])?;
    Ok(InputItem::Assistant(MessageItem::Reasoning(text)))
}

/// The JSON schema of `input`.
pub fn schema() -> Value {
    let typed = |kind: Value, required: usize, members: &[(&'static str, Value)]| {
        open(required, &[&[("type", kind)][..], members].concat())
    };
    let is = |kind: &str| json!({"const": kind});
    let part = json!({"anyOf": [
        typed(json!({"enum": ["input_text", "output_text"]}), 2, &[("text", text_schema())]),
        typed(is("refusal"), 2, &[("refusal", text_schema())]),
    ]});
    let text = json!({"anyOf": [text_schema(), list_of(1, part)]});
    let message = [
        ("role", json!({"enum": ["user", "assistant", "system", "developer"]})),
        ("content", text.clone()),
        ("type", json!({"enum": ["message", null]})),
    ];
    let call_id = ("call_id", text_schema());
    let call = [call_id.clone(), ("name", text_schema()), ("arguments", text_schema())];
    let thought = typed(is("reasoning_text"), 2, &[("text", text_schema())]);
    let reasoning = [
        ("content", json!({"type": ["array", "null"], "items": thought})),
        ("summary", json!({"type": ["array", "null"]})),
        ("encrypted_content", json!({"type": "null"})),
    ];
    let reference = [
        ("id", text_schema()),
        ("type", json!({"enum": ["item_reference", null]})),
        ("role", json!({"type": "null"})),
    ];
    let items = json!({"anyOf": [
        open(2, &message),
        typed(is("function_call"), 4, &call),
        typed(is("function_call_output"), 3, &[call_id, ("output", text)]),
        typed(is("reasoning"), 1, &reasoning),
        open(1, &reference),
    ]});
    json!({"anyOf": [text_schema(), list_of(1, items)]})
}
