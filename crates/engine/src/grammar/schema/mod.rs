//! JSON schemas as the grammar library gets them.

mod combine;
mod disjoint;
mod formats;
mod pointer;
mod random;
mod rewrite;
mod values;

use serde_json::{Map, Value, json};

use self::rewrite::SchemaRewriter;
use super::error::GrammarError;

pub(super) use combine::{MAX_COMBINED, combined_schemas};
pub use random::random_schema;

/// Longest schema, in bytes of JSON.
const MAX_BYTES: usize = 128 << 10;

/// White space between the tokens of JSON: one space, or a line break with its indentation. A model
/// cannot write white space forever.
const WHITE_SPACE: &str = r"\x20|\r?\n[\x20\t]{0,64}";

/// The letters that may follow a backslash in a JSON string. Each text then has one spelling; with `u`, a name
/// that is spelled differently would not count as the property of that name.
const ESCAPES: &str = "nrbtf\\\"";

/// The schema of a JSON text for the grammar library.
///
/// # Errors
/// [`GrammarError::Schema`] with the place of a keyword that cannot be enforced, or
/// [`GrammarError::Refused`] if the text is not JSON or too long.
pub(super) fn prepared_text(text: &str) -> Result<Value, GrammarError> {
    if text.len() > MAX_BYTES {
        let reason = format!("the schema has {} bytes: it may have {MAX_BYTES}", text.len());
        return Err(GrammarError::Refused(reason));
    }
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| GrammarError::Refused(format!("the schema is not JSON: {error}")))?;
    prepared(&schema)
}

/// A schema for the grammar library.
///
/// # Errors
/// [`GrammarError::Schema`] with the place of a keyword that cannot be enforced.
fn prepared(schema: &Value) -> Result<Value, GrammarError> {
    combined_schemas(schema)?;
    SchemaRewriter::new(schema).document().map(with_options)
}

/// The schema of any JSON object, for the grammar library.
pub(super) fn any_object() -> Value {
    let any = json!({"$ref": "#/$defs/any"});
    let mut schema = Map::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("additionalProperties".to_owned(), any.clone());
    // Numbers without exponents, as in other schemas.
    let options = json!([
        {"type": ["null", "boolean", "string"]},
        {"type": "number", "minimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "array", "items": any},
        {"type": "object", "additionalProperties": any},
    ]);
    schema.insert("$defs".to_owned(), json!({"any": {"anyOf": options}}));
    with_options(schema)
}

fn with_options(mut schema: Map<String, Value>) -> Value {
    schema.insert(
        "x-guidance".to_owned(),
        json!({"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}),
    );
    Value::Object(schema)
}

#[cfg(test)]
mod tests;
