//! Reads a Messages request. Its fields are Anthropic's, with Hone's `seed` and `store`. Every other field is refused
//! as unknown, so that a misspelled field is not silently ignored.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use hone_core::config::describe::one_of;
use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Message, Role, Tool, ToolCall, ToolChoice,
};

use crate::body::{
    Field, FieldTable, Fields, closed, invalid, list_of, maybe_flag, object_schema, open,
    text_schema,
};
use crate::chat::constraint::RequestedGrammar;
use crate::chat::request::{MAX_TOOLS, at_least_one, distinct, name, name_schema};
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
    Field::json("messages", turns_schema, "The conversation.").required(),
    Field::json("system", texts_schema, "The system message."),
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
    Field::json("type", || json!({"enum": ["enabled", "disabled", "adaptive"]}), "").required(),
    Field::integer("budget_tokens", 1, MAX_TOKENS, "Has no effect."),
    Field::json("display", || json!({"const": "summarized"}), ""),
]];

const OUTPUT: FieldTable = &[&[
    Field::one_of("effort", &["low", "medium", "high", "xhigh", "max"], ""),
    Field::object("format", OUTPUT_FORMAT, ""),
]];

const OUTPUT_FORMAT: FieldTable = &[&[
    Field::json("type", || json!({"const": "json_schema"}), "").required(),
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
    Ok(MessagesPrompt { model: model.to_owned(), messages: turns(fields)?, chat, grammar })
}

/// The grammar of `output_config.format`.
fn output_format(fields: &Fields<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    let config = fields.inner("output_config");
    let Some(format) = config.and_then(|config| config.inner("format")) else { return Ok(None) };
    if format.required("type", "\"json_schema\"")? != "json_schema" {
        return Err(format.invalid("type", "\"json_schema\""));
    }
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
        if thinking.text("display")?.is_some_and(|display| display != "summarized") {
            return Err(thinking.invalid("display", "absent or \"summarized\""));
        }
        let kinds = "\"enabled\", \"disabled\" or \"adaptive\"";
        let enabled = match thinking.required("type", kinds)? {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            _ => return Err(thinking.invalid("type", kinds)),
        };
        variables.insert("enable_thinking".to_owned(), Value::from(enabled));
    }
    let effort = fields.inner("output_config").and_then(|config| config.get("effort"));
    if let Some(effort) = effort {
        variables.insert("reasoning_effort".to_owned(), effort.clone());
    }
    Ok(variables)
}

// `system` and `messages`, whose content is a text or a list of blocks. A turn of the user may contain results of calls,
// each of which becomes a message of its own, in the order of the blocks. The texts of a turn are joined.

/// The only member of a call's `input` if its arguments are no object: their text, as Anthropic suggests.
pub const INVALID_JSON: &str = "INVALID_JSON";
const CONTENT: &str = "a string or a list of content blocks";
const ROLES: &str = "\"user\", \"assistant\" or \"system\"";
/// What precedes the text of a call's result that is an error, because no chat template marks errors.
const ERROR: &str = "Error: ";

fn turns(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let system = texts(fields, "system")?.filter(|text| !text.is_empty());
    let mut messages: Vec<Message> =
        system.map(|text| Message::new(Role::System, text)).into_iter().collect();
    for (path, value) in at_least_one(fields)? {
        messages.extend(turn(&path, value)?);
    }
    Ok(messages)
}

const MESSAGE: FieldTable = &[&[Field::text("role", ""), Field::json("content", texts_schema, "")]];
/// The fields of content blocks, by type.
const BLOCKS: [(&str, FieldTable); 4] = [
    ("text", &[&[TYPE, Field::text("text", "").required(), CACHE, Field::refused("citations")]]),
    ("thinking", &[&[TYPE, Field::text("thinking", "").required(), Field::text("signature", "")]]),
    ("tool_use", CALL),
    ("tool_result", RESULT),
];
const TYPE: Field = Field::text("type", "").required();
const CACHE: Field = Field::ignored("cache_control");
const CALL: FieldTable = &[&[
    TYPE,
    Field::text("id", "").required(),
    Field::text("name", "").required(),
    Field::json("input", || json!({"type": "object"}), "").required(),
    CACHE,
    Field::json("caller", || open(1, &[("type", json!({"const": "direct"}))]), ""),
]];
const RESULT: FieldTable = &[&[
    TYPE,
    Field::text("tool_use_id", "").required(),
    Field::json("content", texts_schema, ""),
    Field::flag("is_error", ""),
    CACHE,
]];

fn turns_schema() -> Value {
    let message = |role: &str, content: Value| {
        closed(2, &[("role", json!({"const": role})), ("content", content)])
    };
    let content =
        |least, known: &[&str]| json!({"anyOf": [text_schema(), blocks_schema(least, known)]});
    let messages = [
        message("user", content(1, &["text", "tool_result"])),
        message("assistant", content(0, &["text", "tool_use", "thinking"])),
        message("system", texts_schema()),
    ];
    list_of(1, json!({"oneOf": messages}))
}

/// The JSON schema of a text or a list of text blocks.
fn texts_schema() -> Value {
    json!({"anyOf": [text_schema(), blocks_schema(0, &["text"])]})
}

fn blocks_schema(least: usize, known: &[&str]) -> Value {
    let known = BLOCKS.iter().filter(|(kind, _)| known.contains(kind));
    let schemas = known.map(|(kind, table)| {
        let mut schema = object_schema(table);
        schema["properties"]["type"] = json!({"const": kind});
        schema
    });
    list_of(least, json!({"oneOf": schemas.collect::<Vec<_>>()}))
}

fn turn(path: &str, value: &Value) -> Result<Vec<Message>, ApiError> {
    let fields = Fields::of_table_at(path, value, MESSAGE)?;
    let role = fields.required("role", ROLES)?;
    let content = fields.get("content").ok_or_else(|| fields.missing("content", CONTENT))?;
    match (role, content) {
        ("system", _) => {
            let text = texts(&fields, "content")?.unwrap_or_default();
            Ok(vec![Message::new(Role::System, text)])
        }
        ("user", Value::String(text)) => Ok(vec![Message::new(Role::User, text.as_str())]),
        ("assistant", Value::String(text)) => {
            Ok(vec![Message::new(Role::Assistant, text.as_str())])
        }
        ("user", Value::Array(blocks)) if !blocks.is_empty() => user(&fields),
        // An answer without any text has no block.
        ("assistant", Value::Array(_)) => Ok(vec![assistant(&fields)?]),
        ("user" | "assistant", _) => Err(fields.invalid("content", CONTENT)),
        _ => Err(fields.invalid("role", ROLES)),
    }
}

fn user(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::new();
    for (kind, block) in blocks(fields, "content", &["text", "tool_result"])? {
        if kind == "tool_result" {
            messages.push(tool_result(&block)?);
            continue;
        }
        let said = block.string("text")?;
        match messages.last_mut() {
            Some(last) if last.role == Role::User => last.content.push_str(&said),
            _ => messages.push(Message::new(Role::User, said)),
        }
    }
    Ok(messages)
}

fn assistant(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let mut message = Message::new(Role::Assistant, "");
    for (kind, block) in blocks(fields, "content", &["text", "tool_use", "thinking"])? {
        match kind {
            "text" => message.content.push_str(&block.string("text")?),
            "tool_use" => message.tool_calls.push(tool_use(&block)?),
            _ => {
                let reasoning = message.reasoning.get_or_insert_default();
                reasoning.push_str(&block.string("thinking")?);
            }
        }
    }
    Ok(message)
}

/// The blocks in a field, with their types, which must be among those `known`.
fn blocks<'a>(
    fields: &Fields<'a>,
    name: &str,
    known: &[&str],
) -> Result<Vec<(&'static str, Fields<'a>)>, ApiError> {
    let allowed = one_of(&known.iter().map(|kind| format!("{kind:?}")).collect::<Vec<_>>());
    let read = |(path, value): (String, &'a Value)| {
        let block = Fields::at(&path, value)?;
        let kind = block.required("type", &allowed)?;
        let found = BLOCKS.iter().find(|(name, _)| *name == kind && known.contains(name));
        let (kind, table) = found.ok_or_else(|| {
            let reason = format_args!("is {kind:?}: only {allowed} is supported here");
            block.unsupported("type", reason)
        })?;
        block.check(table)?;
        Ok((*kind, block))
    };
    fields.entries(name)?.map(read).collect()
}

/// A text, or a list of text blocks, which are joined.
fn texts(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(_)) => {
            let blocks = blocks(fields, name, &["text"])?;
            blocks.iter().map(|(_, block)| block.string("text")).collect::<Result<_, _>>().map(Some)
        }
        Some(_) => Err(fields.invalid(name, "a string or a list of text blocks")),
    }
}

fn tool_use(block: &Fields<'_>) -> Result<ToolCall, ApiError> {
    let is_direct = |caller: &Value| caller.get("type").is_some_and(|kind| kind == "direct");
    if block.get("caller").is_some_and(|caller| !is_direct(caller)) {
        return Err(block.invalid("caller", "absent or {\"type\": \"direct\"}"));
    }
    let input = block.object("input")?.ok_or_else(|| block.missing("input", "an object"))?;
    Ok(ToolCall {
        id: block.string("id")?,
        name: block.string("name")?,
        arguments: arguments(input),
    })
}

/// The arguments as the model wrote them. Those that were not an object came as one with their text.
fn arguments(input: &Map<String, Value>) -> String {
    match input.get(INVALID_JSON) {
        Some(Value::String(text)) if input.len() == 1 => text.clone(),
        _ => Value::Object(input.clone()).to_string(),
    }
}

fn tool_result(block: &Fields<'_>) -> Result<Message, ApiError> {
    let mut content = texts(block, "content")?.unwrap_or_default();
    if block.is_set("is_error")? {
        content.insert_str(0, ERROR);
    }
    let mut message = Message::new(Role::Tool, content);
    message.tool_call_id = Some(block.string("tool_use_id")?);
    Ok(message)
}

#[cfg(test)]
mod tests;
