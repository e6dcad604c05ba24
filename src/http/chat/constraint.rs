//! What constrains the text of a chat request: `response_format`, and vLLM's `guided_*` and
//! `structured_outputs`.

use serde_json::{Map, Value, json};

use hone_core::types::GrammarSpec;

use super::tools::refuse_others;
use crate::http::body::{Fields, or_null};
use crate::http::error::ApiError;

/// vLLM's older fields, each with the grammar that it describes.
const GUIDED: [(&str, Described); 4] = [
    ("guided_json", Described::Schema),
    ("guided_regex", Described::Regex),
    ("guided_choice", Described::Choice),
    ("guided_grammar", Described::Lark),
];
/// The members of `structured_outputs` that describe a grammar.
const STRUCTURED: [(&str, Described); 5] = [
    ("json", Described::Schema),
    ("regex", Described::Regex),
    ("choice", Described::Choice),
    ("grammar", Described::Lark),
    ("json_object", Described::AnyObject),
];
/// Members of `structured_outputs` of which only the default is supported.
const OPTIONS: [&str; 5] = [
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "structural_tag",
    "whitespace_pattern",
];
/// OpenAI's limit of the name of a schema, in characters.
pub(in crate::http) const NAME_CHARS: usize = 64;

/// How a field describes a grammar.
#[derive(Clone, Copy)]
enum Described {
    Schema,
    Regex,
    Choice,
    Lark,
    AnyObject,
}

/// The grammar of a request and the field that describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestedGrammar {
    pub spec: GrammarSpec,
    /// The path of the field, for error messages.
    pub field: String,
}

/// The grammar of a request; `None` if the text is free.
///
/// # Errors
/// 400 for a malformed field, or if several fields describe a grammar.
pub(super) fn read(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    let mut found = Vec::new();
    found.extend(response_format(fields)?);
    for (name, described) in GUIDED {
        found.extend(grammar(fields, name, described)?);
    }
    if let Some(value) = fields.get("structured_outputs") {
        found.extend(structured_outputs(value)?);
    }
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (first, None) => Ok(first),
        (first, Some(second)) => {
            let first = first.map(|first| first.field).unwrap_or_default();
            let message = format!(
                "{} and {first} both constrain the text: at most one field may",
                second.field
            );
            Err(ApiError::field(&second.field, message))
        }
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    const TYPES: &str = "\"text\", \"json_object\" or \"json_schema\"";
    let Some(value) = fields.get("response_format") else { return Ok(None) };
    let format = Fields::at("response_format", value)?;
    match format.text("type")? {
        None => Err(format.missing("type", TYPES)),
        Some("text") => Ok(None),
        Some("json_object") => {
            let field = "response_format".to_owned();
            Ok(Some(RequestedGrammar { spec: GrammarSpec::JsonObject, field }))
        }
        Some("json_schema") => {
            let allowed = "an object with a name and a schema";
            let Some(value) = format.get("json_schema") else {
                return Err(format.missing("json_schema", allowed));
            };
            let schema = Fields::at("response_format.json_schema", value)?;
            refuse_others(&schema, &["name", "description", "schema", "strict"])?;
            Ok(Some(named_schema(&schema)?.1))
        }
        Some(_) => Err(format.invalid("type", TYPES)),
    }
}

/// Reads `name`, `description`, `schema` and `strict`; returns the name and the grammar.
pub(in crate::http) fn named_schema<'a>(
    fields: &Fields<'a>,
) -> Result<(&'a str, RequestedGrammar), ApiError> {
    let name = fields.short_text("name", NAME_CHARS)?;
    let name = name.ok_or_else(|| fields.missing("name", "a string"))?;
    fields.text("description")?;
    // Every schema is enforced strictly.
    fields.boolean("strict")?;
    let grammar = grammar(fields, "schema", Described::Schema)?;
    Ok((name, grammar.ok_or_else(|| fields.missing("schema", "a JSON schema"))?))
}

fn structured_outputs(value: &Value) -> Result<Option<RequestedGrammar>, ApiError> {
    let fields = Fields::at("structured_outputs", value)?;
    let mut found = Vec::new();
    for name in fields.names() {
        if let Some((name, described)) = STRUCTURED.iter().find(|(known, _)| *known == name) {
            found.extend(grammar(&fields, name, *described)?);
        } else {
            let path = fields.path(name);
            let is_default =
                OPTIONS.contains(&name) && fields.get(name) == Some(&Value::Bool(false));
            if !is_default {
                return Err(ApiError::unsupported(&path, format!("{path} is not supported")));
            }
        }
    }
    if found.len() > 1 {
        let message = "structured_outputs has several grammars: it may have one";
        return Err(ApiError::field("structured_outputs", message));
    }
    Ok(found.pop())
}

/// The grammar that a field describes; `None` without the field.
fn grammar(
    fields: &Fields<'_>,
    name: &str,
    described: Described,
) -> Result<Option<RequestedGrammar>, ApiError> {
    let spec = match described {
        Described::Schema => fields.read(name, "a JSON schema, as an object or as text", schema)?,
        Described::Regex => fields.text(name)?.map(|regex| GrammarSpec::Regex(regex.to_owned())),
        Described::Lark => fields.text(name)?.map(|text| GrammarSpec::Lark(text.to_owned())),
        Described::Choice => fields.read(name, "a list of strings", choice)?,
        Described::AnyObject => {
            fields.boolean(name)?.filter(|wanted| *wanted).map(|_| GrammarSpec::JsonObject)
        }
    };
    Ok(spec.map(|spec| RequestedGrammar { spec, field: fields.path(name) }))
}

fn schema(value: &Value) -> Option<GrammarSpec> {
    match value {
        Value::Object(_) | Value::Bool(_) => Some(GrammarSpec::JsonSchema(value.to_string())),
        Value::String(text) => Some(GrammarSpec::JsonSchema(text.clone())),
        _ => None,
    }
}

fn choice(value: &Value) -> Option<GrammarSpec> {
    let texts = value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned));
    texts.collect::<Option<Vec<String>>>().map(GrammarSpec::Choice)
}

/// The JSON schema of `response_format`.
pub(super) fn format_schema() -> Value {
    let described = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": NAME_CHARS},
            "description": {"type": ["string", "null"]},
            "schema": json_schema(),
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["name", "schema"],
        "additionalProperties": false,
    });
    json!({"anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": described},
            "required": ["type", "json_schema"],
        },
    ]})
}

/// The JSON schema of a JSON schema: an object, or its text.
pub(in crate::http) fn json_schema() -> Value {
    json!({"type": ["object", "boolean", "string"]})
}

/// The JSON schema of `guided_choice`.
pub(super) fn choice_schema() -> Value {
    json!({"type": "array", "items": {"type": "string"}, "minItems": 1})
}

/// The JSON schema of `structured_outputs`.
pub(super) fn outputs_schema() -> Value {
    let grammars = STRUCTURED.iter().map(|(name, described)| {
        let schema = match described {
            Described::Schema => json_schema(),
            Described::Regex | Described::Lark => json!({"type": "string"}),
            Described::Choice => choice_schema(),
            Described::AnyObject => json!({"type": "boolean"}),
        };
        (*name, or_null(schema))
    });
    let options = OPTIONS.iter().map(|name| (*name, json!({"enum": [false, null]})));
    let properties: Map<String, Value> =
        grammars.chain(options).map(|(name, schema)| (name.to_owned(), schema)).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: Value) -> Result<Option<RequestedGrammar>, ApiError> {
        read(&Fields::new(body.as_object().unwrap()))
    }

    fn requested(spec: GrammarSpec, field: &str) -> Option<RequestedGrammar> {
        Some(RequestedGrammar { spec, field: field.to_owned() })
    }

    #[test]
    fn each_field_describes_its_grammar() {
        let schema = || GrammarSpec::JsonSchema("{\"type\":\"null\"}".to_owned());
        let format = json!({"type": "json_schema", "json_schema": {
            "name": "n", "strict": true, "schema": {"type": "null"},
        }});
        let choices = || GrammarSpec::Choice(vec!["a".to_owned(), "b".to_owned()]);
        for (body, expected) in [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}}), None),
            (
                json!({"response_format": {"type": "json_object"}}),
                requested(GrammarSpec::JsonObject, "response_format"),
            ),
            (
                json!({"response_format": format}),
                requested(schema(), "response_format.json_schema.schema"),
            ),
            (json!({"guided_json": {"type": "null"}}), requested(schema(), "guided_json")),
            (json!({"guided_json": "{\"type\":\"null\"}"}), requested(schema(), "guided_json")),
            (json!({"guided_choice": ["a", "b"]}), requested(choices(), "guided_choice")),
            (
                json!({"guided_regex": "a+", "guided_json": null}),
                requested(GrammarSpec::Regex("a+".to_owned()), "guided_regex"),
            ),
            (
                json!({"guided_grammar": "start: \"a\""}),
                requested(GrammarSpec::Lark("start: \"a\"".to_owned()), "guided_grammar"),
            ),
            (
                json!({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": false}}),
                requested(choices(), "structured_outputs.choice"),
            ),
            (json!({"structured_outputs": {"json_object": false}}), None),
            (
                json!({"structured_outputs": {"json_object": true}}),
                requested(GrammarSpec::JsonObject, "structured_outputs.json_object"),
            ),
        ] {
            assert_eq!(of(body.clone()).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn malformed_and_contradictory_fields_are_refused() {
        let schema = |value: Value| json!({"type": "json_schema", "json_schema": value});
        for (body, field) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "grammar"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (json!({"response_format": schema(json!({"schema": {}}))}), "json_schema.name"),
            (json!({"response_format": schema(json!({"name": "n"}))}), "json_schema.schema"),
            (json!({"response_format": schema(json!({"name": "n", "x": 1}))}), "json_schema.x"),
            (json!({"guided_json": 5}), "guided_json"),
            (json!({"guided_choice": ["a", 5]}), "guided_choice"),
            (json!({"guided_regex": ["a"]}), "guided_regex"),
            (json!({"structured_outputs": []}), "structured_outputs"),
            (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "structured_outputs"),
            (json!({"structured_outputs": {"whitespace_pattern": " "}}), "whitespace_pattern"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
            (
                json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
                "response_format",
            ),
        ] {
            let error = of(body.clone()).unwrap_err().to_json();
            assert!(error.contains(field), "{body}: {error}");
        }
    }
}
