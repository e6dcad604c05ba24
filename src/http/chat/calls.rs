//! The grammar of an answer that must call a function, or whose calls must satisfy a strict schema.
//!
//! Calls are written in the model's format. Models that reason may do so before. Unless a call is forced,
//! an answer may have text before its calls, or no call.

use std::sync::Arc;

use serde_json::{Value, json};

use hone_core::types::{ChatOptions, GrammarSpec, Tool, ToolChoice};
use hone_engine::grammar::{CallGrammar, CallPiece, FreeText, Thought};
use hone_engine::tools::{CallFraming, CallSyntax};
use hone_engine::{Codec, CompiledGrammar, GrammarError, ToolFormat};

use crate::http::error::ApiError;

/// What the calls of an answer depend on.
#[derive(Clone)]
pub(super) struct CallRules {
    pub(super) codec: Arc<Codec>,
    pub(super) format: ToolFormat,
    pub(super) options: ChatOptions,
    /// Whether the prompt has begun the reasoning.
    pub(super) opens_reasoning: bool,
    /// The place of a schema within an entry of `tools`, for error messages.
    pub(super) parameters_field: &'static str,
}

impl CallRules {
    /// The grammar.
    ///
    /// Functions that are not strict have any object as arguments if their schemas cannot be enforced, each
    /// by itself or all together.
    ///
    /// # Errors
    /// 400 with the place of the keyword in the parameters of a strict function that cannot be enforced, or
    /// if the grammar is too large.
    pub(super) async fn compile(&self) -> Result<Arc<CompiledGrammar>, ApiError> {
        let compiled = match self.compile_with(Lenience::OfUnenforceable).await? {
            Err(error) if error.is_refusal() && self.tools().any(|tool| !tool.strict) => {
                self.compile_with(Lenience::OfAll).await?
            }
            compiled => compiled,
        };
        compiled.map_err(|error| {
            if error.is_refusal() {
                let field = if self.options.forces_call() { "tool_choice" } else { "tools" };
                ApiError::field(field, format!("{field}: {error}"))
            } else {
                error.into()
            }
        })
    }

    /// The inner error is that of the grammar as a whole. Large schemas take long to check.
    async fn compile_with(
        &self,
        lenience: Lenience,
    ) -> Result<Result<Arc<CompiledGrammar>, GrammarError>, ApiError> {
        let rules = self.clone();
        let spec = tokio::task::spawn_blocking(move || rules.spec(lenience)).await;
        match spec.map_err(|error| ApiError::logged("checking functions panicked", &error))?? {
            Ok(spec) => Ok(self.codec.compile_grammar(&spec).await),
            Err(error) => Ok(Err(error)),
        }
    }

    fn spec(&self, lenience: Lenience) -> Result<Result<GrammarSpec, GrammarError>, ApiError> {
        let pieces = FormatPieces::new(&self.codec, self.format);
        let mut calls = Vec::new();
        for tool in self.tools() {
            calls.push(self.call(&pieces, tool, lenience)?);
        }
        let text = FreeText { beginnings: pieces.other_beginnings() };
        Ok(CallGrammar {
            thought: pieces.thought(self.opens_reasoning),
            text: (!self.options.forces_call()).then_some(text),
            separator: self.permits_several().then(|| pieces.separator()),
            ..alone(&pieces, calls)
        }
        .spec())
    }

    /// A call of a function, whose schema is checked.
    fn call(
        &self,
        pieces: &FormatPieces<'_>,
        tool: &Tool,
        lenience: Lenience,
    ) -> Result<Vec<CallPiece>, ApiError> {
        let any = || pieces.call(&tool.name, json!({"type": "object"}));
        if !tool.strict && lenience == Lenience::OfAll {
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

/// Which functions that are not strict have any object as arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lenience {
    /// Those whose schemas cannot be enforced.
    OfUnenforceable,
    /// All.
    OfAll,
}

/// The grammar of one call and nothing else.
fn alone(pieces: &FormatPieces<'_>, calls: Vec<Vec<CallPiece>>) -> CallGrammar {
    let (open, close) = (pieces.open(), pieces.close());
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
    framing: CallFraming,
    syntax: CallSyntax,
}

impl<'c> FormatPieces<'c> {
    fn new(codec: &'c Codec, format: ToolFormat) -> Self {
        Self { codec, framing: format.framing(), syntax: format.syntax() }
    }

    /// What begins the calls: its first piece is a marker, if it has any piece.
    fn open(&self) -> Vec<CallPiece> {
        self.text(self.framing.open)
    }

    /// What is between two calls.
    fn separator(&self) -> Vec<CallPiece> {
        self.text(self.framing.separator)
    }

    /// What ends the calls.
    fn close(&self) -> Vec<CallPiece> {
        self.text(self.framing.close)
    }

    /// A call, with the schema of its arguments as a document of its own, so that its references are found.
    fn call(&self, name: &str, schema: Value) -> Vec<CallPiece> {
        let (name, key) = (Value::from(name), Value::from(self.framing.arguments));
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

    /// Texts that the parser of answers takes for the beginning of calls, other than [`Self::open`]. Special
    /// tokens are not among them, because no text contains them.
    fn other_beginnings(&self) -> Vec<String> {
        let is_other = |begin: &&str| {
            !self.framing.open.starts_with(*begin) && self.codec.special_id(begin).is_none()
        };
        let others = self.syntax.begin.iter().copied().filter(is_other);
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
        self.framing.markers.iter().filter_map(split).min_by_key(|(before, ..)| before.len())
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
