//! JSON schemas as the grammar library gets them.

mod disjoint;
mod rewrite;
mod values;

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::{Map, Value, json};

use self::rewrite::SchemaRewriter;
use crate::grammar::GrammarError;
use values::{member, resolve};

/// Longest schema, in bytes of JSON.
const MAX_BYTES: usize = 128 << 10;

/// White space between the tokens of JSON: one space, or a line break with its indentation. A model
/// cannot write white space forever.
const WHITE_SPACE: &str = r"\x20|\r?\n[\x20\t]{0,64}";

/// The letters that may follow a backslash in a JSON string. Each text then has one spelling; with `u`, a name
/// that is spelled differently would not count as the property of that name.
const ESCAPES: &str = "nrbtf\\\"";

/// The schema of a JSON text for the grammar library.
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
fn prepared(schema: &Value) -> Result<Value, GrammarError> {
    combined_schemas(schema)?;
    SchemaRewriter::new(schema).document().map(with_options)
}

/// The schema of any JSON object, for the grammar library.
pub(super) fn any_object() -> Result<Value, GrammarError> {
    let any = json!({"$ref": "#/$defs/any"});
    let options = json!([
        {"type": ["null", "boolean", "string", "number"]},
        {"type": "array", "items": any},
        {"type": "object", "additionalProperties": any},
    ]);
    let definitions = json!({"any": {"anyOf": options}});
    prepared(&json!({"type": "object", "additionalProperties": any, "$defs": definitions}))
}

fn with_options(mut schema: Map<String, Value>) -> Value {
    schema.insert(
        "x-guidance".to_owned(),
        json!({"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}),
    );
    Value::Object(schema)
}

// Bounds the schemas that the library combines.
//
// For `allOf`, and for keywords beside a reference or beside options, the library copies the schemas and
// what they refer to. A document of 2 kB whose definitions name each other twice would grow to gigabytes.
// The time for the intersection of patterns grows exponentially with their number.

/// Most schemas that are combined for one grammar, each as often as it is copied. That many take a tenth of
/// a second and some 10 MB.
pub(in crate::grammar) const MAX_COMBINED: usize = 20_000;
/// Most patterns and formats that one text must satisfy. Of eight, none took more than 0.1 s.
const MAX_PATTERNS: usize = 8;

/// What a schema adds to the schema that it is combined with.
#[derive(Clone, Copy, Default)]
struct SchemaWeight {
    /// The schemas in it and in what it refers to.
    schemas: usize,
    /// The patterns that one text in it must satisfy.
    patterns: usize,
}

/// The weight of each schema, by its address. One that is still being counted weighs nothing, so that recursive
/// schemas end.
type KnownWeights = HashMap<*const Value, SchemaWeight>;

/// The number of schemas that are combined in a document. It needs little stack, because references form chains
/// of any length.
pub(in crate::grammar) fn combined_schemas(root: &Value) -> Result<usize, GrammarError> {
    let (mut known, mut total) = (KnownWeights::new(), 0_usize);
    // Schemas whose parts, if true, are counted.
    let mut pending = vec![("#".to_owned(), root, false)];
    while let Some((path, schema, parts_are_known)) = pending.pop() {
        let Value::Object(map) = schema else { continue };
        if parts_are_known {
            let weight = weigh(root, map, &path, &known);
            if combines(map) {
                total = total.saturating_add(weight.schemas);
            }
            let reason = if total > MAX_COMBINED {
                format!(
                    "allOf, and keywords beside $ref or anyOf, combine more than {MAX_COMBINED} schemas"
                )
            } else if weight.patterns > MAX_PATTERNS {
                let patterns = weight.patterns;
                format!(
                    "one text must satisfy {patterns} patterns: at most {MAX_PATTERNS} are possible"
                )
            } else {
                known.insert(schema, weight);
                continue;
            };
            return Err(GrammarError::schema(&path, reason));
        }
        if let Entry::Vacant(place) = known.entry(schema) {
            place.insert(SchemaWeight::default());
            let parts =
                parts(root, map, &path).into_iter().map(|(_, path, part)| (path, part, false));
            let parts: Vec<_> = parts.collect();
            pending.push((path, schema, true));
            pending.extend(parts);
        }
    }
    Ok(total)
}

/// The schemas in a schema, each with its keyword and path.
fn parts<'a>(
    root: &'a Value,
    map: &'a Map<String, Value>,
    path: &str,
) -> Vec<(&'a str, String, &'a Value)> {
    let mut parts = Vec::new();
    for (key, value) in map {
        let (key, at) = (key.as_str(), member(path, key));
        match (key, value) {
            ("$ref", Value::String(reference)) => {
                let target = resolve(root, reference);
                parts.extend(target.map(|(pointer, part)| (key, format!("#{pointer}"), part)));
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(list)) => {
                let numbered = list.iter().enumerate();
                parts.extend(numbered.map(|(i, part)| (key, format!("{at}/{i}"), part)));
            }
            ("properties" | "patternProperties", Value::Object(named)) => {
                parts.extend(named.iter().map(|(name, part)| (key, member(&at, name), part)));
            }
            ("items" | "additionalItems" | "additionalProperties", part) => {
                parts.push((key, at, part));
            }
            _ => {}
        }
    }
    parts
}

fn weigh(root: &Value, map: &Map<String, Value>, path: &str, known: &KnownWeights) -> SchemaWeight {
    let has = |key: &&&str| map.contains_key(**key);
    let own = ["pattern", "format"].iter().filter(has).count();
    // Patterns of the text itself, of options for it, and of texts within the value.
    let (mut schemas, mut all, mut option, mut inner) = (1_usize, own, 0, 0);
    for (key, _, part) in parts(root, map, path) {
        let weight = known.get(&std::ptr::from_ref(part)).copied().unwrap_or_default();
        schemas = schemas.saturating_add(weight.schemas);
        match key {
            "allOf" | "$ref" => all = all.saturating_add(weight.patterns),
            "anyOf" | "oneOf" => option = weight.patterns.max(option),
            _ => inner = weight.patterns.max(inner),
        }
    }
    SchemaWeight { schemas, patterns: all.saturating_add(option).max(inner) }
}

/// Whether the library combines schemas of this one.
fn combines(map: &Map<String, Value>) -> bool {
    let has = |key: &str| map.contains_key(key);
    let applied = ["$ref", "anyOf", "oneOf"].iter().filter(|key| has(key)).count();
    let others = ["type", "properties", "additionalProperties", "items", "prefixItems", "pattern"];
    has("allOf")
        || applied > 1
        || (applied == 1 && others.iter().any(|key| has(key)))
        || (has("properties") && has("patternProperties"))
}

#[cfg(test)]
mod tests;
