//! Checks a schema keyword by keyword and rewrites it for the grammar library.
//!
//! The library ignores keywords that it does not know, and reports others without their place. So every
//! keyword is handled here: enforced, dropped as an annotation, or refused with its path. The result
//! contains enforced keywords only. Some are rewritten so that the library enforces them exactly:
//!
//! - References may name any place of the document; the library gets each place as a definition.
//! - `oneOf` becomes `anyOf` if no value can satisfy two of its schemas.
//! - Numbers without bounds have no exponent, because `1e999` is no number in most programs.
//! - Dates and times become patterns; `.` in a pattern matches what it matches in ECMAScript.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::disjoint::overlapping;
use super::values::{self, member, resolve};
use crate::grammar::GrammarError;

/// Most schemas in a document, with those of its definitions.
const MAX_SCHEMAS: usize = 4096;
/// Most schemas that contain each other.
const MAX_DEPTH: usize = 64;
/// Most schemas of a `oneOf`.
const MAX_OPTIONS: usize = 256;

/// Keywords that constrain nothing.
const ANNOTATIONS: [&str; 16] = [
    "$anchor",
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];

/// Keywords of JSON Schema that no grammar here can enforce.
const UNSUPPORTED: [&str; 18] = [
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Keywords that list further schemas for the same value.
const APPLICATORS: [&str; 6] = ["$ref", "allOf", "anyOf", "oneOf", "const", "enum"];

type Rewritten = Result<Value, GrammarError>;

/// A document that is being rewritten.
pub(super) struct SchemaRewriter<'a> {
    root: &'a Value,
    /// The definition of each place that is referred to, by its pointer.
    names: BTreeMap<String, String>,
    /// Definitions that are still to be written: the name, the path and the schema.
    pending: Vec<(String, String, &'a Value)>,
    schemas: usize,
    /// The least common multiple of every `multipleOf`.
    multiple: u64,
}

impl<'a> SchemaRewriter<'a> {
    pub fn new(root: &'a Value) -> Self {
        Self { root, names: BTreeMap::new(), pending: Vec::new(), schemas: 0, multiple: 1 }
    }

    /// The rewritten document.
    pub fn document(mut self) -> Result<Map<String, Value>, GrammarError> {
        let mut top = match self.schema(self.root, "#", 0)? {
            Value::Object(map) => map,
            Value::Bool(true) => Map::new(),
            _ => return Err(GrammarError::schema("#", "the schema accepts no value")),
        };
        let mut definitions = Map::new();
        while let Some((name, path, schema)) = self.pending.pop() {
            let schema = self.schema(schema, &path, 0)?;
            definitions.insert(name, schema);
        }
        if !definitions.is_empty() {
            top.insert("$defs".to_owned(), Value::Object(definitions));
        }
        Ok(top)
    }

    fn schema(&mut self, schema: &'a Value, path: &str, depth: usize) -> Rewritten {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS {
            let reason = format!("the document has more than {MAX_SCHEMAS} schemas");
            return Err(GrammarError::schema(path, reason));
        }
        if depth > MAX_DEPTH {
            let reason = format!("more than {MAX_DEPTH} schemas contain each other");
            return Err(GrammarError::schema(path, reason));
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            _ => return Err(GrammarError::schema(path, "a schema is an object or a boolean")),
        };
        let mut out = RewrittenSchema::default();
        for (key, value) in map {
            let at = member(path, key);
            if !(annotates(key, value, path, &at)? || values::copy(key, value, &at, &mut out.map)?)
            {
                self.keyword(key, value, map, &at, depth, &mut out)?;
            }
        }
        values::check_property_counts(map, path)?;
        Ok(without_exponents(out.finish()))
    }

    /// Handles a keyword that contains or refers to schemas, or that is replaced.
    fn keyword(
        &mut self,
        key: &str,
        value: &'a Value,
        map: &'a Map<String, Value>,
        at: &str,
        depth: usize,
        out: &mut RewrittenSchema,
    ) -> Result<(), GrammarError> {
        let refuse = |reason: &str| Err(GrammarError::schema(at, reason));
        let is_tuple = map.get("items").is_some_and(Value::is_array);
        let rewritten = match key {
            "$ref" => self.reference(value, at)?,
            "items" if is_tuple => {
                out.set("prefixItems", self.list(value, at, depth)?.into());
                let Some(more) = map.get("additionalItems") else { return Ok(()) };
                self.schema(more, &format!("{}/additionalItems", parent(at)), depth + 1)?
            }
            "items" | "additionalProperties" => self.schema(value, at, depth + 1)?,
            "properties" => Value::Object(self.named(value, at, depth)?),
            "patternProperties" => {
                let schemas = self.named(value, at, depth)?;
                let patterns = schemas.into_iter().map(|(pattern, schema)| {
                    Ok((values::pattern(&pattern, &member(at, &pattern))?, schema))
                });
                Value::Object(patterns.collect::<Result<_, GrammarError>>()?)
            }
            "prefixItems" if is_tuple => return refuse("prefixItems excludes a list in items"),
            "prefixItems" | "anyOf" => self.list(value, at, depth)?.into(),
            "additionalItems" if is_tuple => return Ok(()),
            "additionalItems" => return refuse("additionalItems needs a list in items"),
            "allOf" => {
                out.all.extend(self.list(value, at, depth)?);
                return Ok(());
            }
            "oneOf" => {
                let options = self.one_of(value, at, depth)?;
                out.all.push(json!({ "anyOf": options }));
                return Ok(());
            }
            "pattern" => match value.as_str() {
                Some(text) => Value::String(values::pattern(text, at)?),
                None => return refuse("pattern must be a string"),
            },
            "format" => match value.as_str().filter(|name| FORMATS.contains(name)) {
                Some(name) => match format_pattern(name) {
                    Some(pattern) => {
                        out.all.push(json!({ "pattern": pattern }));
                        return Ok(());
                    }
                    None => value.clone(),
                },
                None => {
                    let known = FORMATS.join(", ");
                    return refuse(&format!("format is {value}: it must be one of {known}"));
                }
            },
            "multipleOf" => self.multiple_of(value, at)?,
            _ if UNSUPPORTED.contains(&key) => return refuse(&format!("{key} is not supported")),
            _ => return refuse(&format!("{key} is not a known keyword")),
        };
        out.set(key, rewritten);
        Ok(())
    }

    /// A reference to a definition of the result, or to the whole document.
    fn reference(&mut self, value: &Value, at: &str) -> Rewritten {
        let found = value.as_str().and_then(|reference| resolve(self.root, reference));
        let Some((pointer, target)) = found else {
            let reason = format!("$ref is {value}: it must name a place of this document");
            return Err(GrammarError::schema(at, reason));
        };
        if pointer.is_empty() {
            return Ok(json!("#"));
        }
        let next = self.names.len();
        let name = self.names.entry(pointer.clone()).or_insert_with(|| {
            let name = format!("d{next}");
            self.pending.push((name.clone(), format!("#{pointer}"), target));
            name
        });
        Ok(json!(format!("#/$defs/{name}")))
    }

    /// Schemas by name.
    fn named(
        &mut self,
        value: &'a Value,
        at: &str,
        depth: usize,
    ) -> Result<Map<String, Value>, GrammarError> {
        let Value::Object(schemas) = value else {
            return Err(GrammarError::schema(at, "an object of schemas was expected"));
        };
        let rewritten = schemas.iter().map(|(name, schema)| {
            values::text_can_be_written(name, at)?;
            Ok((name.clone(), self.schema(schema, &member(at, name), depth + 1)?))
        });
        rewritten.collect()
    }

    /// A list of at least one schema.
    fn list(
        &mut self,
        value: &'a Value,
        at: &str,
        depth: usize,
    ) -> Result<Vec<Value>, GrammarError> {
        let schemas = value.as_array().filter(|schemas| !schemas.is_empty());
        let Some(schemas) = schemas else {
            return Err(GrammarError::schema(at, "a list of at least one schema was expected"));
        };
        let numbered = schemas.iter().enumerate();
        numbered.map(|(i, schema)| self.schema(schema, &format!("{at}/{i}"), depth + 1)).collect()
    }

    /// The options of a `oneOf` of which each value satisfies at most one.
    fn one_of(
        &mut self,
        value: &'a Value,
        at: &str,
        depth: usize,
    ) -> Result<Vec<Value>, GrammarError> {
        if let Value::Array(options) = value {
            if options.len() > MAX_OPTIONS {
                let reason = format!("oneOf has more than {MAX_OPTIONS} schemas");
                return Err(GrammarError::schema(at, reason));
            }
            if let Some((first, second)) = overlapping(self.root, options) {
                let reason = format!(
                    "oneOf is supported if its schemas differ in their type, in their values or in \
                     those of a required property, but schemas {first} and {second} may accept the \
                     same value; use anyOf"
                );
                return Err(GrammarError::schema(at, reason));
            }
        }
        self.list(value, at, depth)
    }

    fn multiple_of(&mut self, value: &Value, at: &str) -> Rewritten {
        let divisor = values::divisor(value, at)?;
        let (mut a, mut b) = (self.multiple, divisor);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        let multiple = self.multiple.checked_mul(divisor / a);
        match multiple.filter(|multiple| u32::try_from(*multiple).is_ok()) {
            Some(multiple) => self.multiple = multiple,
            None => {
                let reason = "the least common multiple of every multipleOf is too large";
                return Err(GrammarError::schema(at, reason));
            }
        }
        Ok(value.clone())
    }
}

/// A schema of the result.
#[derive(Default)]
struct RewrittenSchema {
    map: Map<String, Value>,
    /// Schemas that the value must satisfy too.
    all: Vec<Value>,
}

impl RewrittenSchema {
    fn set(&mut self, key: &str, value: Value) {
        self.map.insert(key.to_owned(), value);
    }

    fn finish(mut self) -> Map<String, Value> {
        if !self.all.is_empty() {
            self.map.insert("allOf".to_owned(), Value::Array(self.all));
        }
        self.map
    }
}

/// The path without its last name.
fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(parent, _)| parent)
}

/// Whether a keyword constrains nothing. `path` is that of its schema.
fn annotates(key: &str, value: &Value, path: &str, at: &str) -> Result<bool, GrammarError> {
    match key {
        // Definitions are read where something refers to them.
        "$defs" | "definitions" => Ok(true),
        "$schema" if values::is_draft(value) => Ok(true),
        "$schema" => {
            Err(GrammarError::schema(at, format!("$schema is {value}: it is not a known draft")))
        }
        // Below the top it would change which document references belong to.
        "$id" | "id" if path == "#" => Ok(true),
        "uniqueItems" | "nullable" if *value == Value::Bool(false) => Ok(true),
        "uniqueItems" | "nullable" | "$id" | "id" => {
            Err(GrammarError::schema(at, format!("{key} is not supported")))
        }
        _ => Ok(ANNOTATIONS.contains(&key) || key.starts_with("x-")),
    }
}

/// Replaces a number without bounds, which the library would permit to have an exponent, by those at
/// least 0 or at most 0.
fn without_exponents(mut map: Map<String, Value>) -> Value {
    let is_bounded = values::NUMBER_KEYWORDS.iter().any(|key| map.contains_key(*key));
    let applies = APPLICATORS.iter().any(|key| map.contains_key(*key));
    if is_bounded || applies {
        return Value::Object(map);
    }
    let halves = [json!({"type": "number", "minimum": 0}), json!({"type": "number", "maximum": 0})];
    match map.get("type") {
        Some(Value::String(name)) if name == "number" => json!({ "anyOf": halves }),
        Some(Value::Array(names)) if names.iter().any(|name| name == "number") => {
            let others: Vec<Value> =
                names.iter().filter(|name| *name != "number").cloned().collect();
            map.insert("type".to_owned(), Value::Array(others.clone()));
            let mut options = halves.to_vec();
            if !others.is_empty() {
                options.push(Value::Object(map));
            }
            json!({ "anyOf": options })
        }
        _ => Value::Object(map),
    }
}

// The formats of strings that can be enforced.

/// Years 0001 to 9999, which the date types of common languages hold.
const YEAR: &str = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})";
/// The last two digits of a leap year, and the first two digits of a century with a leap year.
const FOURTH: &str = "(?:0[48]|[2468][048]|[13579][26])";
/// Times without leap seconds, which the time types of common languages refuse.
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// The names of all supported formats.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// The pattern that replaces a format.
///
/// The grammar library accepts February 29 in every year, leap seconds and lower-case letters in times,
/// so these formats are replaced by stricter patterns. Of others the library's own definition is used.
fn format_pattern(name: &str) -> Option<String> {
    match name {
        "date" => Some(format!("^{}$", date())),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{}T{TIME}$", date())),
        _ => None,
    }
}

fn date() -> String {
    format!(
        "(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
    )
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    fn matches(name: &str, text: &str) -> bool {
        Regex::new(&format_pattern(name).unwrap()).unwrap().is_match(text)
    }

    #[test]
    fn dates_exist() {
        for date in ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31", "0001-01-01"] {
            assert!(matches("date", date), "{date}");
        }
        for date in
            ["2023-02-29", "1900-02-29", "0000-02-29", "2023-04-31", "2023-13-01", "0000-01-01"]
        {
            assert!(!matches("date", date), "{date}");
        }
        // chrono's calendar agrees for every day of 401 years.
        for year in 1800..2201 {
            for (month, day) in [(2, 28), (2, 29), (2, 30), (6, 30), (6, 31)] {
                let exists = chrono::NaiveDate::from_ymd_opt(year, month, day).is_some();
                let text = format!("{year:04}-{month:02}-{day:02}");
                assert_eq!(matches("date", &text), exists, "{text}");
            }
        }
        assert!(matches("date-time", "2024-02-29T23:59:59.125Z"));
        assert!(matches("time", "00:00:00+01:30") && !matches("time", "23:59:60Z"));
    }
}
