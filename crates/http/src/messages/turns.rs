//! Reads `system` and `messages`, whose content is a text or a list of blocks.
//!
//! A turn of the user may contain results of calls, each of which becomes a message of its own, in the order of
//! the blocks. The texts of a turn are joined.

use serde_json::{Map, Value, json};

use hone_core::config::describe::one_of;
use hone_core::types::{Message, Role, ToolCall};

use crate::body::{Field, FieldTable, Fields, closed, list_of, object_schema, open, text_schema};
use crate::chat::request::at_least_one;
use crate::error::ApiError;

/// The only member of a call's `input` if its arguments are no object: their text, as Anthropic suggests.
pub const INVALID_JSON: &str = "INVALID_JSON";
const CONTENT: &str = "a string or a list of content blocks";
const ROLES: &str = "\"user\", \"assistant\" or \"system\"";
/// What precedes the text of a call's result that is an error, because no chat template marks errors.
const ERROR: &str = "Error: ";

pub fn read(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let system = texts(fields, "system")?.filter(|text| !text.is_empty());
    let mut messages: Vec<Message> =
        system.map(|text| Message::new(Role::System, text)).into_iter().collect();
    for (path, value) in at_least_one(fields)? {
        messages.extend(turn(&path, value)?);
    }
    Ok(messages)
}

const MESSAGE: FieldTable = &[&[Field::text("role", ""), Field::json("content", texts_schema, "")]];
/// The fields of content blocks, by type.
const BLOCKS: [(&str, FieldTable); 4] = [
    ("text", &[&[TYPE, Field::text("text", "").required(), CACHE, Field::refused("citations")]]),
    ("thinking", &[&[TYPE, Field::text("thinking", "").required(), Field::text("signature", "")]]),
    ("tool_use", CALL),
    ("tool_result", RESULT),
];
const TYPE: Field = Field::text("type", "").required();
const CACHE: Field = Field::ignored("cache_control");
const CALL: FieldTable = &[&[
    TYPE,
    Field::text("id", "").required(),
    Field::text("name", "").required(),
    Field::json("input", || json!({"type": "object"}), "").required(),
    CACHE,
    Field::json("caller", || open(1, &[("type", json!({"const": "direct"}))]), ""),
]];
const RESULT: FieldTable = &[&[
    TYPE,
    Field::text("tool_use_id", "").required(),
    Field::json("content", texts_schema, ""),
    Field::flag("is_error", ""),
    CACHE,
]];

pub fn schema() -> Value {
    let message = |role: &str, content: Value| {
        closed(2, &[("role", json!({"const": role})), ("content", content)])
    };
    let content =
        |least, known: &[&str]| json!({"anyOf": [text_schema(), blocks_schema(least, known)]});
    let messages = [
        message("user", content(1, &["text", "tool_result"])),
        message("assistant", content(0, &["text", "tool_use", "thinking"])),
        message("system", texts_schema()),
    ];
    list_of(1, json!({"oneOf": messages}))
}

/// The JSON schema of a text or a list of text blocks.
pub fn texts_schema() -> Value {
    json!({"anyOf": [text_schema(), blocks_schema(0, &["text"])]})
}

fn blocks_schema(least: usize, known: &[&str]) -> Value {
    let known = BLOCKS.iter().filter(|(kind, _)| known.contains(kind));
    let schemas = known.map(|(kind, table)| {
        let mut schema = object_schema(table);
        schema["properties"]["type"] = json!({"const": kind});
        schema
    });
    list_of(least, json!({"oneOf": schemas.collect::<Vec<_>>()}))
}

fn turn(path: &str, value: &Value) -> Result<Vec<Message>, ApiError> {
    let fields = Fields::of_table_at(path, value, MESSAGE)?;
    let role = fields.required("role", ROLES)?;
    let content = fields.get("content").ok_or_else(|| fields.missing("content", CONTENT))?;
    match (role, content) {
        ("system", _) => {
            let text = texts(&fields, "content")?.unwrap_or_default();
            Ok(vec![Message::new(Role::System, text)])
        }
        ("user", Value::String(text)) => Ok(vec![Message::new(Role::User, text.as_str())]),
        ("assistant", Value::String(text)) => {
            Ok(vec![Message::new(Role::Assistant, text.as_str())])
        }
        ("user", Value::Array(blocks)) if !blocks.is_empty() => user(&fields),
        // An answer without any text has no block.
        ("assistant", Value::Array(_)) => Ok(vec![assistant(&fields)?]),
        ("user" | "assistant", _) => Err(fields.invalid("content", CONTENT)),
        _ => Err(fields.invalid("role", ROLES)),
    }
}

fn user(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::new();
    for (kind, block) in blocks(fields, "content", &["text", "tool_result"])? {
        if kind == "tool_result" {
            messages.push(tool_result(&block)?);
            continue;
        }
        let said = block.string("text")?;
        match messages.last_mut() {
            Some(last) if last.role == Role::User => last.content.push_str(&said),
            _ => messages.push(Message::new(Role::User, said)),
        }
    }
    Ok(messages)
}

fn assistant(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let mut message = Message::new(Role::Assistant, "");
    for (kind, block) in blocks(fields, "content", &["text", "tool_use", "thinking"])? {
        match kind {
            "text" => message.content.push_str(&block.string("text")?),
            "tool_use" => message.tool_calls.push(tool_use(&block)?),
            _ => {
                let reasoning = message.reasoning.get_or_insert_default();
                reasoning.push_str(&block.string("thinking")?);
            }
        }
    }
    Ok(message)
}

/// The blocks in a field, with their types, which must be among those `known`.
fn blocks<'a>(
    fields: &Fields<'a>,
    name: &str,
    known: &[&str],
) -> Result<Vec<(&'static str, Fields<'a>)>, ApiError> {
    let allowed = one_of(&known.iter().map(|kind| format!("{kind:?}")).collect::<Vec<_>>());
    let read = |(path, value): (String, &'a Value)| {
        let block = Fields::at(&path, value)?;
        let kind = block.required("type", &allowed)?;
        let found = BLOCKS.iter().find(|(name, _)| *name == kind && known.contains(name));
        let (kind, table) = found.ok_or_else(|| {
            let reason = format_args!("is {kind:?}: only {allowed} is supported here");
            block.unsupported("type", reason)
        })?;
        block.check(table)?;
        Ok((*kind, block))
    };
    fields.entries(name)?.map(read).collect()
}

/// A text, or a list of text blocks, which are joined.
fn texts(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(_)) => {
            let blocks = blocks(fields, name, &["text"])?;
            blocks.iter().map(|(_, block)| block.string("text")).collect::<Result<_, _>>().map(Some)
        }
        Some(_) => Err(fields.invalid(name, "a string or a list of text blocks")),
    }
}

fn tool_use(block: &Fields<'_>) -> Result<ToolCall, ApiError> {
    let is_direct = |caller: &Value| caller.get("type").is_some_and(|kind| kind == "direct");
    if block.get("caller").is_some_and(|caller| !is_direct(caller)) {
        return Err(block.invalid("caller", "absent or {\"type\": \"direct\"}"));
    }
    let input = block.object("input")?.ok_or_else(|| block.missing("input", "an object"))?;
    Ok(ToolCall {
        id: block.string("id")?,
        name: block.string("name")?,
        arguments: arguments(input),
    })
}

/// The arguments as the model wrote them. Those that were not an object came as one with their text.
fn arguments(input: &Map<String, Value>) -> String {
    match input.get(INVALID_JSON) {
        Some(Value::String(text)) if input.len() == 1 => text.clone(),
        _ => Value::Object(input.clone()).to_string(),
    }
}

fn tool_result(block: &Fields<'_>) -> Result<Message, ApiError> {
    let mut content = texts(block, "content")?.unwrap_or_default();
    if block.is_set("is_error")? {
        content.insert_str(0, ERROR);
    }
    let mut message = Message::new(Role::Tool, content);
    message.tool_call_id = Some(block.string("tool_use_id")?);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: Value) -> Result<Vec<Message>, ApiError> {
        read(&Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn blocks_become_messages_in_their_order() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let messages = of(json!({
            "system": [text("Be "), text("brief.")],
            "messages": [
                {"role": "user", "content": "2 + 3?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Let me see.", "citations": null},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"b": 3, "a": 2},
                     "caller": {"type": "direct"}},
                    {"type": "tool_use", "id": "call_2", "name": "now", "input": {"INVALID_JSON": "{"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "5"},
                    {"type": "tool_result", "tool_use_id": "call_2", "is_error": true,
                     "content": [text("no"), text(" clock")]},
                    {"type": "text", "text": "So", "cache_control": {"type": "ephemeral"}},
                    text("?"),
                ]},
                {"role": "assistant", "content": []},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_3"}]},
                {"role": "system", "content": "Hurry."},
            ],
        }));
        let shown = serde_json::to_value(messages.unwrap()).unwrap();
        let call = |id: &str, name: &str, arguments: &str| {
            json!({"id": id, "type": "function",
                   "function": {"name": name, "arguments": arguments}})
        };
        let result = |id: &str, content: &str| json!({"role": "tool", "content": content, "tool_call_id": id});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.",
             "tool_calls": [call("call_1", "add", "{\"b\":3,\"a\":2}"), call("call_2", "now", "{")]},
            result("call_1", "5"),
            result("call_2", "Error: no clock"),
            {"role": "user", "content": "So?"},
            {"role": "assistant", "content": ""},
            result("call_3", ""),
            {"role": "system", "content": "Hurry."},
        ]);
        assert_eq!(shown, expected);
        let plain = of(json!({"system": "", "messages": [{"role": "user", "content": "Hi"}]}));
        assert_eq!(plain.unwrap(), [Message::new(Role::User, "Hi")]);
    }

    #[test]
    fn wrong_turns_are_refused_with_their_place() {
        let messages = |messages: Value| json!({"messages": messages});
        let turn =
            |role: &str, content: Value| messages(json!([{"role": role, "content": content}]));
        let block = |role: &str, block: Value| turn(role, json!([block]));
        for (body, expected) in [
            (json!({}), "messages is missing"),
            (messages(json!([])), "messages is a list"),
            (messages(json!([5])), "messages[0] is 5: it must be an object"),
            (messages(json!([{"content": "a"}])), "messages[0].role is missing"),
            (messages(json!([{"role": "user"}])), "messages[0].content is missing"),
            (turn("tool", json!("a")), "messages[0].role is \\\"tool\\\""),
            (turn("user", json!(5)), "messages[0].content is 5"),
            (turn("user", json!([])), "messages[0].content is a list"),
            (
                messages(json!([{"role": "user", "content": "a", "name": "ann"}])),
                "messages[0].name is not a known field",
            ),
            (block("user", json!("a")), "messages[0].content[0] is \\\"a\\\""),
            (block("user", json!({})), "messages[0].content[0].type is missing"),
            (
                block("user", json!({"type": "image"})),
                "messages[0].content[0].type is \\\"image\\\": only \\\"text\\\" or \\\"tool_result\\\"",
            ),
            (block("user", json!({"type": "document"})), "messages[0].content[0].type"),
            (
                block("assistant", json!({"type": "redacted_thinking", "data": "x"})),
                "messages[0].content[0].type",
            ),
            (block("user", json!({"type": "text"})), "messages[0].content[0].text is missing"),
            (
                block("user", json!({"type": "text", "text": "a", "citations": [5]})),
                "messages[0].content[0].citations is not supported",
            ),
            (
                block("user", json!({"type": "tool_result", "content": "a"})),
                "messages[0].content[0].tool_use_id is missing",
            ),
            (
                block(
                    "user",
                    json!({"type": "tool_result", "tool_use_id": "a",
                                     "content": [{"type": "image"}]}),
                ),
                "messages[0].content[0].content[0].type is \\\"image\\\": only \\\"text\\\" is",
            ),
            (
                block("assistant", json!({"type": "tool_use", "id": "a", "name": "b"})),
                "messages[0].content[0].input is missing",
            ),
            (
                block(
                    "assistant",
                    json!({"type": "tool_use", "id": "a", "name": "b", "input": {},
                                          "caller": {"type": "code_execution_20250825"}}),
                ),
                "messages[0].content[0].caller is an object",
            ),
            (json!({"system": 5, "messages": []}), "system is 5"),
            (json!({"system": [{"type": "image"}], "messages": []}), "system[0].type"),
        ] {
            let error = of(body.clone()).unwrap_err().to_json();
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
