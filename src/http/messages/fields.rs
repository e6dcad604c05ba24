//! The fields of a Messages request: Anthropic's, with Hone's `seed` and `store`. Every other field is refused
//! as unknown, so that a misspelled field is not silently ignored.

use serde_json::{Value, json};

use super::tools::EFFORTS;
use crate::http::body::{Field, FieldTable};
use crate::http::chat::fields::{
    MAX_TOKENS, metadata_schema, model_schema, seed_schema, stop_text_schema,
};
use crate::http::chat::tools::{MAX_TOOLS, name_schema};

/// Most stop sequences of a request.
pub const MAX_STOP: usize = 64;

/// The fields of a request for a message.
pub const FIELDS: FieldTable = &[PROMPT, SAMPLING];
/// The fields of a request to count the tokens of a prompt.
pub const COUNT_FIELDS: FieldTable = &[PROMPT];

/// What determines the prompt and the form of the answer.
const PROMPT: &[Field] = &[
    Field::json("model", model_schema, "The name of the model.").required(),
    Field::json("messages", messages_schema, "The conversation.").required(),
    Field::json("system", texts_schema, "The system message."),
    Field::json("tools", tools_schema, "Tools that the model may call."),
    Field::json("tool_choice", choice_schema, "Whether the model must call a tool."),
    Field::json("thinking", thinking_schema, "The variable enable_thinking of the chat template."),
    Field::json("output_config", output_schema, "The effort, and the JSON schema of the text."),
    // They control Anthropic's caches, capacity and location.
    Field::ignored("cache_control"),
    Field::ignored("inference_geo"),
    Field::ignored("service_tier"),
];

/// How the answer is sampled and sent, and what is recorded with it.
const SAMPLING: &[Field] = &[
    Field::integer("max_tokens", 1, MAX_TOKENS, "Most tokens of the answer.").required(),
    Field::number("temperature", 0.0, 1.0, "0 is greedy; default 1."),
    Field::number("top_p", 0.0, 1.0, "Mass of the tokens that are kept; default 1."),
    Field::integer("top_k", 0, MAX_TOKENS, "Tokens that are kept; 0 keeps all."),
    Field::json("seed", seed_schema, "Without one the server draws it."),
    Field::json("stop_sequences", stop_schema, "The text ends before these strings."),
    Field::flag("stream", "Whether events are sent while the text is sampled."),
    Field::json(
        "metadata",
        metadata_schema,
        "user_id is the end user; others as in chat requests.",
    ),
    Field::flag("store", "False keeps nothing of the request."),
];

fn messages_schema() -> Value {
    let message = |role: &str, content: Value| {
        json!({
            "type": "object",
            "properties": {"role": {"const": role}, "content": content},
            "required": ["role", "content"],
            "additionalProperties": false,
        })
    };
    let blocks = |blocks: Value, least: u32| {
        let list = json!({"type": "array", "minItems": least, "items": {"oneOf": blocks}});
        json!({"anyOf": [{"type": "string"}, list]})
    };
    json!({"type": "array", "minItems": 1, "items": {"oneOf": [
        message("user", blocks(json!([text_schema(), result_schema()]), 1)),
        message("assistant", blocks(json!([text_schema(), call_schema(), reasoning_schema()]), 0)),
        message("system", texts_schema()),
    ]}})
}

/// A text or a list of text blocks.
fn texts_schema() -> Value {
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": text_schema()}]})
}

/// A content block of this type with these fields, of which the first ones are required.
fn block_schema(kind: &str, required: usize, fields: &[(&str, Value)]) -> Value {
    let mut schema = json!({
        "type": "object",
        "properties": {"type": {"const": kind}},
        "required": ["type"],
        "additionalProperties": false,
    });
    for (place, (name, field)) in fields.iter().enumerate() {
        if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
            properties.insert((*name).to_owned(), field.clone());
        }
        if place < required
            && let Some(names) = schema.get_mut("required").and_then(Value::as_array_mut)
        {
            names.push(Value::from(*name));
        }
    }
    schema
}

fn text_schema() -> Value {
    let citations = json!({"type": ["array", "null"], "maxItems": 0});
    let text = json!({"type": "string"});
    let fields = [("text", text), ("cache_control", json!({})), ("citations", citations)];
    block_schema("text", 1, &fields)
}

fn call_schema() -> Value {
    let caller = json!({"type": "object", "properties": {"type": {"const": "direct"}},
                        "required": ["type"]});
    let fields = [
        ("id", json!({"type": "string"})),
        ("name", json!({"type": "string"})),
        ("input", json!({"type": "object"})),
        ("cache_control", json!({})),
        ("caller", json!({"anyOf": [caller, {"type": "null"}]})),
    ];
    block_schema("tool_use", 3, &fields)
}

fn result_schema() -> Value {
    let fields = [
        ("tool_use_id", json!({"type": "string"})),
        ("content", json!({"anyOf": [texts_schema(), {"type": "null"}]})),
        ("is_error", json!({"type": ["boolean", "null"]})),
        ("cache_control", json!({})),
    ];
    block_schema("tool_result", 1, &fields)
}

fn reasoning_schema() -> Value {
    let fields = [
        ("thinking", json!({"type": "string"})),
        ("signature", json!({"type": ["string", "null"]})),
    ];
    block_schema("thinking", 1, &fields)
}

fn tools_schema() -> Value {
    json!({"type": "array", "maxItems": MAX_TOOLS, "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["custom", null]},
            "name": name_schema(),
            "description": {"type": ["string", "null"]},
            "input_schema": {
                "type": "object",
                "description": "The JSON schema of the arguments.",
            },
            "strict": {"type": ["boolean", "null"]},
            "allowed_callers": {"type": ["array", "null"], "items": {"const": "direct"}},
            "defer_loading": {"enum": [false, null]},
            "cache_control": {},
            "eager_input_streaming": {},
        },
        "required": ["name", "input_schema"],
        "additionalProperties": false,
    }})
}

fn choice_schema() -> Value {
    let single = json!({"type": ["boolean", "null"]});
    json!({"anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "none"]},
                "disable_parallel_tool_use": single,
            },
            "required": ["type"],
            "additionalProperties": false,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool"},
                "name": {"type": "string"},
                "disable_parallel_tool_use": single,
            },
            "required": ["type", "name"],
            "additionalProperties": false,
        },
    ]})
}

fn thinking_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "type": {"enum": ["enabled", "disabled", "adaptive"]},
            "budget_tokens": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": MAX_TOKENS,
                "description": "Has no effect.",
            },
            "display": {"enum": ["summarized", null]},
        },
        "required": ["type"],
        "additionalProperties": false,
    })
}

fn output_schema() -> Value {
    let format = json!({
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        "required": ["type", "schema"],
        "additionalProperties": false,
    });
    json!({
        "type": "object",
        "properties": {
            "effort": {"anyOf": [{"enum": EFFORTS}, {"type": "null"}]},
            "format": {"anyOf": [format, {"type": "null"}]},
        },
        "additionalProperties": false,
    })
}

fn stop_schema() -> Value {
    json!({"type": "array", "items": stop_text_schema(), "maxItems": MAX_STOP})
}
