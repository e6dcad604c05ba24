//! Turns messages into the values that a chat template renders.
//!
//! Templates that know tools get OpenAI's fields, with arguments as objects, as transformers passes
//! them. For other templates, tools, calls and results become text: a description in the system
//! message, calls in the assistant's text, and results in turns of the user.

use std::collections::HashMap;

use minijinja::Value;
use serde_json::{Map, Value as Json, json};

use hone_core::digest::sha256;
use hone_core::text::inexact_number;
use hone_core::types::{Message, Role, Tool, ToolCall};

use super::python::dumps;
use crate::tools::{ToolFormat, function_json, tool_json};

/// What a template can show, according to its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// The role `developer`.
    pub(super) developer: bool,
    /// Functions in the variable `tools` or `xml_tools`.
    pub(super) tools: bool,
    /// Functions as a text in the system message's `tools`: Phi 4's own template.
    pub(super) system_tools: bool,
    /// `tool_calls` of the assistant, and the role `tool`.
    pub(super) calls: bool,
}

/// One turn of the conversation that the template renders.
struct Turn {
    role: &'static str,
    /// `None` is Python's `None`: the assistant only calls tools.
    content: Option<String>,
    more: Vec<(&'static str, Value)>,
    /// Whether the text consists of results of tools, so that the next result joins it.
    is_results: bool,
}

impl Turn {
    fn text(role: &'static str, content: impl Into<String>) -> Self {
        Self { role, content: Some(content.into()), more: Vec::new(), is_results: false }
    }

    fn value(&self, silent: bool) -> Value {
        let content = match &self.content {
            Some(text) => Value::from(text.as_str()),
            None if silent => Value::from(()),
            None => Value::from(""),
        };
        let own = [("role", Value::from(self.role)), ("content", content)];
        own.into_iter().chain(self.more.iter().cloned()).collect()
    }
}

/// A conversation in the form that a template can show.
pub(super) struct Conversation {
    turns: Vec<Turn>,
    /// The variable `tools`.
    pub(super) tools: Value,
    /// The description of the tools, if Hone added a system message for it.
    added_system: Option<String>,
}

impl Conversation {
    /// Adapts messages and tools to the template.
    pub(super) fn new(
        messages: &[Message],
        tools: &[Tool],
        format: ToolFormat,
        able: Abilities,
    ) -> Self {
        let shows_calls = able.calls && format != ToolFormat::Prompt;
        let turns = turns(messages, format, able.developer, shows_calls);
        let mut own = Self { turns, tools: Value::from(()), added_system: None };
        if tools.is_empty() {
            return own;
        }
        if able.tools && format != ToolFormat::Prompt {
            own.tools = tools.iter().map(|tool| Value::from_serialize(tool_json(tool))).collect();
        } else if able.system_tools && format == ToolFormat::Phi {
            let list = Json::Array(tools.iter().map(function_json).collect());
            own.system().more.push(("tools", Value::from(dumps(&list))));
        } else {
            own.describe(description(tools, format));
        }
        own
    }

    /// The values of the turns.
    ///
    /// With `silent`, an assistant that only calls tools has the content `None`, as in OpenAI's clients;
    /// else an empty text, for templates that concatenate it.
    pub(super) fn values(&self, silent: bool) -> Vec<Value> {
        self.turns.iter().map(|turn| turn.value(silent)).collect()
    }

    /// Whether [`Self::values`] depends on `silent`.
    pub(super) fn has_silent_turns(&self) -> bool {
        self.turns.iter().any(|turn| turn.content.is_none())
    }

    /// The conversation with the description of the tools in the first turn of the user, for templates
    /// that refuse system messages; `None` if Hone added no system message.
    pub(super) fn without_added_system(mut self) -> Option<Self> {
        let description = self.added_system.take()?;
        self.turns.remove(0);
        let user = self.turns.iter_mut().find(|turn| turn.role == "user")?;
        let content = user.content.get_or_insert_default();
        *content = format!("{description}\n\n{content}");
        Some(self)
    }

    /// The system message, which becomes the first turn if there is no other.
    fn system(&mut self) -> &mut Turn {
        if self.turns.first().is_none_or(|turn| turn.role != "system") {
            self.turns.insert(0, Turn::text("system", ""));
        }
        // The branch above makes sure that there is a first turn.
        &mut self.turns[0]
    }

    /// Adds a description of the tools to the system message.
    fn describe(&mut self, description: String) {
        let is_new = self.turns.first().is_none_or(|turn| turn.role != "system");
        let content = self.system().content.get_or_insert_default();
        if is_new {
            content.clone_from(&description);
            self.added_system = Some(description);
        } else {
            content.push_str("\n\n");
            content.push_str(&description);
        }
    }
}

fn turns(
    messages: &[Message],
    format: ToolFormat,
    knows_developer: bool,
    shows_calls: bool,
) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::with_capacity(messages.len() + 1);
    // The function of each call so far, by the call's id.
    let mut called: HashMap<&str, &str> = HashMap::new();
    for message in messages {
        called.extend(message.tool_calls.iter().map(|call| (call.id.as_str(), call.name.as_str())));
        let role = match message.role {
            Role::Developer if !knows_developer => Role::System,
            role => role,
        };
        let mut turn = match role {
            Role::Tool if !shows_calls => {
                if format == ToolFormat::Phi {
                    // The template's role is the name of a token.
                    Turn::text("tool_response", message.content.as_str())
                } else {
                    let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
                    if let Some(last) = turns.last_mut().filter(|last| last.is_results) {
                        let content = last.content.get_or_insert_default();
                        content.push('\n');
                        content.push_str(&result);
                        continue;
                    }
                    Turn { is_results: true, ..Turn::text("user", result) }
                }
            }
            Role::Assistant if !message.tool_calls.is_empty() => {
                calling_turn(message, format, shows_calls)
            }
            role => Turn::text(role.as_str(), message.content.as_str()),
        };
        if role != Role::Tool || shows_calls {
            turn.more.extend(named_fields(message, format, &called));
        }
        turns.push(turn);
    }
    turns
}

/// The turn of an assistant that calls tools.
fn calling_turn(message: &Message, format: ToolFormat, shows_calls: bool) -> Turn {
    let said = &message.content;
    if shows_calls {
        let calls = message.tool_calls.iter().map(|call| call_value(call, format));
        return Turn {
            content: (!said.is_empty()).then(|| said.clone()),
            more: vec![("tool_calls", calls.collect())],
            ..Turn::text("assistant", "")
        };
    }
    let gap = if said.is_empty() { "" } else { "\n" };
    Turn::text("assistant", format!("{said}{gap}{}", written(&message.tool_calls, format)))
}

/// The fields of a message beside role, content and calls.
fn named_fields(
    message: &Message,
    format: ToolFormat,
    called: &HashMap<&str, &str>,
) -> Vec<(&'static str, Value)> {
    let mut fields = Vec::new();
    let id = message.tool_call_id.as_deref();
    // OpenAI's results name only the call, but some templates need the function.
    let function = id.filter(|_| message.role == Role::Tool).and_then(|id| called.get(id).copied());
    if let Some(name) = message.name.as_deref().or(function) {
        fields.push(("name", Value::from(name)));
    }
    if let Some(id) = id {
        fields.push(("tool_call_id", Value::from(shown_id(id, format))));
    }
    if let Some(reasoning) = &message.reasoning {
        // transformers passes it under both names.
        for name in ["reasoning_content", "thinking"] {
            fields.push((name, Value::from(reasoning.as_str())));
        }
    }
    fields
}

fn call_value(call: &ToolCall, format: ToolFormat) -> Value {
    Value::from_serialize(json!({
        "id": shown_id(&call.id, format),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments_json(&call.arguments)},
    }))
}

/// The arguments as an object, as in transformers; as a text if they are not one, or would lose digits.
fn arguments_json(arguments: &str) -> Json {
    if arguments.trim().is_empty() {
        return Json::Object(Map::new());
    }
    match serde_json::from_str(arguments) {
        Ok(object @ Json::Object(_)) if inexact_number(&object).is_none() => object,
        _ => Json::String(arguments.to_owned()),
    }
}

/// The id of a call as templates accept it. Mistral's accept nine letters and digits only.
fn shown_id(id: &str, format: ToolFormat) -> String {
    if format != ToolFormat::Mistral {
        return id.to_owned();
    }
    let mut own: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
    if own.len() < 9 {
        own = sha256(id);
    }
    own.split_off(own.len() - 9)
}

/// Calls as the model would have written them.
fn written(calls: &[ToolCall], format: ToolFormat) -> String {
    let framing = format.calls();
    let call = |call: &ToolCall| {
        dumps(&json!({"name": call.name, framing.arguments: arguments_json(&call.arguments)}))
    };
    let calls: Vec<String> = calls.iter().map(call).collect();
    format!("{}{}{}", framing.open, calls.join(framing.separator), framing.close)
}

/// Describes the functions, and how to call them, to a model whose template does not. The text is that of
/// Qwen's templates if the format is Hermes'.
fn description(tools: &[Tool], format: ToolFormat) -> String {
    let framing = format.calls();
    let list: String = tools.iter().map(|tool| format!("\n{}", dumps(&tool_json(tool)))).collect();
    let how = match format {
        ToolFormat::Hermes | ToolFormat::SmolLm3 | ToolFormat::Prompt => {
            "return a json object with function name and arguments within <tool_call></tool_call> \
             XML tags"
        }
        _ => "answer with a json object of function name and arguments in this form",
    };
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are \
         provided with function signatures within <tools></tools> XML tags:\n<tools>{list}\n</tools>\
         \n\nFor each function call, {how}:\n{}{{\"name\": <function-name>, \"{}\": \
         <args-json-object>}}{}",
        framing.open, framing.arguments, framing.close
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_every_digit() {
        let long = "{\"id\": 18446744073709551617}";
        assert_eq!(arguments_json(long), Json::String(long.to_owned()));
        assert_eq!(
            arguments_json("{\"id\": 1844674407370955161}")["id"],
            1_844_674_407_370_955_161_u64
        );
    }
}
