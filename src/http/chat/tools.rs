//! Reads the fields of a request that add functions and template variables to its messages.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use hone_core::text::inexact_number;
use hone_core::types::{ChatOptions, Tool, ToolChoice};

use crate::http::body::Fields;
use crate::http::error::ApiError;

/// OpenAI's limits: functions of a request, characters of a function's name.
pub(in crate::http) const MAX_TOOLS: usize = 128;
const MAX_NAME: usize = 64;
/// Values of `reasoning_effort`.
pub(in crate::http) const EFFORTS: [&str; 7] =
    ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
/// Variables of the chat template that have values already.
const RESERVED: [&str; 4] = ["add_generation_prompt", "documents", "messages", "tools"];

/// Where an API has the members of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::http) enum ToolShape {
    /// In an object `function`: chat completions.
    Nested,
    /// In the tool or the choice itself: Responses.
    Flat,
}

/// Reads `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning_effort` and `chat_template_kwargs`.
pub(in crate::http) fn read(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    read_as(fields, ToolShape::Nested, fields.text("reasoning_effort")?)
}

/// [`read`] for an API that has functions in another shape, and the effort of reasoning elsewhere.
pub(in crate::http) fn read_as(
    fields: &Fields<'_>,
    shape: ToolShape,
    effort: Option<&str>,
) -> Result<ChatOptions, ApiError> {
    let mut tools = tools(fields, shape)?;
    let tool_choice = tool_choice(fields, shape, &mut tools)?;
    Ok(ChatOptions {
        tools,
        tool_choice,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        template_variables: template_variables(fields, effort)?,
    })
}

fn tools(fields: &Fields<'_>, shape: ToolShape) -> Result<Vec<Tool>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(Vec::new()) };
    if list.len() > MAX_TOOLS {
        let message = format!("tools has {} functions: it may have {MAX_TOOLS}", list.len());
        return Err(ApiError::field("tools", message));
    }
    let mut names = BTreeSet::new();
    let mut tools = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let outer = Fields::at(&format!("tools[{index}]"), value)?;
        let function = shape.tool(&outer)?;
        let tool = tool(&function)?;
        if !names.insert(tool.name.clone()) {
            let path = function.path("name");
            let message = format!("{path} is {:?}: each function must have its own", tool.name);
            return Err(ApiError::field(&path, message));
        }
        tools.push(tool);
    }
    Ok(tools)
}

impl ToolShape {
    /// The members of a function in a tool.
    fn tool<'a>(self, outer: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        match outer.text("type")? {
            Some("function") => {}
            None => return Err(outer.missing("type", "\"function\"")),
            Some(kind) => {
                let path = outer.path("type");
                let message = format!("{path} is {kind:?}: only \"function\" is supported");
                return Err(ApiError::unsupported(&path, message));
            }
        }
        match self {
            Self::Nested => {
                refuse_others(outer, &["type", "function"])?;
                let function = member(outer, "function")?;
                refuse_others(&function, &["name", "description", "parameters", "strict"])?;
                Ok(function)
            }
            Self::Flat => {
                let members = ["type", "name", "description", "parameters", "strict"];
                refuse_others(outer, &members)?;
                Ok(outer.clone())
            }
        }
    }

    /// The members of a function in a tool or a choice.
    fn function<'a>(self, outer: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        match self {
            Self::Nested => member(outer, "function"),
            Self::Flat => Ok(outer.clone()),
        }
    }

    /// The members of the choice `allowed_tools`.
    fn allowed_tools<'a>(self, choice: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        match self {
            Self::Nested => {
                let inner = member(choice, "allowed_tools")?;
                refuse_others(&inner, &["mode", "tools"])?;
                Ok(inner)
            }
            Self::Flat => {
                refuse_others(choice, &["type", "mode", "tools"])?;
                Ok(choice.clone())
            }
        }
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
        description: function.text("description")?.map(str::to_owned),
        parameters: function.object("parameters")?.map(|map| Value::Object(map.clone())),
        strict: function.boolean("strict")?.unwrap_or(false),
    })
}

/// The object in a field.
fn member<'a>(outer: &Fields<'a>, name: &str) -> Result<Fields<'a>, ApiError> {
    let value = outer.get(name).ok_or_else(|| outer.missing(name, "an object"))?;
    Fields::at(&outer.path(name), value)
}

/// The name of a function, which is required.
pub(in crate::http) fn name<'a>(function: &Fields<'a>) -> Result<&'a str, ApiError> {
    let allowed =
        format!("1 to {MAX_NAME} letters (a to z, A to Z), digits, underscores and hyphens");
    let name = function.text("name")?.ok_or_else(|| function.missing("name", &allowed))?;
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_part) {
        return Err(function.invalid("name", allowed));
    }
    Ok(name)
}

/// Refuses fields that are not `known`.
pub(in crate::http) fn refuse_others(fields: &Fields<'_>, known: &[&str]) -> Result<(), ApiError> {
    let Some(other) = fields.names().find(|name| !known.contains(name)) else { return Ok(()) };
    let path = fields.path(other);
    Err(ApiError::unsupported(&path, format!("{path} is not a known field")))
}

/// Reads `tool_choice`; `allowed_tools` removes the other functions from `tools`.
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
            match choice.text("type")? {
                Some("function") => ToolChoice::Function(known_function(&choice, shape, tools)?),
                Some("allowed_tools") => allowed_tools(&choice, shape, tools)?,
                Some(_) => {
                    return Err(choice.invalid("type", "\"function\" or \"allowed_tools\""));
                }
                None => return Err(choice.missing("type", "\"function\" or \"allowed_tools\"")),
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
    let function = shape.function(choice)?;
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
    let list = inner.list("tools")?.ok_or_else(|| inner.missing("tools", "a list of functions"))?;
    let mut names = BTreeSet::new();
    for (index, value) in list.iter().enumerate() {
        let entry = Fields::at(&inner.path(&format!("tools[{index}]")), value)?;
        if entry.text("type")?.is_some_and(|kind| kind != "function") {
            return Err(entry.invalid("type", "\"function\": nothing else is supported"));
        }
        names.insert(known_function(&entry, shape, tools)?);
    }
    if names.is_empty() {
        return Err(inner.invalid("tools", "a list of at least one function"));
    }
    tools.retain(|tool| names.contains(&tool.name));
    match inner.text("mode")? {
        Some("auto") => Ok(ToolChoice::Auto),
        Some("required") => Ok(ToolChoice::Required),
        None => Err(inner.missing("mode", "\"auto\" or \"required\"")),
        Some(_) => Err(inner.invalid("mode", "\"auto\" or \"required\"")),
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

/// The JSON schema of the members of a function, with the `type` of a tool if it is one itself.
fn function_schema(shape: ToolShape) -> Value {
    let parameters = json!({
        "type": ["object", "null"],
        "description": "The JSON schema of the arguments.",
    });
    let kind = (shape == ToolShape::Flat).then(|| ("type", json!({"const": "function"})));
    let mut required = vec!["name"];
    required.extend(kind.iter().map(|(name, _)| *name));
    let members = [
        ("name", name_schema()),
        ("description", json!({"type": ["string", "null"]})),
        ("parameters", parameters),
        ("strict", json!({"type": ["boolean", "null"]})),
    ];
    let members = members.into_iter().chain(kind).map(|(name, schema)| (name.to_owned(), schema));
    json!({
        "type": "object",
        "properties": members.collect::<Map<String, Value>>(),
        "required": required,
        "additionalProperties": false,
    })
}

/// The JSON schema of `tools` with flat functions.
pub(in crate::http) fn flat_schema() -> Value {
    json!({"type": "array", "maxItems": MAX_TOOLS, "items": function_schema(ToolShape::Flat)})
}

/// The JSON schema of `tool_choice` with flat functions.
pub(in crate::http) fn flat_choice_schema() -> Value {
    let named = json!({
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": name_schema()},
        "required": ["type", "name"],
    });
    let allowed = json!({
        "type": "object",
        "properties": {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": named, "minItems": 1},
        },
        "required": ["type", "mode", "tools"],
        "additionalProperties": false,
    });
    json!({"anyOf": [{"enum": ["none", "auto", "required"]}, named, allowed]})
}

/// The JSON schema of `tools`.
pub(in crate::http) fn schema() -> Value {
    let function = function_schema(ToolShape::Nested);
    json!({"type": "array", "maxItems": MAX_TOOLS, "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
        "additionalProperties": false,
    }})
}

/// The JSON schema of `tool_choice`.
pub(super) fn choice_schema() -> Value {
    let function = json!({
        "type": "object",
        "properties": {"name": name_schema()},
        "required": ["name"],
    });
    let named = json!({
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    });
    let allowed = json!({
        "type": "object",
        "properties": {
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": named, "minItems": 1},
        },
        "required": ["mode", "tools"],
        "additionalProperties": false,
    });
    json!({"anyOf": [
        {"enum": ["none", "auto", "required"]},
        named,
        {
            "type": "object",
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": allowed},
            "required": ["type", "allowed_tools"],
        },
    ]})
}

/// The JSON schema of `chat_template_kwargs`.
pub(in crate::http) fn variables_schema() -> Value {
    json!({"type": "object", "propertyNames": {"not": {"enum": RESERVED}}})
}

/// The JSON schema of a function's name.
pub(in crate::http) fn name_schema() -> Value {
    json!({"type": "string", "pattern": format!("^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}$")})
}
