//! Reads the fields of a request that add functions and template variables to its messages.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use hone_core::text::inexact_number;
use hone_core::types::{ChatOptions, Tool, ToolChoice};

use crate::body::{Field, Fields, list_of, maybe_flag, maybe_text, open};
use crate::error::ApiError;

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
pub fn read(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    read_as(fields, ToolShape::Nested, fields.text("reasoning_effort")?)
}

/// [`read`] for an API that has functions in another shape, and the effort of reasoning elsewhere.
pub fn read_as(
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
    for (path, value) in fields.entries("tools")?.into_iter().flatten() {
        let (tool, named) = read(&path, value)?;
        if !names.insert(tool.name.clone()) {
            let path = named.path("name");
            return Err(ApiError::field(&path, format!("{path} is {:?}: {taken}", tool.name)));
        }
        tools.push(tool);
    }
    Ok(tools)
}

impl ToolShape {
    /// The members of a function in a tool.
    fn tool<'a>(self, outer: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        let kind = outer.required("type", "\"function\"")?;
        if kind != "function" {
            let reason = format_args!("is {kind:?}: only \"function\" is supported");
            return Err(outer.unsupported("type", reason));
        }
        if self == Self::Flat {
            outer.refuse_others(&["type", "name", "description", "parameters", "strict"])?;
            return Ok(outer.clone());
        }
        outer.refuse_others(&["type", "function"])?;
        let function = outer.member("function")?;
        function.refuse_others(&["name", "description", "parameters", "strict"])?;
        Ok(function)
    }

    /// The members of a function in a tool or a choice.
    fn function<'a>(self, outer: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        match self {
            Self::Nested => outer.member("function"),
            Self::Flat => Ok(outer.clone()),
        }
    }

    /// The members of the choice `allowed_tools`.
    fn allowed_tools<'a>(self, choice: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
        let (inner, known) = match self {
            Self::Nested => (choice.member("allowed_tools")?, &["mode", "tools"][..]),
            Self::Flat => (choice.clone(), &["type", "mode", "tools"][..]),
        };
        inner.refuse_others(known)?;
        Ok(inner)
    }

    /// The JSON schema of an object of the type `kind`, of whose members the first `required` ones must be there.
    fn schema(self, kind: &str, required: usize, members: &[(&str, Value)], field: &str) -> Value {
        let kind = ("type", json!({"const": kind}));
        match self {
            Self::Nested => open(2, &[kind, (field, open(required, members))]),
            Self::Flat => open(required + 1, &[&[kind][..], members].concat()),
        }
    }

    /// The JSON schema of `tools`.
    pub fn tools_schema(self) -> Value {
        let parameters = json!({
            "type": ["object", "null"],
            "description": "The JSON schema of the arguments.",
        });
        let mut tool = self.schema(
            "function",
            1,
            &[
                ("name", name_schema()),
                ("description", maybe_text()),
                ("parameters", parameters),
                ("strict", maybe_flag()),
            ],
            "function",
        );
        tool["additionalProperties"] = false.into();
        if self == Self::Nested {
            tool["properties"]["function"]["additionalProperties"] = false.into();
        }
        json!({"type": "array", "maxItems": MAX_TOOLS, "items": tool})
    }

    /// The JSON schema of `tool_choice`.
    pub fn choice_schema(self) -> Value {
        let named = self.schema("function", 1, &[("name", name_schema())], "function");
        let modes = json!({"enum": ["auto", "required"]});
        let members = [("mode", modes), ("tools", list_of(1, named.clone()))];
        let mut allowed = self.schema("allowed_tools", 2, &members, "allowed_tools");
        let inner = match self {
            Self::Nested => &mut allowed["properties"]["allowed_tools"],
            Self::Flat => &mut allowed,
        };
        inner["additionalProperties"] = false.into();
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
    let list = inner.entries("tools")?;
    let list = list.ok_or_else(|| inner.missing("tools", "a list of functions"))?;
    let mut names = BTreeSet::new();
    for (path, value) in list {
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

/// The JSON schema of `tools`.
pub fn schema() -> Value {
    ToolShape::Nested.tools_schema()
}

/// The JSON schema of `chat_template_kwargs`.
pub fn variables_schema() -> Value {
    json!({"type": "object", "propertyNames": {"not": {"enum": RESERVED}}})
}

/// The JSON schema of a function's name.
pub fn name_schema() -> Value {
    json!({"type": "string", "pattern": format!("^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}$")})
}
