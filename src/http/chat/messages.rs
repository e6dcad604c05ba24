//! Reads the messages of a chat request.
//!
//! Fields of messages that no chat template knows are ignored, because clients send back messages as
//! they received them.

use serde_json::{Value, json};

use hone_core::types::{Message, Role, ToolCall};

use crate::http::body::Fields;
use crate::http::error::ApiError;

/// Reads `messages`.
pub(in crate::http) fn read(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let allowed = "a list of at least one message";
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages", allowed))?;
    if list.is_empty() {
        return Err(fields.invalid("messages", allowed));
    }
    list.iter().enumerate().map(|(i, value)| message(&format!("messages[{i}]"), value)).collect()
}

fn message(path: &str, value: &Value) -> Result<Message, ApiError> {
    let fields = Fields::at(path, value)?;
    let role = role(&fields)?;
    for name in ["function_call", "audio"] {
        if !is_absent(&fields, name) {
            let path = fields.path(name);
            return Err(ApiError::unsupported(&path, format!("{path} is not supported")));
        }
    }
    let mut message = Message::new(role, "");
    message.name = fields.text("name")?.map(str::to_owned);
    if role == Role::Assistant {
        message.tool_calls = tool_calls(&fields)?;
        let reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
        message.reasoning = reasoning.map(str::to_owned);
    } else if !is_absent(&fields, "tool_calls") {
        return Err(fields.invalid("tool_calls", "absent unless role is \"assistant\""));
    }
    if role == Role::Tool {
        let id = fields.text("tool_call_id")?;
        let missing = || fields.missing("tool_call_id", "the id of the call that was answered");
        message.tool_call_id = Some(id.ok_or_else(missing)?.to_owned());
    }
    if message.tool_calls.is_empty() || fields.get("content").is_some() {
        message.content = content(&fields)?;
    }
    Ok(message)
}

/// Whether a field is absent or an empty list.
fn is_absent(fields: &Fields<'_>, name: &str) -> bool {
    fields.get(name).is_none_or(|value| value.as_array().is_some_and(Vec::is_empty))
}

fn role(fields: &Fields<'_>) -> Result<Role, ApiError> {
    let roles = "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"";
    match fields.text("role")? {
        None => Err(fields.missing("role", roles)),
        Some("system") => Ok(Role::System),
        Some("developer") => Ok(Role::Developer),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        Some(_) => Err(fields.invalid("role", roles)),
    }
}

/// A string, or text parts, which are concatenated.
fn content(fields: &Fields<'_>) -> Result<String, ApiError> {
    const ALLOWED: &str = "a string or a list of text parts";
    match fields.get("content") {
        None => Err(fields.missing("content", ALLOWED)),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) if !parts.is_empty() => {
            let base = fields.path("content");
            parts
                .iter()
                .enumerate()
                .map(|(i, part)| text_part(&format!("{base}[{i}]"), part))
                .collect()
        }
        Some(_) => Err(fields.invalid("content", ALLOWED)),
    }
}

fn text_part(path: &str, value: &Value) -> Result<String, ApiError> {
    let part = Fields::at(path, value)?;
    match part.text("type")? {
        Some("text") => {}
        None => return Err(part.missing("type", "\"text\"")),
        Some(_) => return Err(part.invalid("type", "\"text\": nothing else is supported")),
    }
    part.text("text")?.map(str::to_owned).ok_or_else(|| part.missing("text", "a string"))
}

fn tool_calls(fields: &Fields<'_>) -> Result<Vec<ToolCall>, ApiError> {
    let Some(list) = fields.list("tool_calls")? else { return Ok(Vec::new()) };
    let base = fields.path("tool_calls");
    list.iter().enumerate().map(|(i, call)| tool_call(&format!("{base}[{i}]"), call)).collect()
}

fn tool_call(path: &str, value: &Value) -> Result<ToolCall, ApiError> {
    let call = Fields::at(path, value)?;
    if call.text("type")?.is_some_and(|kind| kind != "function") {
        return Err(call.invalid("type", "\"function\": nothing else is supported"));
    }
    let required = |fields: &Fields<'_>, name: &str| -> Result<String, ApiError> {
        let text = fields.text(name)?.ok_or_else(|| fields.missing(name, "a string"))?;
        Ok(text.to_owned())
    };
    let id = required(&call, "id")?;
    let function = call.get("function").ok_or_else(|| call.missing("function", "an object"))?;
    let function = Fields::at(&call.path("function"), function)?;
    let (name, arguments) = (required(&function, "name")?, required(&function, "arguments")?);
    Ok(ToolCall { id, name, arguments })
}

/// The JSON schema of `messages`.
pub(in crate::http) fn schema() -> Value {
    json!({"type": "array", "minItems": 1, "items": {"oneOf": [
        plain_schema(),
        assistant_schema(),
        result_schema(),
    ]}})
}

/// A message of the system or the user.
fn plain_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user"]},
            "content": content_schema(),
            "name": {"type": ["string", "null"]},
            "tool_calls": absent_schema(),
            "function_call": absent_schema(),
            "audio": absent_schema(),
        },
        "required": ["role", "content"],
    })
}

/// A message of the assistant, with a text, with calls or with both.
fn assistant_schema() -> Value {
    let text = json!({"type": ["string", "null"]});
    json!({
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"anyOf": [content_schema(), {"type": "null"}]},
            "name": text,
            "reasoning_content": text,
            "reasoning": text,
            "tool_calls": {"type": ["array", "null"], "items": call_schema()},
            "function_call": absent_schema(),
            "audio": absent_schema(),
        },
        "required": ["role"],
        "anyOf": [
            {"properties": {"content": content_schema()}, "required": ["content"]},
            {
                "properties": {"tool_calls": {"type": "array", "minItems": 1}},
                "required": ["tool_calls"],
            },
        ],
    })
}

/// The result of a call.
fn result_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "role": {"const": "tool"},
            "content": content_schema(),
            "tool_call_id": {"type": "string"},
            "name": {"type": ["string", "null"]},
            "tool_calls": absent_schema(),
            "function_call": absent_schema(),
            "audio": absent_schema(),
        },
        "required": ["role", "content", "tool_call_id"],
    })
}

/// A string or text parts.
fn content_schema() -> Value {
    let part = json!({
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    });
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}]})
}

fn call_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "type": {"enum": ["function", null]},
            "function": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
                "required": ["name", "arguments"],
            },
        },
        "required": ["id", "function"],
    })
}

/// Null or an empty list.
fn absent_schema() -> Value {
    json!({"enum": [null, []]})
}
