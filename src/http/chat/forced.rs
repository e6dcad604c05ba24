//! The grammar of an answer that must call a function.

use serde_json::{Map, Value, json};

use hone_core::types::{ChatOptions, TokenId, Tool, ToolChoice};
use hone_engine::grammar::{CallGrammar, CallPiece, FreeText};
use hone_engine::tools::CallFraming;
use hone_engine::{Codec, GrammarError, ToolFormat};

use super::constraint::RequestedGrammar;
use crate::http::error::ApiError;

/// The grammar that a choice of functions forces: exactly one call of one of them, in the model's format.
/// `None` if the model decides.
///
/// # Errors
/// 400 with the place of the keyword in the parameters of a strict function that cannot be enforced.
/// Other functions with such parameters have any object as arguments. `parameters_field` is the place of
/// the parameters within an entry of `tools`.
pub(super) fn read(
    codec: &Codec,
    format: ToolFormat,
    options: &ChatOptions,
    parameters_field: &str,
) -> Result<Option<RequestedGrammar>, ApiError> {
    let name = match &options.tool_choice {
        ToolChoice::None | ToolChoice::Auto => return Ok(None),
        ToolChoice::Required => None,
        ToolChoice::Function(name) => Some(name),
    };
    let framing = format.framing();
    let mut calls = Vec::new();
    for (index, tool) in options.tools.iter().enumerate() {
        if name.is_some_and(|name| *name != tool.name) {
            continue;
        }
        let call = pieces(codec, &framing, tool, parameters(tool));
        calls.push(match grammar(vec![call.clone()]).spec() {
            Ok(_) => call,
            Err(GrammarError::Schema { .. }) if !tool.strict => {
                pieces(codec, &framing, tool, json!({"type": "object"}))
            }
            Err(error) => {
                let path = format!("tools[{index}].{parameters_field}");
                return Err(ApiError::field(&path, format!("{path}: {error}")));
            }
        });
    }
    let spec = grammar(calls).spec();
    let refused = |error| ApiError::field("tool_choice", format!("tool_choice: {error}"));
    Ok(Some(RequestedGrammar { spec: spec.map_err(refused)?, field: "tool_choice".to_owned() }))
}

fn grammar(calls: Vec<Vec<CallPiece>>) -> CallGrammar {
    CallGrammar { trigger: None, calls, separator: None, text: FreeText::Never }
}

/// The schema of a function's arguments, which are always an object.
fn parameters(tool: &Tool) -> Value {
    match &tool.parameters {
        Some(Value::Object(schema)) => {
            let mut schema: Map<String, Value> = schema.clone();
            schema.entry("type").or_insert_with(|| Value::from("object"));
            Value::Object(schema)
        }
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// A call, with the schema of its arguments as a document of its own, so that its references are found.
fn pieces(codec: &Codec, framing: &CallFraming, tool: &Tool, schema: Value) -> Vec<CallPiece> {
    let (name, key) = (Value::from(tool.name.as_str()), Value::from(framing.arguments));
    let mut pieces = Vec::new();
    add_text(&mut pieces, codec, framing, framing.open);
    pieces.push(CallPiece::Text(format!("{{\"name\": {name}, {key}: ")));
    pieces.push(CallPiece::Json(schema));
    pieces.push(CallPiece::Text("}".to_owned()));
    add_text(&mut pieces, codec, framing, framing.close);
    pieces
}

/// Adds a text in which markers may be special tokens.
fn add_text(pieces: &mut Vec<CallPiece>, codec: &Codec, framing: &CallFraming, text: &str) {
    let mut rest = text;
    while let Some((before, id, after)) = first_token(codec, framing, rest) {
        add(pieces, before);
        pieces.push(CallPiece::Token(id));
        rest = after;
    }
    add(pieces, rest);
}

fn add(pieces: &mut Vec<CallPiece>, text: &str) {
    if !text.is_empty() {
        pieces.push(CallPiece::Text(text.to_owned()));
    }
}

/// The first marker in a text that is a special token, with the texts around it.
fn first_token<'t>(
    codec: &Codec,
    framing: &CallFraming,
    text: &'t str,
) -> Option<(&'t str, TokenId, &'t str)> {
    let split = |marker: &&str| {
        let (before, after) = text.split_once(*marker)?;
        Some((before, codec.special_id(marker)?, after))
    };
    framing.markers.iter().filter_map(split).min_by_key(|(before, ..)| before.len())
}
