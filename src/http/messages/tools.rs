//! Reads `tools`, `tool_choice` and `thinking`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use hone_core::types::{ChatOptions, Tool, ToolChoice};

use crate::http::body::Fields;
use crate::http::chat::fields::MAX_TOKENS;
use crate::http::chat::tools::{MAX_TOOLS, name, refuse_others};
use crate::http::error::ApiError;

const CHOICES: &str = "\"auto\", \"any\", \"tool\" or \"none\"";
const THINKING: &str = "\"enabled\", \"disabled\" or \"adaptive\"";
/// Values of `output_config.effort`.
pub const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Fields of a tool. The last two change nothing: caches are automatic, and arguments are streamed as they
/// are sampled.
const KNOWN: [&str; 9] = [
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "allowed_callers",
    "defer_loading",
    "cache_control",
    "eager_input_streaming",
];

/// Reads `tools`, `tool_choice`, `thinking` and the effort of `output_config`.
pub fn read(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let tools = tools(fields)?;
    let (tool_choice, parallel_tool_calls) = tool_choice(fields, &tools)?;
    let template_variables = template_variables(fields)?;
    Ok(ChatOptions { tools, tool_choice, parallel_tool_calls, template_variables })
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Tool>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(Vec::new()) };
    if list.len() > MAX_TOOLS {
        let message = format!("tools has {} tools: it may have {MAX_TOOLS}", list.len());
        return Err(ApiError::field("tools", message));
    }
    let mut names = BTreeSet::new();
    let mut tools = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let fields = Fields::at(&format!("tools[{index}]"), value)?;
        let tool = tool(&fields)?;
        if !names.insert(tool.name.clone()) {
            return Err(fields.invalid("name", "the name of one tool only"));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn tool(fields: &Fields<'_>) -> Result<Tool, ApiError> {
    if let Some(kind) = fields.text("type")?.filter(|kind| *kind != "custom") {
        let path = fields.path("type");
        let message =
            format!("{path} is {kind:?}: only \"custom\" is supported, tools of the client");
        return Err(ApiError::unsupported(&path, message));
    }
    refuse_others(fields, &KNOWN)?;
    let is_direct = |callers: &Value| {
        callers.as_array().is_some_and(|list| list.iter().all(|caller| caller == "direct"))
    };
    if fields.get("allowed_callers").is_some_and(|callers| !is_direct(callers)) {
        return Err(fields.invalid("allowed_callers", "absent or [\"direct\"]"));
    }
    if fields.boolean("defer_loading")? == Some(true) {
        return Err(fields.invalid("defer_loading", "false: there is no tool search"));
    }
    let schema = fields.object("input_schema")?;
    let schema = schema.ok_or_else(|| fields.missing("input_schema", "a JSON schema"))?;
    Ok(Tool {
        name: name(fields)?.to_owned(),
        description: fields.text("description")?.map(str::to_owned),
        parameters: Some(Value::Object(schema.clone())),
        strict: fields.boolean("strict")?.unwrap_or(false),
    })
}

/// The choice, and whether an answer may have several calls.
fn tool_choice(fields: &Fields<'_>, tools: &[Tool]) -> Result<(ToolChoice, bool), ApiError> {
    let Some(value) = fields.get("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let choice = Fields::at("tool_choice", value)?;
    refuse_others(&choice, &["type", "name", "disable_parallel_tool_use"])?;
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let kind = choice.text("type")?.ok_or_else(|| choice.missing("type", CHOICES))?;
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
            let name = choice.text("name")?.ok_or_else(|| choice.missing("name", allowed))?;
            if !tools.iter().any(|tool| tool.name == name) {
                return Err(choice.invalid("name", allowed));
            }
            ToolChoice::Function(name.to_owned())
        }
        _ => return Err(choice.invalid("type", CHOICES)),
    };
    Ok((chosen, parallel))
}

/// `thinking` as the variable `enable_thinking` of the chat template, and `output_config.effort` as
/// `reasoning_effort`.
fn template_variables(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    if let Some(value) = fields.get("thinking") {
        let thinking = Fields::at("thinking", value)?;
        refuse_others(&thinking, &["type", "budget_tokens", "display"])?;
        thinking.integer("budget_tokens", 1..=MAX_TOKENS)?;
        if thinking.text("display")?.is_some_and(|display| display != "summarized") {
            return Err(thinking.invalid("display", "absent or \"summarized\""));
        }
        let enabled = match thinking.text("type")? {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            Some(_) => return Err(thinking.invalid("type", THINKING)),
            None => return Err(thinking.missing("type", THINKING)),
        };
        variables.insert("enable_thinking".to_owned(), Value::from(enabled));
    }
    if let Some(value) = fields.get("output_config") {
        let config = Fields::at("output_config", value)?;
        if let Some(effort) = config.text("effort")? {
            if !EFFORTS.contains(&effort) {
                let allowed = EFFORTS.map(|effort| format!("{effort:?}")).join(", ");
                return Err(config.invalid("effort", format!("one of {allowed}")));
            }
            variables.insert("reasoning_effort".to_owned(), Value::from(effort));
        }
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: &Value) -> Result<ChatOptions, ApiError> {
        read(&Fields::new(body.as_object().unwrap()))
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
