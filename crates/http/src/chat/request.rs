//! Reads a chat request. Its fields are those of OpenAI and vLLM. A field that would change the response in a way
//! that is not supported is refused; every other field is refused as unknown, as in OpenAI's API, so that a
//! misspelled field is not silently ignored.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use hone_core::config::describe::one_of;
use hone_core::text::inexact_number;
use hone_core::types::{ChatOptions, Message, Role, Tool, ToolCall, ToolChoice};

use super::constraint;
use crate::body::{
    Field, FieldTable, Fields, closed, list_of, maybe_text, object_schema, open, or_null,
    text_schema,
};
use crate::error::ApiError;
use crate::generate::{
    self, CHOICES, ClientRequest, FieldNames, MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING,
    include_usage, metadata, to_u32,
};

pub const FIELDS: FieldTable = &[CONVERSATION, SWITCHES, SAMPLING, CHOICES, CONSTRAINTS, OTHERS];

/// The conversation and what is added to it.
pub const CONVERSATION: &[Field] = &[
    Field::json("messages", messages_schema, "The conversation.").required(),
    Field::json("tools", tools_schema, "Functions that the model may call."),
    Field::json(
        "tool_choice",
        || ToolShape::Nested.choice_schema(),
        "Whether the model must call a function.",
    ),
    Field::one_of("reasoning_effort", &EFFORTS, "A variable of the chat template."),
];

const CONSTRAINTS: &[Field] = &[
    Field::json("response_format", constraint::format_schema, "A grammar of the text."),
    Field::json("guided_json", constraint::json_schema, "A JSON schema of the text, as in vLLM."),
    Field::text("guided_regex", "A regular expression of the text, as in vLLM."),
    Field::json("guided_choice", constraint::choice_schema, "The possible texts, as in vLLM."),
    Field::text("guided_grammar", "A grammar in llguidance's variant of Lark."),
    Field::json("structured_outputs", constraint::outputs_schema, "vLLM's newer form."),
];

const OTHERS: &[Field] = &[
    Field::integer("max_completion_tokens", 1, MAX_TOKENS, "The newer name of `max_tokens`."),
    Field::flag("logprobs", "Whether the response has log-probabilities."),
    Field::integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "Alternatives; only with `logprobs`."),
    Field::flag("return_token_ids", "Whether the response has token ids, as in vLLM."),
    // They control OpenAI's service, billing and caches, or features that a supported request does not use.
    Field::ignored("prediction"),
    Field::ignored("prompt_cache_key"),
    Field::ignored("prompt_cache_options"),
    Field::ignored("prompt_cache_retention"),
    Field::ignored("safety_identifier"),
    Field::ignored("verbosity"),
    Field::only("best_of", "1"),
    Field::only("length_penalty", "1"),
    Field::only("modalities", "[\"text\"]"),
    Field::only("skip_special_tokens", "true"),
    Field::only("spaces_between_special_tokens", "true"),
    Field::refused("allowed_token_ids"),
    Field::refused("audio"),
    Field::refused("bad_words"),
    Field::refused("early_stopping"),
    Field::refused("function_call"),
    Field::refused("functions"),
    Field::refused("guided_decoding_backend"),
    Field::refused("guided_whitespace_pattern"),
    Field::refused("logits_processors"),
    Field::refused("moderation"),
    Field::refused("prompt_logprobs"),
    Field::refused("return_tokens_as_token_ids"),
    Field::refused("truncate_prompt_tokens"),
    Field::refused("use_beam_search"),
    Field::refused("vllm_xargs"),
    Field::refused("web_search_options"),
];

/// Validates a body. `vocab` bounds token ids. Returns whether a stream reports its usage, too.
pub fn from_wire(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<(ClientRequest, bool), ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let newer = fields.get("max_completion_tokens").is_some();
    let names = FieldNames {
        max_tokens: if newer { "max_completion_tokens" } else { "max_tokens" },
        prompt: "messages",
        parameters: "function.parameters",
    };
    let request = generate::read(&fields, metadata(&fields)?, default_max_tokens, vocab, names)?;
    let request = ClientRequest {
        messages: read_messages(&fields)?,
        chat: read_options(&fields)?,
        grammar: constraint::read(&fields)?,
        choices: to_u32(fields.whole("n")).unwrap_or(1),
        logprobs: logprobs(&fields)?,
        token_ids: fields.is_set("return_token_ids")?,
        ..request
    };
    refuse_contradictions(&fields, &request)?;
    let include_usage = include_usage(&fields, request.stream)?;
    Ok((request, include_usage))
}

/// Refuses what contradicts a grammar or a forced call.
pub fn refuse_contradictions(
    fields: &Fields<'_>,
    ClientRequest { grammar, chat, params, .. }: &ClientRequest,
) -> Result<(), ApiError> {
    if let Some(grammar) = grammar.as_ref().filter(|_| chat.forces_call()) {
        let allowed = format_args!("\"none\" or \"auto\" beside {}", grammar.field);
        return Err(fields.invalid("tool_choice", allowed));
    }
    let is_constrained = grammar.is_some() || chat.constrains_calls();
    if is_constrained && (params.min_tokens > 0 || params.ignore_eos) {
        let name = if params.ignore_eos { "ignore_eos" } else { "min_tokens" };
        return Err(fields.invalid(name, "absent if the text is constrained"));
    }
    Ok(())
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs");
    match (wanted, top) {
        (true, top) => Ok(Some(u8::try_from(top.unwrap_or(0)).unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.invalid("top_logprobs", "absent unless logprobs is true")),
    }
}

// The messages. Other fields of theirs are ignored, because clients send back messages as they received them.

/// The fields of OpenAI's messages that are not supported.
const UNSUPPORTED: [&str; 2] = ["function_call", "audio"];

pub fn read_messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    at_least_one(fields)?.map(|(path, value)| message(&path, value)).collect()
}

/// The entries of `messages`, each with its path.
pub fn at_least_one<'a>(
    fields: &Fields<'a>,
) -> Result<impl Iterator<Item = (String, &'a Value)> + use<'a>, ApiError> {
    let allowed = "a list of at least one message";
    let mut list = fields.entries("messages")?.peekable();
    if list.peek().is_some() {
        return Ok(list);
    }
    Err(match fields.get("messages") {
        Some(_) => fields.invalid("messages", allowed),
        None => fields.missing("messages", allowed),
    })
}

fn message(path: &str, value: &Value) -> Result<Message, ApiError> {
    let fields = Fields::at(path, value)?;
    let roles = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];
    let role = read_role(&fields, &roles)?;
    if let Some(name) = UNSUPPORTED.iter().find(|name| !is_absent(&fields, name)) {
        return Err(fields.unsupported(name, "is not supported"));
    }
    let mut message = Message::new(role, "");
    message.name = fields.owned("name")?;
    if role == Role::Assistant {
        let calls = fields.entries("tool_calls")?;
        let calls = calls.map(|(path, call)| tool_call(&path, call));
        message.tool_calls = calls.collect::<Result<_, _>>()?;
        let reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
        message.reasoning = reasoning.map(str::to_owned);
    } else if !is_absent(&fields, "tool_calls") {
        return Err(fields.invalid("tool_calls", "absent unless role is \"assistant\""));
    }
    if role == Role::Tool {
        let id = fields.required("tool_call_id", "the id of the call that was answered")?;
        message.tool_call_id = Some(id.to_owned());
    }
    if message.tool_calls.is_empty() || fields.get("content").is_some() {
        message.content = joined_text(&fields, "content", text_part)?;
    }
    Ok(message)
}

/// Whether a field is absent or an empty list.
fn is_absent(fields: &Fields<'_>, name: &str) -> bool {
    fields.get(name).is_none_or(|value| value.as_array().is_some_and(Vec::is_empty))
}

/// The role of a message, one of `roles`.
pub fn read_role(fields: &Fields<'_>, roles: &[Role]) -> Result<Role, ApiError> {
    let names: Vec<_> = roles.iter().map(|role| format!("{:?}", role.as_str())).collect();
    let allowed = one_of(&names);
    let name = fields.required("role", &allowed)?;
    let found = roles.iter().copied().find(|role| role.as_str() == name);
    found.ok_or_else(|| fields.invalid("role", allowed))
}

/// A string, or parts of text, which are joined. `text` reads one.
pub fn joined_text(
    fields: &Fields<'_>,
    name: &str,
    text: impl Fn(&Fields<'_>) -> Result<String, ApiError>,
) -> Result<String, ApiError> {
    const ALLOWED: &str = "a string or a list of text parts";
    match fields.get(name) {
        None => Err(fields.missing(name, ALLOWED)),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) if !parts.is_empty() => {
            let parts = fields.entries(name)?;
            parts.map(|(path, part)| text(&Fields::at(&path, part)?)).collect()
        }
        Some(_) => Err(fields.invalid(name, ALLOWED)),
    }
}

fn text_part(part: &Fields<'_>) -> Result<String, ApiError> {
    if part.required("type", "\"text\"")? != "text" {
        return Err(part.invalid("type", "\"text\": nothing else is supported"));
    }
    part.string("text")
}

fn tool_call(path: &str, value: &Value) -> Result<ToolCall, ApiError> {
    let call = Fields::at(path, value)?;
    if call.text("type")?.is_some_and(|kind| kind != "function") {
        return Err(call.invalid("type", "\"function\": nothing else is supported"));
    }
    let (id, function) = (call.string("id")?, call.member("function")?);
    Ok(ToolCall { id, name: function.string("name")?, arguments: function.string("arguments")? })
}

pub fn messages_schema() -> Value {
    // Null or an empty list.
    let absent = json!({"enum": [null, []]});
    let message = |required: usize, role: Value, own: Vec<(&'static str, Value)>| {
        let mut members = vec![("role", role)];
        members.extend(own);
        members.push(("name", maybe_text()));
        members.extend(UNSUPPORTED.map(|name| (name, absent.clone())));
        open(required, &members)
    };
    let plain = vec![("content", content_schema()), ("tool_calls", absent.clone())];
    let mut result = vec![("content", content_schema()), ("tool_call_id", text_schema())];
    result.push(("tool_calls", absent.clone()));
    let function = open(2, &[("name", text_schema()), ("arguments", text_schema())]);
    let kind = json!({"enum": ["function", null]});
    let call = open(2, &[("id", text_schema()), ("function", function), ("type", kind)]);
    let own = vec![
        ("content", or_null(content_schema())),
        ("reasoning_content", maybe_text()),
        ("reasoning", maybe_text()),
        ("tool_calls", json!({"type": ["array", "null"], "items": call})),
    ];
    let mut assistant = message(1, json!({"const": "assistant"}), own);
    // With a text, with calls or with both.
    let has = |name: &str, schema: Value| json!({"properties": {name: schema}, "required": [name]});
    assistant["anyOf"] = json!([
        has("content", content_schema()),
        has("tool_calls", json!({"type": "array", "minItems": 1})),
    ]);
    list_of(
        1,
        json!({"oneOf": [
            message(2, json!({"enum": ["system", "developer", "user"]}), plain),
            assistant,
            message(3, json!({"const": "tool"}), result),
        ]}),
    )
}

/// A string or text parts.
fn content_schema() -> Value {
    let part = open(2, &[("type", json!({"const": "text"})), ("text", text_schema())]);
    json!({"anyOf": [text_schema(), list_of(1, part)]})
}

// What adds functions and template variables to the messages.

/// OpenAI's limits: functions of a request, characters of a function's name.
pub const MAX_TOOLS: usize = 128;
const MAX_NAME: usize = 64;
/// Values of `reasoning_effort`.
pub const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
/// Variables of the chat template that have values already.
const RESERVED: [&str; 4] = ["add_generation_prompt", "documents", "messages", "tools"];

/// What requests for answers may have beside their functions.
pub const SWITCHES: &[Field] = &[
    Field::flag("parallel_tool_calls", "False returns only the first call; default true."),
    Field::json(
        "chat_template_kwargs",
        variables_schema,
        "Variables of the chat template, as in vLLM.",
    ),
];

/// Where an API has the members of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolShape {
    /// In an object `function`: chat completions.
    Nested,
    /// In the tool or the choice itself: Responses.
    Flat,
}

/// Reads `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning_effort` and `chat_template_kwargs`.
pub fn read_options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    read_options_as(fields, ToolShape::Nested, fields.text("reasoning_effort")?)
}

/// [`read_options`] for an API that has functions in another shape, and the effort of reasoning elsewhere.
pub fn read_options_as(
    fields: &Fields<'_>,
    shape: ToolShape,
    effort: Option<&str>,
) -> Result<ChatOptions, ApiError> {
    let words = ("functions", "each function must have its own");
    let mut tools = distinct(fields, words, |path, value| {
        let function = shape.tool(&Fields::at(path, value)?)?;
        let tool = tool(&function)?;
        Ok((tool, function))
    })?;
    let tool_choice = tool_choice(fields, shape, &mut tools)?;
    Ok(ChatOptions {
        tools,
        tool_choice,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        template_variables: template_variables(fields, effort)?,
    })
}

/// Reads `tools`, whose names differ. `read` returns a tool and the object with its name. The words are those of
/// errors: what the tools are, and that a name is taken.
pub fn distinct<'a>(
    fields: &Fields<'a>,
    (kind, taken): (&str, &str),
    read: impl Fn(&str, &'a Value) -> Result<(Tool, Fields<'a>), ApiError>,
) -> Result<Vec<Tool>, ApiError> {
    let count = fields.list("tools")?.map_or(0, Vec::len);
    if count > MAX_TOOLS {
        let message = format!("tools has {count} {kind}: it may have {MAX_TOOLS}");
        return Err(ApiError::field("tools", message));
    }
    let mut names = BTreeSet::new();
    let mut tools = Vec::with_capacity(count);
    for (path, value) in fields.entries("tools")? {
        let (tool, named) = read(&path, value)?;
        if !names.insert(tool.name.clone()) {
            let path = named.path("name");
            return Err(ApiError::field(&path, format!("{path} is {:?}: {taken}", tool.name)));
        }
        tools.push(tool);
    }
    Ok(tools)
}

const FUNCTION: &[Field] = &[
    Field::json("name", name_schema, "").required(),
    Field::text("description", ""),
    Field::json("parameters", || json!({"type": "object"}), "The JSON schema of the arguments."),
    Field::flag("strict", ""),
];
const FLAT_TOOL: FieldTable = &[&[Field::one_of("type", &["function"], "").required()], FUNCTION];
const NESTED_TOOL: FieldTable = &[&[
    Field::one_of("type", &["function"], "").required(),
    Field::object("function", &[FUNCTION], "").required(),
]];

impl ToolShape {
    /// The members of a function in a tool.
    fn tool<'a>(self, outer: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        let kind = outer.required("type", "\"function\"")?;
        if kind != "function" {
            let reason = format_args!("is {kind:?}: only \"function\" is supported");
            return Err(outer.unsupported("type", reason));
        }
        outer.check(self.tool_table())?;
        self.member(outer, "function")
    }

    fn tool_table(self) -> FieldTable {
        match self {
            Self::Nested => NESTED_TOOL,
            Self::Flat => FLAT_TOOL,
        }
    }

    /// What a tool or a choice has beside its type: in this member, or in itself.
    fn member<'a>(self, outer: &Fields<'a>, name: &str) -> Result<Fields<'a>, ApiError> {
        match self {
            Self::Nested => outer.member(name),
            Self::Flat => Ok(outer.clone()),
        }
    }

    /// The members of the choice `allowed_tools`.
    fn allowed_tools<'a>(self, choice: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        let inner = self.member(choice, "allowed_tools")?;
        let known = &["type", "mode", "tools"][usize::from(self == Self::Nested)..];
        inner.refuse_others(known)?;
        Ok(inner)
    }

    pub fn tools_schema(self) -> Value {
        let tool = object_schema(self.tool_table());
        json!({"type": "array", "maxItems": MAX_TOOLS, "items": tool})
    }

    pub fn choice_schema(self) -> Value {
        type Make = fn(usize, &[(&str, Value)]) -> Value;
        let of = |kind: &str, members: &[(&str, Value)], make: Make| {
            let (required, kind_member) = (members.len(), ("type", json!({"const": kind})));
            match self {
                Self::Nested => open(2, &[kind_member, (kind, make(required, members))]),
                Self::Flat => make(required + 1, &[&[kind_member][..], members].concat()),
            }
        };
        let named = of("function", &[("name", name_schema())], open);
        let modes = json!({"enum": ["auto", "required"]});
        let members = [("mode", modes), ("tools", list_of(1, named.clone()))];
        let allowed = of("allowed_tools", &members, closed);
        json!({"anyOf": [{"enum": ["none", "auto", "required"]}, named, allowed]})
    }
}

fn tool(function: &Fields<'_>) -> Result<Tool, ApiError> {
    // The model would see other digits than the client sent.
    if let Some(number) = function.get("parameters").and_then(inexact_number) {
        let path = function.path("parameters");
        let message = format!("{path} has the number {number:e}: numbers may have at most 64 bits");
        return Err(ApiError::field(&path, message));
    }
    Ok(Tool {
        name: name(function)?.to_owned(),
        description: function.owned("description")?,
        parameters: function.object("parameters")?.map(|map| Value::Object(map.clone())),
        strict: function.is_set("strict")?,
    })
}

/// The name of a function, which is required.
pub fn name<'a>(function: &Fields<'a>) -> Result<&'a str, ApiError> {
    let allowed =
        format!("1 to {MAX_NAME} letters (a to z, A to Z), digits, underscores and hyphens");
    let name = function.required("name", &allowed)?;
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_part) {
        return Err(function.invalid("name", allowed));
    }
    Ok(name)
}

fn tool_choice(
    fields: &Fields<'_>,
    shape: ToolShape,
    tools: &mut Vec<Tool>,
) -> Result<ToolChoice, ApiError> {
    let allowed = "\"none\", \"auto\", \"required\", {\"type\": \"function\", …} or {\"type\": \
                   \"allowed_tools\", …}";
    let Some(value) = fields.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = match value {
        Value::String(text) if text == "none" => return Ok(ToolChoice::None),
        Value::String(text) if text == "auto" => return Ok(ToolChoice::Auto),
        Value::String(text) if text == "required" => ToolChoice::Required,
        Value::Object(_) => {
            let choice = Fields::at("tool_choice", value)?;
            let types = "\"function\" or \"allowed_tools\"";
            match choice.required("type", types)? {
                "function" => ToolChoice::Function(known_function(&choice, shape, tools)?),
                "allowed_tools" => allowed_tools(&choice, shape, tools)?,
                _ => return Err(choice.invalid("type", types)),
            }
        }
        _ => return Err(fields.invalid("tool_choice", allowed)),
    };
    if tools.is_empty() {
        return Err(fields.invalid("tool_choice", "absent, \"none\" or \"auto\" without tools"));
    }
    Ok(choice)
}

/// The function that a choice names, which must be one of `tools`.
fn known_function(
    choice: &Fields<'_>,
    shape: ToolShape,
    tools: &[Tool],
) -> Result<String, ApiError> {
    let function = shape.member(choice, "function")?;
    let name = name(&function)?;
    if !tools.iter().any(|tool| tool.name == name) {
        return Err(function.invalid("name", "the name of a function in tools"));
    }
    Ok(name.to_owned())
}

/// `{"mode": …, "tools": […]}` of the choice `allowed_tools`.
fn allowed_tools(
    choice: &Fields<'_>,
    shape: ToolShape,
    tools: &mut Vec<Tool>,
) -> Result<ToolChoice, ApiError> {
    let inner = shape.allowed_tools(choice)?;
    if inner.get("tools").is_none() {
        return Err(inner.missing("tools", "a list of functions"));
    }
    let mut names = BTreeSet::new();
    for (path, value) in inner.entries("tools")? {
        let entry = Fields::at(&path, value)?;
        if entry.text("type")?.is_some_and(|kind| kind != "function") {
            return Err(entry.invalid("type", "\"function\": nothing else is supported"));
        }
        names.insert(known_function(&entry, shape, tools)?);
    }
    if names.is_empty() {
        return Err(inner.invalid("tools", "a list of at least one function"));
    }
    tools.retain(|tool| names.contains(&tool.name));
    match inner.required("mode", "\"auto\" or \"required\"")? {
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(inner.invalid("mode", "\"auto\" or \"required\"")),
    }
}

/// `chat_template_kwargs`, and the effort of reasoning as the variable `reasoning_effort`.
fn template_variables(
    fields: &Fields<'_>,
    effort: Option<&str>,
) -> Result<Map<String, Value>, ApiError> {
    let mut variables = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
        let path = format!("chat_template_kwargs.{name}");
        let message = format!("{path} is not a variable that a request can set");
        return Err(ApiError::unsupported(&path, message));
    }
    if let Some(effort) = effort {
        variables.entry("reasoning_effort").or_insert_with(|| Value::from(effort));
    }
    Ok(variables)
}

pub fn tools_schema() -> Value {
    ToolShape::Nested.tools_schema()
}

pub fn variables_schema() -> Value {
    json!({"type": "object", "propertyNames": {"not": {"enum": RESERVED}}})
}

pub fn name_schema() -> Value {
    json!({"type": "string", "pattern": format!("^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}$")})
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({
            "model": "default",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logprobs": true,
            "stream": true,
        });
        // The compiler of grammars refuses an empty list.
        let except = ["guided_choice"];
        assert_agreement(FIELDS, &base, &except, |body| from_wire(body, 256, 1000).map(drop));
    }
}
