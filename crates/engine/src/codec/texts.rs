//! The texts of clients in a conversation: those of messages, calls, tools and template variables.

use std::borrow::Cow;

use serde_json::{Map, Value};

use hone_core::types::{ChatOptions, Message, Tool, ToolCall};

/// All texts.
pub(super) fn of<'a>(messages: &'a [Message], options: &'a ChatOptions) -> Vec<Cow<'a, str>> {
    let mut all: Vec<Cow<'a, str>> = Vec::with_capacity(messages.len());
    for message in messages {
        all.push(Cow::Borrowed(&message.content));
        let more = [&message.name, &message.reasoning, &message.tool_call_id];
        all.extend(more.into_iter().flatten().map(|text| Cow::Borrowed(text.as_str())));
        for call in &message.tool_calls {
            all.extend([Cow::Borrowed(call.id.as_str()), Cow::Borrowed(call.name.as_str())]);
            match escaped(&call.arguments) {
                Some(value) => add_json(&value, &mut |text| all.push(Cow::Owned(text.to_owned()))),
                None => all.push(Cow::Borrowed(&call.arguments)),
            }
        }
    }
    for tool in &options.tools {
        all.push(Cow::Borrowed(&tool.name));
        all.extend(tool.description.iter().map(|text| Cow::Borrowed(text.as_str())));
        if let Some(schema) = &tool.parameters {
            add_json(schema, &mut |text| all.push(Cow::Borrowed(text)));
        }
    }
    for (name, value) in &options.template_variables {
        all.push(Cow::Borrowed(name));
        add_json(value, &mut |text| all.push(Cow::Borrowed(text)));
    }
    all
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

fn add_json<'a>(value: &'a Value, add: &mut impl FnMut(&'a str)) {
    match value {
        Value::String(text) => add(text),
        Value::Array(items) => items.iter().for_each(|item| add_json(item, add)),
        Value::Object(map) => {
            for (name, value) in map {
                add(name);
                add_json(value, add);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
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
