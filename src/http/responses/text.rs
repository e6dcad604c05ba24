//! Reads `text`: the format of a response's text.

use serde_json::{Value, json};

use hone_core::types::GrammarSpec;

use crate::http::body::{Fields, or_null};
use crate::http::chat::constraint::{NAME_CHARS, RequestedGrammar, json_schema, named_schema};
use crate::http::chat::tools::refuse_others;
use crate::http::error::ApiError;

/// The values of `text.verbosity`, which has no effect.
const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];

/// What constrains the text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TextFormat {
    pub(super) grammar: Option<RequestedGrammar>,
    /// The client's name of the JSON schema.
    pub(super) schema_name: Option<String>,
}

/// Reads `text`.
pub(super) fn read(fields: &Fields<'_>) -> Result<TextFormat, ApiError> {
    let Some(value) = fields.get("text") else { return Ok(TextFormat::default()) };
    let text = Fields::at("text", value)?;
    refuse_others(&text, &["format", "verbosity"])?;
    text.read("verbosity", "\"low\", \"medium\" or \"high\"", |value| {
        VERBOSITIES.contains(&value.as_str()?).then_some(())
    })?;
    match text.get("format") {
        Some(value) => format(&Fields::at("text.format", value)?),
        None => Ok(TextFormat::default()),
    }
}

fn format(format: &Fields<'_>) -> Result<TextFormat, ApiError> {
    const TYPES: &str = "\"text\", \"json_object\" or \"json_schema\"";
    let kind = format.text("type")?.ok_or_else(|| format.missing("type", TYPES))?;
    match kind {
        "text" => {
            refuse_others(format, &["type"])?;
            Ok(TextFormat::default())
        }
        "json_object" => {
            refuse_others(format, &["type"])?;
            let field = "text.format".to_owned();
            let grammar = Some(RequestedGrammar { spec: GrammarSpec::JsonObject, field });
            Ok(TextFormat { grammar, schema_name: None })
        }
        "json_schema" => {
            refuse_others(format, &["type", "name", "description", "schema", "strict"])?;
            let (name, grammar) = named_schema(format)?;
            Ok(TextFormat { grammar: Some(grammar), schema_name: Some(name.to_owned()) })
        }
        _ => Err(format.invalid("type", TYPES)),
    }
}

/// The JSON schema of `text`.
pub(super) fn schema() -> Value {
    let plain = json!({
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"],
        "additionalProperties": false,
    });
    let described = json!({
        "type": "object",
        "properties": {
            "type": {"const": "json_schema"},
            "name": {"type": "string", "maxLength": NAME_CHARS},
            "description": {"type": ["string", "null"]},
            "schema": json_schema(),
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["type", "name", "schema"],
        "additionalProperties": false,
    });
    json!({
        "type": "object",
        "properties": {
            "format": {"anyOf": [plain, described, {"type": "null"}]},
            "verbosity": or_null(json!({"enum": VERBOSITIES})),
        },
        "additionalProperties": false,
    })
}
