//! The values of keywords that contain no schema, and places in a schema.

use std::collections::BTreeSet;

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};

use crate::grammar::GrammarError;

/// The types of JSON Schema.
const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];
/// The drafts of JSON Schema.
const DRAFTS: [&str; 5] = [
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];
/// Largest magnitude of an integer that every JSON reader represents exactly, 2^53.
const MAX_INTEGER: u64 = 1 << 53;
/// Most characters of a number without exponent.
const MAX_DIGITS: usize = 32;
/// Largest length of a string.
const MAX_LENGTH: u64 = 100_000;
/// Largest number of items or properties.
const MAX_ITEMS: u64 = 30_000;
/// Most values of an `enum`.
const MAX_VALUES: usize = 2000;
/// Longest pattern, in bytes.
const MAX_PATTERN: usize = 2000;
/// Most bytes of a compiled pattern.
const MAX_COMPILED_PATTERN: usize = 1 << 20;
/// Largest divisor of `multipleOf`.
const MAX_DIVISOR: u64 = 1_000_000;

/// The keywords that bound a number.
pub(super) const NUMBER_KEYWORDS: [&str; 5] =
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// Whether `$schema` names a draft.
pub(super) fn is_draft(value: &Value) -> bool {
    value.as_str().is_some_and(|name| DRAFTS.contains(&name.trim_end_matches('#')))
}

/// Checks a keyword that is enforced as it is, and copies it. Returns false for any other keyword.
pub(super) fn copy(
    key: &str,
    value: &Value,
    at: &str,
    map: &mut Map<String, Value>,
) -> Result<bool, GrammarError> {
    match key {
        "type" => types(value, at)?,
        "const" => literal(value, at)?,
        "enum" => {
            let values = value.as_array().filter(|v| !v.is_empty() && v.len() <= MAX_VALUES);
            let Some(values) = values else {
                let reason = format!("enum must be a list of 1 to {MAX_VALUES} values");
                return Err(GrammarError::schema(at, reason));
            };
            values.iter().try_for_each(|value| literal(value, at))?;
        }
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => number(value, at)?,
        "minLength" | "maxLength" => count(value, at, MAX_LENGTH)?,
        "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
            count(value, at, MAX_ITEMS)?;
        }
        "required" => {
            let names = value.as_array().filter(|names| names.iter().all(Value::is_string));
            let Some(names) = names else {
                return Err(GrammarError::schema(at, "required must be a list of strings"));
            };
            names.iter().try_for_each(|name| literal(name, at))?;
        }
        _ => return Ok(false),
    }
    map.insert(key.to_owned(), value.clone());
    Ok(true)
}

fn types(value: &Value, at: &str) -> Result<(), GrammarError> {
    let known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let valid = match value {
        Value::Array(names) => !names.is_empty() && names.iter().all(known),
        single => known(single),
    };
    if valid {
        return Ok(());
    }
    let reason = format!("type is {value}: it must be one or several of {}", TYPES.join(", "));
    Err(GrammarError::schema(at, reason))
}

/// Checks the numbers and texts in a literal value.
fn literal(value: &Value, at: &str) -> Result<(), GrammarError> {
    match value {
        Value::Number(_) => number(value, at),
        Value::String(text) => text_can_be_written(text, at),
        Value::Array(items) => items.iter().try_for_each(|item| literal(item, at)),
        Value::Object(map) => map.iter().try_for_each(|(name, item)| {
            text_can_be_written(name, at)?;
            literal(item, at)
        }),
        _ => Ok(()),
    }
}

/// Refuses control characters that JSON can only write as `\u` and digits: grammars permit no such escape,
/// because each text must have one spelling.
pub(super) fn text_can_be_written(text: &str, at: &str) -> Result<(), GrammarError> {
    match text.chars().find(|c| *c < ' ' && !"\u{8}\t\n\u{c}\r".contains(*c)) {
        Some(c) => {
            let reason =
                format!("{text:?} contains the control character {c:?}, which is not supported");
            Err(GrammarError::schema(at, reason))
        }
        None => Ok(()),
    }
}

fn number(value: &Value, at: &str) -> Result<(), GrammarError> {
    // An integer above 2^53 may be read as 2^53.
    let whole = value.as_i64().map(i64::unsigned_abs).or(value.as_u64());
    let fits = |number: &f64| match whole {
        Some(whole) => whole <= MAX_INTEGER,
        None => {
            number.abs() < MAX_INTEGER as f64
                && number.to_string().trim_start_matches('-').len() <= MAX_DIGITS
        }
    };
    if value.as_f64().is_some_and(|number| fits(&number)) {
        return Ok(());
    }
    let reason = format!(
        "{value} must be a number of at most {MAX_DIGITS} characters between -2^53 and 2^53"
    );
    Err(GrammarError::schema(at, reason))
}

fn count(value: &Value, at: &str, most: u64) -> Result<(), GrammarError> {
    if value.as_u64().is_some_and(|count| count <= most) {
        return Ok(());
    }
    Err(GrammarError::schema(at, format!("{value} must be a whole number from 0 to {most}")))
}

/// The divisor of a `multipleOf`.
pub(super) fn divisor(value: &Value, at: &str) -> Result<u64, GrammarError> {
    let whole = value.as_u64().filter(|divisor| (1..=MAX_DIVISOR).contains(divisor));
    whole.ok_or_else(|| {
        let reason =
            format!("multipleOf is {value}: it must be a whole number from 1 to {MAX_DIVISOR}");
        GrammarError::schema(at, reason)
    })
}

/// A pattern for the grammar library, whose `.` matches line breaks other than `\n`.
pub(super) fn pattern(text: &str, at: &str) -> Result<String, GrammarError> {
    let refuse = |reason: String| Err(GrammarError::schema(at, reason));
    if text.len() > MAX_PATTERN {
        return refuse(format!("the pattern is longer than {MAX_PATTERN} bytes"));
    }
    // The library would hide what this group matches.
    if text.contains("(?P<stop>") || text.contains("(?<stop>") {
        return refuse("a group of a pattern must not be named stop".to_owned());
    }
    let compiled = regex::RegexBuilder::new(text).size_limit(MAX_COMPILED_PATTERN).build();
    if let Err(error) = compiled {
        return refuse(format!("the pattern {text:?} is not supported: {error}"));
    }
    let (mut out, mut escaped, mut in_class) = (String::with_capacity(text.len()), false, false);
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '.' if !in_class => {
                out.push_str(r"[^\n\r\u2028\u2029]");
                continue;
            }
            _ => {}
        }
        out.push(c);
    }
    Ok(out)
}

/// Checks the numbers of properties, which the library can enforce in some cases only.
pub(super) fn check_property_counts(
    map: &Map<String, Value>,
    path: &str,
) -> Result<(), GrammarError> {
    let names = map.get("required").and_then(Value::as_array);
    let required: BTreeSet<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
    let beyond = |key: &str| {
        let count = map.get(key)?.as_u64()?;
        Some(count.saturating_sub(required.len() as u64))
    };
    let (least, most) = (beyond("minProperties").unwrap_or(0), beyond("maxProperties"));
    if least == 0 && most.is_none() {
        return Ok(());
    }
    let key = if map.contains_key("minProperties") { "minProperties" } else { "maxProperties" };
    let refuse =
        |reason: &str| Err(GrammarError::schema(&format!("{path}/{key}"), reason.to_owned()));
    let has_patterns = map.get("patternProperties").is_some_and(|value| *value != json!({}));
    let is_open = map.get("additionalProperties") != Some(&Value::Bool(false)) || has_patterns;
    let listed = map.get("properties").and_then(Value::as_object);
    let optional =
        listed.is_some_and(|listed| listed.keys().any(|name| !required.contains(name.as_str())));
    let one_of_several = least <= 1 && most.unwrap_or(1) == 1 && !is_open;
    if optional && !one_of_several {
        return refuse(
            "minProperties and maxProperties are supported if every listed property is required, or \
             to require one of several optional properties without additional ones",
        );
    }
    // Names of additional properties may repeat, and a reader of JSON keeps one of equal names.
    if !optional && least > 1 && is_open {
        return refuse("minProperties may require at most one property that is not in required");
    }
    Ok(())
}

// References within a schema, and names of places in it.

/// The JSON pointer that a reference within the document names, and the value there; `None` for a
/// reference to another document, to an anchor or to a place that does not exist.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<(String, &'a Value)> {
    let pointer = percent_decode_str(reference.strip_prefix('#')?).decode_utf8().ok()?;
    let value = root.pointer(&pointer)?;
    Some((pointer.into_owned(), value))
}

/// The path of a member of the value at `path`.
pub(super) fn member(path: &str, name: &str) -> String {
    format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_are_decoded() {
        let root = json!({"$defs": {"a/b": 1, "c d": [true, {"~": 2}]}});
        let found = |reference: &str| resolve(&root, reference).map(|(_, value)| value.clone());
        assert_eq!(found("#"), Some(root.clone()));
        assert_eq!(found("#/$defs/a~1b"), Some(json!(1)));
        assert_eq!(found("#/%24defs/c%20d/1/~0"), Some(json!(2)));
        for wrong in ["", "#/$defs/x", "#name", "other.json#/a", "#/%2", "#/%zz", "#/%ff"] {
            assert_eq!(found(wrong), None, "{wrong}");
        }
        assert_eq!(member("#/a", "b/~"), "#/a/b~1~0");
    }
}
