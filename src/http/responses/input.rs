//! Reads `input`.
//!
//! Fields of items that change nothing, such as `status`, are ignored, because clients send back items as
//! they received them.

use serde_json::{Value, json};

use hone_core::types::{Message, Role, ToolCall};

use crate::http::body::Fields;
use crate::http::chat::answer::MessageItem;
use crate::http::error::ApiError;

/// An item of the input.
#[derive(Debug, PartialEq)]
pub(super) enum InputItem {
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
pub(super) fn read(fields: &Fields<'_>) -> Result<Vec<InputItem>, ApiError> {
    const ALLOWED: &str = "a text or a list of at least one item";
    match fields.get("input") {
        None => Err(fields.missing("input", ALLOWED)),
        Some(Value::String(text)) => Ok(vec![InputItem::Message(Message::new(Role::User, text))]),
        Some(Value::Array(list)) if !list.is_empty() => {
            list.iter().enumerate().map(|(i, value)| item(&format!("input[{i}]"), value)).collect()
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
            let path = fields.path("type");
            let message = format!(
                "{path} is {kind:?}: only \"message\", \"function_call\", \"function_call_output\", \
                 \"reasoning\" and \"item_reference\" are supported"
            );
            Err(ApiError::unsupported(&path, message))
        }
    }
}

fn required(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    let text = fields.text(name)?.ok_or_else(|| fields.missing(name, "a string"))?;
    Ok(text.to_owned())
}

fn reference(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    Ok(InputItem::Reference { path: fields.path("id"), id: required(fields, "id")? })
}

fn message(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    let roles = "\"user\", \"assistant\", \"system\" or \"developer\"";
    let role = match fields.text("role")? {
        None => return Err(fields.missing("role", roles)),
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("system") => Role::System,
        Some("developer") => Role::Developer,
        Some(_) => return Err(fields.invalid("role", roles)),
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
        Some(Value::Array(parts)) if !parts.is_empty() => {
            parts_of(&fields.path(name), parts, &TEXT_PARTS)
        }
        Some(_) => Err(fields.invalid(name, ALLOWED)),
    }
}

/// The types of parts of text, each with the field of the text.
const TEXT_PARTS: [(&str, &str); 3] =
    [("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];

/// The joined texts of parts. `known` has their types, each with the field of the text.
fn parts_of(path: &str, parts: &[Value], known: &[(&str, &str)]) -> Result<String, ApiError> {
    let quoted: Vec<_> = known.iter().map(|(kind, _)| format!("{kind:?}")).collect();
    let allowed = format!("one of {}", quoted.join(", "));
    let mut all = String::new();
    for (index, value) in parts.iter().enumerate() {
        let part = Fields::at(&format!("{path}[{index}]"), value)?;
        let kind = part.text("type")?.ok_or_else(|| part.missing("type", &allowed))?;
        let Some((_, field)) = known.iter().find(|(name, _)| *name == kind) else {
            let path = part.path("type");
            let message =
                format!("{path} is {kind:?}, which is not supported: it must be {allowed}");
            return Err(ApiError::unsupported(&path, message));
        };
        all.push_str(&required(&part, field)?);
    }
    Ok(all)
}

/// The text of a reasoning item. Its summary is no text of the model.
fn reasoning(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    if fields.get("encrypted_content").is_some() {
        let path = fields.path("encrypted_content");
        let message = format!("{path} is not supported: send the content, or leave the item out");
        return Err(ApiError::unsupported(&path, message));
    }
    fields.list("summary")?;
    let known = [("reasoning_text", "text")];
    let text = match fields.list("content")? {
        Some(parts) => parts_of(&fields.path("content"), parts, &known)?,
        None => String::new(),
    };
    Ok(InputItem::Assistant(MessageItem::Reasoning(text)))
}

/// The JSON schema of `input`.
pub(super) fn schema() -> Value {
    let part = json!({"anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"},
            },
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
            "required": ["type", "refusal"],
        },
    ]});
    let text =
        json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}]});
    let message = json!({
        "type": "object",
        "properties": {
            "type": {"enum": ["message", null]},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": text,
        },
        "required": ["role", "content"],
    });
    let call = json!({
        "type": "object",
        "properties": {
            "type": {"const": "function_call"},
            "call_id": {"type": "string"},
            "name": {"type": "string"},
            "arguments": {"type": "string"},
        },
        "required": ["type", "call_id", "name", "arguments"],
    });
    let result = json!({
        "type": "object",
        "properties": {
            "type": {"const": "function_call_output"},
            "call_id": {"type": "string"},
            "output": text,
        },
        "required": ["type", "call_id", "output"],
    });
    let thought = json!({
        "type": "object",
        "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    });
    let reasoning = json!({
        "type": "object",
        "properties": {
            "type": {"const": "reasoning"},
            "content": {"type": ["array", "null"], "items": thought},
            "summary": {"type": ["array", "null"]},
            "encrypted_content": {"type": "null"},
        },
        "required": ["type"],
    });
    let reference = json!({
        "type": "object",
        "properties": {
            "type": {"enum": ["item_reference", null]},
            "id": {"type": "string"},
            "role": {"type": "null"},
        },
        "required": ["id"],
    });
    json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {
            "anyOf": [message, call, result, reasoning, reference],
        }},
    ]})
}
