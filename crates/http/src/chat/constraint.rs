//! What constrains the text of a request: `response_format`, and vLLM's `guided_*` and `structured_outputs`; and
//! calls of functions that are forced or whose schemas are strict.

use std::sync::Arc;

use serde_json::{Value, json};

use hone_core::types::{ChatOptions, GrammarSpec, Tool, ToolChoice};
use hone_engine::grammar::{CallGrammar, CallPiece, Thought};
use hone_engine::tools::CallFormat;
use hone_engine::{Codec, CompiledGrammar, GrammarError, ToolFormat};

use crate::body::{Field, Fields, closed, list_of, object_schema, open, or_null, text_schema};
use crate::error::ApiError;

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
const NAME_CHARS: usize = 64;
/// A JSON schema with a name. Every schema is enforced strictly.
pub const NAMED_SCHEMA: &[Field] = &[
    Field::short_text("name", NAME_CHARS, "").required(),
    Field::json("schema", json_schema, "").required(),
    Field::text("description", ""),
    Field::flag("strict", ""),
];

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

impl RequestedGrammar {
    /// # Errors
    /// 400 with the field, if the grammar is refused.
    pub async fn compile(&self, codec: &Arc<Codec>) -> Result<Arc<CompiledGrammar>, ApiError> {
        let compiled = codec.compile_grammar(&self.spec).await;
        compiled.map_err(|error| refused(&self.field, error))
    }
}

fn refused(field: &str, error: GrammarError) -> ApiError {
    match error.is_refusal() {
        true => ApiError::field(field, format!("{field}: {error}")),
        false => error.into(),
    }
}

/// The grammar of a request; `None` if the text is free.
///
/// # Errors
/// 400 for a malformed field, or if several fields describe a grammar.
pub fn read(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
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
    match format.required("type", TYPES)? {
        "text" => Ok(None),
        "json_object" => {
            let field = "response_format".to_owned();
            Ok(Some(RequestedGrammar { spec: GrammarSpec::JsonObject, field }))
        }
        "json_schema" => {
            let allowed = "an object with a name and a schema";
            let Some(value) = format.get("json_schema") else {
                return Err(format.missing("json_schema", allowed));
            };
            let path = "response_format.json_schema";
            let schema = Fields::of_table_at(path, value, &[NAMED_SCHEMA])?;
            Ok(Some(named_schema(&schema)?.1))
        }
        _ => Err(format.invalid("type", TYPES)),
    }
}

/// The name and the grammar of a [`NAMED_SCHEMA`].
pub fn named_schema<'a>(fields: &Fields<'a>) -> Result<(&'a str, RequestedGrammar), ApiError> {
    let name = fields.required("name", "a string")?;
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
            let is_default =
                OPTIONS.contains(&name) && fields.get(name) == Some(&Value::Bool(false));
            if !is_default {
                return Err(fields.unsupported(name, "is not supported"));
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
        Described::Regex => fields.owned(name)?.map(GrammarSpec::Regex),
        Described::Lark => fields.owned(name)?.map(GrammarSpec::Lark),
        Described::Choice => fields.read(name, "a list of strings", choice)?,
        Described::AnyObject => fields.is_set(name)?.then_some(GrammarSpec::JsonObject),
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

pub fn format_schema() -> Value {
    let described = object_schema(&[NAMED_SCHEMA]);
    json!({"anyOf": [
        open(1, &[("type", json!({"enum": ["text", "json_object"]}))]),
        open(2, &[("type", json!({"const": "json_schema"})), ("json_schema", described)]),
    ]})
}

/// The JSON schema of a JSON schema: an object, or its text.
pub fn json_schema() -> Value {
    json!({"type": ["object", "boolean", "string"]})
}

pub fn choice_schema() -> Value {
    list_of(1, text_schema())
}

pub fn outputs_schema() -> Value {
    let grammars = STRUCTURED.iter().map(|(name, described)| {
        let schema = match described {
            Described::Schema => json_schema(),
            Described::Regex | Described::Lark => text_schema(),
            Described::Choice => choice_schema(),
            Described::AnyObject => json!({"type": "boolean"}),
        };
        (*name, or_null(schema))
    });
    let options = OPTIONS.iter().map(|name| (*name, json!({"enum": [false, null]})));
    closed(0, &grammars.chain(options).collect::<Vec<_>>())
}

// The grammar of an answer that must call a function, or whose calls must satisfy a strict schema. Reasoning may
// precede the calls, and unless a call is forced, text may too, or there is no call.

/// What the calls of an answer depend on.
#[derive(Clone)]
pub struct CallRules {
    pub codec: Arc<Codec>,
    pub format: ToolFormat,
    pub options: ChatOptions,
    /// Whether the prompt has begun the reasoning.
    pub opens_reasoning: bool,
    /// The place of a schema within an entry of `tools`, for error messages.
    pub parameters_field: &'static str,
}

impl CallRules {
    /// The grammar. Functions that are not strict have any object as arguments if their schemas cannot be enforced,
    /// each by itself or all together.
    ///
    /// # Errors
    /// 400 with the place of the keyword in the parameters of a strict function that cannot be enforced, or
    /// if the grammar is too large.
    pub async fn compile(&self) -> Result<Arc<CompiledGrammar>, ApiError> {
        let compiled = match self.compile_with(false).await? {
            Err(error) if error.is_refusal() && self.tools().any(|tool| !tool.strict) => {
                self.compile_with(true).await?
            }
            compiled => compiled,
        };
        let field = if self.options.forces_call() { "tool_choice" } else { "tools" };
        compiled.map_err(|error| refused(field, error))
    }

    /// The inner error is that of the grammar as a whole. Large schemas take long to check. `lenient` gives any object
    /// to all functions that are not strict, rather than to those whose schemas cannot be enforced.
    async fn compile_with(
        &self,
        lenient: bool,
    ) -> Result<Result<Arc<CompiledGrammar>, GrammarError>, ApiError> {
        let rules = self.clone();
        let spec = tokio::task::spawn_blocking(move || rules.spec(lenient)).await;
        match spec.map_err(|error| ApiError::logged("checking functions panicked", &error))?? {
            Ok(spec) => Ok(self.codec.compile_grammar(&spec).await),
            Err(error) => Ok(Err(error)),
        }
    }

    fn spec(&self, lenient: bool) -> Result<Result<GrammarSpec, GrammarError>, ApiError> {
        let pieces = FormatPieces::new(&self.codec, self.format);
        let mut calls = Vec::new();
        for tool in self.tools() {
            calls.push(self.call(&pieces, tool, lenient)?);
        }
        Ok(CallGrammar {
            thought: pieces.thought(self.opens_reasoning),
            text: (!self.options.forces_call()).then(|| pieces.other_beginnings()),
            separator: self.permits_several().then(|| pieces.text(pieces.format.separator)),
            ..alone(&pieces, calls)
        }
        .spec())
    }

    /// A call of a function, whose schema is checked.
    fn call(
        &self,
        pieces: &FormatPieces<'_>,
        tool: &Tool,
        lenient: bool,
    ) -> Result<Vec<CallPiece>, ApiError> {
        let any = || pieces.call(&tool.name, json!({"type": "object"}));
        if !tool.strict && lenient {
            return Ok(any());
        }
        let call = arguments(tool).and_then(|schema| {
            let call = pieces.call(&tool.name, schema);
            alone(pieces, vec![call.clone()]).spec().map(|_| call)
        });
        match call {
            Ok(call) => Ok(call),
            Err(_) if !tool.strict => Ok(any()),
            Err(error) => {
                let (field, name) = (self.parameters_field, &tool.name);
                Err(ApiError::field("tools", format!("tools: {field} of {name:?}: {error}")))
            }
        }
    }

    /// The functions that the answer may call.
    fn tools(&self) -> impl Iterator<Item = &Tool> {
        let named = match &self.options.tool_choice {
            ToolChoice::Function(name) => Some(name),
            _ => None,
        };
        let tools = self.options.callable().iter();
        tools.filter(move |tool| named.is_none_or(|name| *name == tool.name))
    }

    fn permits_several(&self) -> bool {
        let is_named = matches!(self.options.tool_choice, ToolChoice::Function(_));
        self.options.parallel_tool_calls && !is_named
    }
}

/// The grammar of one call and nothing else.
fn alone(pieces: &FormatPieces<'_>, calls: Vec<Vec<CallPiece>>) -> CallGrammar {
    // The first piece of what begins the calls is a marker, if it has any piece.
    let [open, close] = [pieces.format.open, pieces.format.close].map(|text| pieces.text(text));
    CallGrammar { thought: None, text: None, open, calls, separator: None, close }
}

/// The schema of a function's arguments, which are always an object, also where `null` is permitted.
fn arguments(tool: &Tool) -> Result<Value, GrammarError> {
    let Some(Value::Object(schema)) = &tool.parameters else {
        return Ok(json!({"type": "object", "properties": {}, "additionalProperties": false}));
    };
    let permits_object = match schema.get("type") {
        Some(Value::String(name)) => name == "object",
        Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
        _ => true,
    };
    if !permits_object {
        let (path, reason) = ("#/type".to_owned(), "arguments are an object".to_owned());
        return Err(GrammarError::Schema { path, reason });
    }
    let mut schema = schema.clone();
    schema.insert("type".to_owned(), Value::from("object"));
    Ok(Value::Object(schema))
}

// The texts of a model's format as pieces of a grammar. Markers may be special tokens.

/// What calls consist of in one format, with the tokens of one model.
struct FormatPieces<'c> {
    codec: &'c Codec,
    format: &'static CallFormat,
}

impl<'c> FormatPieces<'c> {
    fn new(codec: &'c Codec, format: ToolFormat) -> Self {
        Self { codec, format: format.calls() }
    }

    /// A call, with the schema of its arguments as a document of its own, so that its references are found.
    fn call(&self, name: &str, schema: Value) -> Vec<CallPiece> {
        let (name, key) = (Value::from(name), Value::from(self.format.arguments));
        vec![
            CallPiece::Text(format!("{{\"name\": {name}, {key}: ")),
            CallPiece::Json(schema),
            CallPiece::Text("}".to_owned()),
        ]
    }

    /// The reasoning before calls, if the model has think tags. `is_open`: the prompt has begun it.
    fn thought(&self, is_open: bool) -> Option<Thought> {
        let tags = self.codec.think_tags()?;
        let open = (!is_open).then(|| self.marker(tags.open));
        Some(Thought { open, close: self.marker(tags.close) })
    }

    /// Other texts that the parser of answers takes for the beginning of calls. No text contains special tokens.
    fn other_beginnings(&self) -> Vec<String> {
        let is_other = |begin: &&str| {
            !self.format.open.starts_with(*begin) && self.codec.special_id(begin).is_none()
        };
        let others = self.format.begin.iter().copied().filter(is_other);
        others.map(str::to_owned).collect()
    }

    fn marker(&self, text: &str) -> CallPiece {
        match self.codec.special_id(text) {
            Some(id) => CallPiece::Token(id),
            None => CallPiece::Text(text.to_owned()),
        }
    }

    /// A text, with each of its markers as a piece of its own.
    fn text(&self, text: &str) -> Vec<CallPiece> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, marker, after)) = self.first_marker(rest) {
            add(&mut pieces, before);
            pieces.push(self.marker(marker));
            rest = after;
        }
        add(&mut pieces, rest);
        pieces
    }

    /// The first marker in a text, with the texts around it.
    fn first_marker<'t>(&self, text: &'t str) -> Option<(&'t str, &'static str, &'t str)> {
        let split = |marker: &&'static str| {
            let (before, after) = text.split_once(*marker)?;
            Some((before, *marker, after))
        };
        self.format
            .begin
            .iter()
            .chain(self.format.end)
            .filter_map(split)
            .min_by_key(|(before, ..)| before.len())
    }
}

fn add(pieces: &mut Vec<CallPiece>, text: &str) {
    if !text.is_empty() {
        pieces.push(CallPiece::Text(text.to_owned()));
    }
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

    fn tool(parameters: Option<Value>) -> Tool {
        Tool { name: "f".to_owned(), description: None, parameters, strict: true }
    }

    #[test]
    fn arguments_are_an_object() {
        let schema = |parameters: Value| arguments(&tool(Some(parameters)));
        for kind in [json!("object"), json!(["null", "object"])] {
            let found = schema(json!({"type": kind, "required": ["a"]})).unwrap();
            assert_eq!(found, json!({"type": "object", "required": ["a"]}));
        }
        assert_eq!(schema(json!({})).unwrap(), json!({"type": "object"}));
        assert_eq!(arguments(&tool(None)).unwrap()["additionalProperties"], false);
        for kind in [json!("string"), json!(["null", "array"])] {
            let error = schema(json!({"type": kind})).unwrap_err();
            assert_eq!(error.to_string(), "#/type: arguments are an object");
        }
    }
}
