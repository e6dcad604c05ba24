//! Reads a Messages request. Its fields are Anthropic's, with Hone's `seed` and `store`. Every other field is refused
//! as unknown, so that a misspelled field is not silently ignored.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use hone_core::types::{ChatOptions, ClientEndpoint, GrammarSpec, Message, Role, Tool, ToolChoice};

use super::turns;
use crate::body::{
    Field, FieldTable, Fields, closed, invalid, maybe_flag, object_schema, text_schema,
};
use crate::chat::constraint::RequestedGrammar;
use crate::chat::request::{MAX_TOOLS, distinct, name, name_schema};
use crate::error::ApiError;
use crate::generate::{
    self, ClientRequest, FieldNames, MAX_TOKENS, metadata_schema, model_schema, seed_schema,
    stop_form, stop_texts, stops_schema,
};

const MAX_STOP: usize = 64;
const CHOICES: &str = "\"auto\", \"any\", \"tool\" or \"none\"";

/// The entry of `metadata` that names the end user.
const USER: &str = "user_id";

pub const FIELDS: FieldTable = &[PROMPT, SAMPLING];
pub const COUNT_FIELDS: FieldTable = &[PROMPT];

/// What determines the prompt and the form of the answer.
const PROMPT: &[Field] = &[
    Field::json("model", model_schema, "The name of the model.").required(),
    Field::json("messages", turns::schema, "The conversation.").required(),
    Field::json("system", turns::texts_schema, "The system message."),
    Field::json("tools", tools_schema, "Tools that the model may call."),
    Field::json("tool_choice", choice_schema, "Whether the model must call a tool."),
    Field::object("thinking", THINKING, "The variable enable_thinking of the chat template."),
    Field::object("output_config", OUTPUT, "The effort, and the JSON schema of the text."),
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
    Field::json("stop_sequences", || stops_schema(MAX_STOP), "The text ends before these strings."),
    Field::flag("stream", "Whether events are sent while the text is sampled."),
    Field::json(
        "metadata",
        metadata_schema,
        "user_id is the end user; others as in chat requests.",
    ),
    Field::flag("store", "False keeps nothing of the request."),
];

/// The fields of a tool. The last two change nothing: caches are automatic, and arguments are always streamed.
const TOOL: FieldTable = &[&[
    Field::json("name", name_schema, "").required(),
    Field::json("input_schema", || json!({"type": "object"}), "The JSON schema of the arguments.")
        .required(),
    Field::json("type", || json!({"const": "custom"}), ""),
    Field::text("description", ""),
    Field::flag("strict", ""),
    Field::json("allowed_callers", || json!({"type": "array", "items": {"const": "direct"}}), ""),
    Field::json("defer_loading", || json!({"const": false}), ""),
    Field::ignored("cache_control"),
    Field::ignored("eager_input_streaming"),
]];

const THINKING: FieldTable = &[&[
    Field::one_of("type", &["enabled", "disabled", "adaptive"], "").required(),
    Field::integer("budget_tokens", 1, MAX_TOKENS, "Has no effect."),
    Field::one_of("display", &["summarized"], ""),
]];

const OUTPUT: FieldTable = &[&[
    Field::one_of("effort", &["low", "medium", "high", "xhigh", "max"], ""),
    Field::object("format", OUTPUT_FORMAT, ""),
]];

const OUTPUT_FORMAT: FieldTable = &[&[
    Field::one_of("type", &["json_schema"], "").required(),
    Field::json("schema", || json!({"type": "object"}), "").required(),
]];

fn tools_schema() -> Value {
    json!({"type": "array", "maxItems": MAX_TOOLS, "items": object_schema(TOOL)})
}

fn choice_schema() -> Value {
    let single = ("disable_parallel_tool_use", maybe_flag());
    let kinds = ("type", json!({"enum": ["auto", "any", "none"]}));
    let named = [("type", json!({"const": "tool"})), ("name", text_schema()), single.clone()];
    json!({"anyOf": [closed(1, &[kinds, single]), closed(2, &named)]})
}

/// What determines the prompt of a request and the form of its answer.
#[derive(Debug, PartialEq)]
pub struct MessagesPrompt {
    pub model: String,
    pub messages: Vec<Message>,
    /// Tools, and variables of the chat template.
    pub chat: ChatOptions,
    grammar: Option<RequestedGrammar>,
}

/// Validates the body of a request for a message. `vocab` is the size of the vocabulary.
pub fn from_wire(body: &Map<String, Value>, vocab: usize) -> Result<ClientRequest, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let MessagesPrompt { messages, chat, grammar, .. } = prompt(&fields)?;
    if messages.last().is_some_and(|last| last.role == Role::Assistant) {
        let message = "the last of messages is of the assistant: it must be of the user, because an answer \
                       cannot be continued";
        return Err(ApiError::field("messages", message));
    }
    if fields.get("max_tokens").is_none() {
        return Err(fields.missing("max_tokens", "a whole number of at least 1"));
    }
    let stops = |value: &Value| stop_texts(value.as_array()?, MAX_STOP);
    let stop = fields.read("stop_sequences", stop_form(MAX_STOP), stops)?.unwrap_or_default();
    let (user, metadata) = metadata(&fields)?;
    let names =
        FieldNames { max_tokens: "max_tokens", prompt: "messages", parameters: "input_schema" };
    Ok(ClientRequest {
        endpoint: ClientEndpoint::Messages,
        messages,
        chat,
        grammar,
        // The tokens show which stop sequence ended the text.
        token_ids: !stop.is_empty(),
        stop,
        user,
        // `max_tokens` is present.
        ..generate::read(&fields, metadata, 0, vocab, names)?
    })
}

/// Validates the body of a request to count the tokens of a prompt.
pub fn read_prompt(body: &Map<String, Value>) -> Result<MessagesPrompt, ApiError> {
    prompt(&Fields::of(body, COUNT_FIELDS)?)
}

fn prompt(fields: &Fields<'_>) -> Result<MessagesPrompt, ApiError> {
    let model = fields.required("model", "a model's name")?;
    let (chat, grammar) = (options(fields)?, output_format(fields)?);
    if chat.forces_call() && grammar.is_some() {
        let allowed = "of the type \"auto\" or \"none\" beside output_config.format";
        return Err(fields.invalid("tool_choice", allowed));
    }
    Ok(MessagesPrompt { model: model.to_owned(), messages: turns::read(fields)?, chat, grammar })
}

/// The grammar of `output_config.format`.
fn output_format(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    let config = fields.inner("output_config");
    let Some(format) = config.and_then(|config| config.inner("format")) else { return Ok(None) };
    format.required("type", "\"json_schema\"")?;
    let schema = format.object("schema")?.ok_or_else(|| format.missing("schema", "an object"))?;
    let spec = GrammarSpec::JsonSchema(Value::Object(schema.clone()).to_string());
    Ok(Some(RequestedGrammar { spec, field: format.path("schema") }))
}

/// The end user, and the other entries of `metadata`, which are those of a chat request.
fn metadata(fields: &Fields<'_>) -> Result<(Option<String>, BTreeMap<String, String>), ApiError> {
    let Some(map) = fields.object("metadata")? else { return Ok((None, BTreeMap::new())) };
    let user = match map.get(USER) {
        None | Some(Value::Null) => None,
        Some(value) => {
            let not_text = || invalid("metadata.user_id", value, "a string");
            Some(value.as_str().ok_or_else(not_text)?.to_owned())
        }
    };
    let mut others = map.clone();
    others.shift_remove(USER);
    let others = Map::from_iter([("metadata".to_owned(), Value::Object(others))]);
    Ok((user, generate::metadata(&Fields::new(&others))?))
}

/// Reads `tools`, `tool_choice`, `thinking` and the effort of `output_config`.
fn options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let words = ("tools", "it must be the name of one tool only");
    let tools = distinct(fields, words, |path, value| {
        let fields = Fields::at(path, value)?;
        Ok((tool(&fields)?, fields))
    })?;
    let (tool_choice, parallel_tool_calls) = tool_choice(fields, &tools)?;
    let template_variables = template_variables(fields)?;
    Ok(ChatOptions { tools, tool_choice, parallel_tool_calls, template_variables })
}

fn tool(fields: &Fields<'_>) -> Result<Tool, ApiError> {
    if let Some(kind) = fields.text("type")?.filter(|kind| *kind != "custom") {
        let reason = format_args!("is {kind:?}: only \"custom\" is supported, tools of the client");
        return Err(fields.unsupported("type", reason));
    }
    fields.check(TOOL)?;
    let is_direct = |callers: &Value| {
        callers.as_array().is_some_and(|list| list.iter().all(|caller| caller == "direct"))
    };
    if fields.get("allowed_callers").is_some_and(|callers| !is_direct(callers)) {
        return Err(fields.invalid("allowed_callers", "absent or [\"direct\"]"));
    }
    if fields.is_set("defer_loading")? {
        return Err(fields.invalid("defer_loading", "false: there is no tool search"));
    }
    let schema = fields.object("input_schema")?;
    let schema = schema.ok_or_else(|| fields.missing("input_schema", "a JSON schema"))?;
    Ok(Tool {
        name: name(fields)?.to_owned(),
        description: fields.owned("description")?,
        parameters: Some(Value::Object(schema.clone())),
        strict: fields.is_set("strict")?,
    })
}

/// The choice, and whether an answer may have several calls.
fn tool_choice(fields: &Fields<'_>, tools: &[Tool]) -> Result<(ToolChoice, bool), ApiError> {
    let Some(value) = fields.get("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let choice = Fields::at("tool_choice", value)?;
    choice.refuse_others(&["type", "name", "disable_parallel_tool_use"])?;
    let parallel = !choice.is_set("disable_parallel_tool_use")?;
    let kind = choice.required("type", CHOICES)?;
    if kind != "tool" && choice.get("name").is_some() {
        return Err(choice.invalid("name", "absent unless type is \"tool\""));
    }
    let chosen = match kind {
        "auto" => ToolChoice::Auto,
        "none" => ToolChoice::None,
        "any" | "tool" if tools.is_empty() => {
            return Err(choice.invalid("type", "\"auto\" or \"none\" without tools"));
        }
        "any" => ToolChoice::Required,
        "tool" => {
            let allowed = "the name of a tool in tools";
            let name = choice.required("name", allowed)?;
            if !tools.iter().any(|tool| tool.name == name) {
                return Err(choice.invalid("name", allowed));
            }
            ToolChoice::Function(name.to_owned())
        }
        _ => return Err(choice.invalid("type", CHOICES)),
    };
    Ok((chosen, parallel))
}

/// The template's variables `enable_thinking` (of `thinking`) and `reasoning_effort` (of `output_config.effort`).
fn template_variables(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    if let Some(thinking) = fields.inner("thinking") {
        let kind = thinking.required("type", "\"enabled\", \"disabled\" or \"adaptive\"")?;
        variables.insert("enable_thinking".to_owned(), Value::from(kind != "disabled"));
    }
    let effort = fields.inner("output_config").and_then(|config| config.get("effort"));
    if let Some(effort) = effort {
        variables.insert("reasoning_effort".to_owned(), effort.clone());
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::testing::assert_agreement;

    fn body(more: &Value) -> Map<String, Value> {
        let mut body = json!({"model": "default", "max_tokens": 9,
                              "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.as_object().unwrap().clone()
    }

    #[test]
    fn fields_are_translated() {
        let request = from_wire(
            &body(&json!({
                "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stream": true, "store": false,
                "stop_sequences": ["a", "b"], "service_tier": "auto", "cache_control": {"type": "ephemeral"},
                "metadata": {"user_id": "ann", "session_id": "s"},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}},
            })),
            100,
        );
        let conversation = request.unwrap();
        let (params, stream) = (&conversation.params, conversation.stream);
        assert_eq!((params.temperature, params.top_p, params.top_k), (0.5, 0.9, 5));
        assert_eq!((params.seed, params.max_tokens, stream), (7, 9, true));
        assert_eq!(conversation.stop, ["a", "b"]);
        assert_eq!(conversation.user.as_deref(), Some("ann"));
        let metadata = [("session_id".to_owned(), "s".to_owned())].into();
        assert_eq!((conversation.metadata, conversation.store), (metadata, Some(false)));
        let grammar = conversation.grammar.unwrap();
        assert_eq!(grammar.spec, GrammarSpec::JsonSchema("{\"type\":\"null\"}".to_owned()));
        assert_eq!(grammar.field, "output_config.format.schema");
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        let schema = json!({"type": "json_schema", "schema": {}});
        let tool = json!({"name": "a", "input_schema": {}});
        for (more, expected) in [
            (json!({"model": null}), "model is missing"),
            (json!({"max_tokens": null}), "max_tokens is missing"),
            (json!({"max_tokens": 0}), "max_tokens is 0"),
            (json!({"temperature": 1.5}), "temperature is 1.5: it must be a number from 0 to 1"),
            (json!({"top_k": -1}), "top_k is -1"),
            (json!({"stop_sequences": ["a", ""]}), "stop_sequences is a list"),
            (json!({"stop_sequences": "a"}), "stop_sequences is \\\"a\\\""),
            (json!({"stop": "a"}), "stop is not a known field"),
            (json!({"container": "x"}), "container is not a known field"),
            (json!({"metadata": {"user_id": 5}}), "metadata.user_id is 5"),
            (json!({"metadata": {"answer": 5}}), "metadata.answer is 5"),
            (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
            (json!({"output_config": {"form": 5}}), "output_config.form is not a known field"),
            (
                json!({"output_config": {"format": schema}, "tools": [tool],
                       "tool_choice": {"type": "any"}}),
                "tool_choice is an object",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": "Hi"}]}),
                "the last of messages is of the assistant",
            ),
        ] {
            let error = from_wire(&body(&more), 100).unwrap_err().to_json();
            assert!(error.contains(expected), "{more}: {error}");
        }
        let error = read_prompt(&body(&json!({}))).unwrap_err().to_json();
        assert!(error.contains("max_tokens is not a field: the fields are model"), "{error}");
    }

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let tool = json!({"name": "a", "input_schema": {}});
        let base = Value::Object(body(&json!({"tools": [tool]})));
        assert_agreement(FIELDS, &base, &[], |body| from_wire(body, 1000).map(drop));
        let mut base = base;
        base.as_object_mut().unwrap().remove("max_tokens");
        assert_agreement(COUNT_FIELDS, &base, &[], |body| read_prompt(body).map(drop));
    }

    fn of(body: &Value) -> Result<ChatOptions, ApiError> {
        options(&Fields::of(body.as_object().unwrap(), FIELDS)?)
    }

    fn add() -> Value {
        json!({"name": "add", "description": "Adds.", "input_schema": {"type": "object"}})
    }

    #[test]
    fn choices_and_switches_are_translated() {
        let options = of(&json!({})).unwrap();
        assert!(options.is_default());
        for (choice, expected, parallel) in [
            (json!({"type": "auto"}), ToolChoice::Auto, true),
            (json!({"type": "none"}), ToolChoice::None, true),
            (
                json!({"type": "any", "disable_parallel_tool_use": true}),
                ToolChoice::Required,
                false,
            ),
            (json!({"type": "tool", "name": "add"}), ToolChoice::Function("add".to_owned()), true),
        ] {
            let options = of(&json!({"tools": [add()], "tool_choice": choice})).unwrap();
            assert_eq!((options.tool_choice, options.parallel_tool_calls), (expected, parallel));
            assert_eq!(options.tools[0].parameters, Some(json!({"type": "object"})));
        }
        for (kind, enabled) in [("enabled", true), ("adaptive", true), ("disabled", false)] {
            let body = json!({"thinking": {"type": kind, "budget_tokens": 2048},
                              "output_config": {"effort": "low"}});
            let expected = json!({"enable_thinking": enabled, "reasoning_effort": "low"});
            assert_eq!(Value::Object(of(&body).unwrap().template_variables), expected);
        }
    }

    #[test]
    fn wrong_tools_and_choices_are_refused_with_their_place() {
        let tool = |more: Value| {
            let mut tool = add();
            tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"tools": [tool]})
        };
        let choice = |choice: Value| json!({"tools": [add()], "tool_choice": choice});
        for (body, expected) in [
            (json!({"tools": [5]}), "tools[0] is 5"),
            (
                tool(json!({"type": "web_search_20250305"})),
                "tools[0].type is \\\"web_search_20250305\\\": only \\\"custom\\\"",
            ),
            (tool(json!({"name": "a b"})), "tools[0].name is \\\"a b\\\""),
            (tool(json!({"input_schema": null})), "tools[0].input_schema is missing"),
            (tool(json!({"parameters": {}})), "tools[0].parameters is not a known field"),
            (tool(json!({"defer_loading": true})), "tools[0].defer_loading is true"),
            (tool(json!({"allowed_callers": ["code"]})), "tools[0].allowed_callers is a list"),
            (json!({"tools": [add(), add()]}), "tools[1].name is \\\"add\\\""),
            (choice(json!("auto")), "tool_choice is \\\"auto\\\": it must be an object"),
            (choice(json!({})), "tool_choice.type is missing"),
            (choice(json!({"type": "required"})), "tool_choice.type is \\\"required\\\""),
            (choice(json!({"type": "tool"})), "tool_choice.name is missing"),
            (choice(json!({"type": "tool", "name": "b"})), "tool_choice.name is \\\"b\\\""),
            (choice(json!({"type": "any", "name": "add"})), "tool_choice.name is \\\"add\\\""),
            (json!({"tool_choice": {"type": "any"}}), "tool_choice.type is \\\"any\\\""),
            (json!({"thinking": {}}), "thinking.type is missing"),
            (json!({"thinking": {"type": "on"}}), "thinking.type is \\\"on\\\""),
            (
                json!({"thinking": {"type": "enabled", "display": "omitted"}}),
                "thinking.display is \\\"omitted\\\"",
            ),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 0}}),
                "thinking.budget_tokens is 0",
            ),
            (json!({"output_config": {"effort": "most"}}), "output_config.effort"),
        ] {
            let error = of(&body).unwrap_err().to_json();
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
