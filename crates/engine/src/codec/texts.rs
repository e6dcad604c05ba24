//! The texts of clients in a conversation: those of messages, calls, tools and template variables.

use std::cell::RefCell;

use serde_json::{Map, Value};

use hone_core::types::{ChatOptions, Message, Tool, ToolCall};

/// All texts.
pub(super) fn of(messages: &[Message], options: &ChatOptions) -> Vec<String> {
    let all = RefCell::new(Vec::new());
    changed(messages, options, &|text| {
        all.borrow_mut().push(text.to_owned());
        String::new()
    });
    all.into_inner()
}

/// A copy whose texts are changed.
pub(super) fn changed(
    messages: &[Message],
    options: &ChatOptions,
    change: &impl Fn(&str) -> String,
) -> (Vec<Message>, ChatOptions) {
    let optional = |text: &Option<String>| text.as_deref().map(change);
    let call = |call: &ToolCall| ToolCall {
        id: change(&call.id),
        name: change(&call.name),
        arguments: match escaped(&call.arguments) {
            // Unchanged arguments keep their spelling.
            Some(value) => {
                let changed = changed_json(&value, change);
                if changed == value { call.arguments.clone() } else { changed.to_string() }
            }
            None => change(&call.arguments),
        },
    };
    let message = |message: &Message| Message {
        role: message.role,
        content: change(&message.content),
        name: optional(&message.name),
        reasoning: optional(&message.reasoning),
        tool_calls: message.tool_calls.iter().map(call).collect(),
        tool_call_id: optional(&message.tool_call_id),
    };
    let tool = |tool: &Tool| Tool {
        name: change(&tool.name),
        description: optional(&tool.description),
        parameters: tool.parameters.as_ref().map(|schema| changed_json(schema, change)),
        strict: tool.strict,
    };
    let options = ChatOptions {
        tools: options.tools.iter().map(tool).collect(),
        template_variables: changed_map(&options.template_variables, change),
        ..options.clone()
    };
    (messages.iter().map(message).collect(), options)
}

/// Arguments whose JSON has escapes, which hide characters of its texts.
fn escaped(arguments: &str) -> Option<Value> {
    arguments.contains('\\').then(|| serde_json::from_str(arguments).ok()).flatten()
}

fn changed_json(value: &Value, change: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => items.iter().map(|item| changed_json(item, change)).collect(),
        Value::Object(map) => Value::Object(changed_map(map, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

fn changed_map(map: &Map<String, Value>, change: &impl Fn(&str) -> String) -> Map<String, Value> {
    map.iter().map(|(name, value)| (change(name), changed_json(value, change))).collect()
}
