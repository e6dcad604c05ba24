//! Renders chat templates with minijinja, as transformers' `apply_chat_template` does: jinja2 with
//! `trim_blocks`, `lstrip_blocks` and loop controls.
//!
//! Messages and tools are adapted to what a template can show. `python` has the values and filters that print as in
//! Python, and `bounded` ends renderings that take too much.

mod bounded;
mod python;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use minijinja::value::{Kwargs, merge_maps};
use minijinja::{Environment, Error, ErrorKind, State, Value, context};
use regex::{Captures, Regex};
use serde_json::{Map, Value as Json, json};

use hone_core::digest::sha256;
use hone_core::text::inexact_number;
use hone_core::types::{ChatOptions, Message, Role, Tool, ToolCall};

use crate::error::EngineError;
use crate::tools::{ToolFormat, function_json, tool_json};
use bounded::{Bounded, BoundedTemplate};
use python::{dumps, python, value_of, write_json};

/// The texts around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkTags {
    /// The text before the reasoning.
    pub open: &'static str,
    /// The text after the reasoning.
    pub close: &'static str,
}

/// The tags that are in use.
const THINK_TAGS: [ThinkTags; 2] = [
    ThinkTags { open: "<think>", close: "</think>" },
    ThinkTags { open: "[THINK]", close: "[/THINK]" },
];

/// A compiled chat template.
pub struct ChatTemplate {
    template: BoundedTemplate,
    special_tokens: BTreeMap<String, String>,
    able: Abilities,
    /// Whether functions are in the variable `xml_tools`, as in SmolLM3's template.
    has_xml_tools: bool,
    format: ToolFormat,
    think_tags: Option<ThinkTags>,
    hash: String,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` (`bos_token`, …) are variables in it.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the template does not parse.
    pub fn new(text: &str, special_tokens: &BTreeMap<String, String>) -> Result<Self, EngineError> {
        let fail = |error| EngineError::component("the chat template does not parse", error);
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let iterable = |value: Value| !value.is_none() && value.try_iter().is_ok();
        environment.add_test("iterable", iterable);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        let template = without_generation_blocks(text)?;
        let template = BoundedTemplate::new(environment, template).map_err(fail)?;
        let system_tools = ["message['tools']", "message[\"tools\"]", "message.tools"];
        let variables = template.variables();
        let has_xml_tools = variables.contains("xml_tools");
        let able = Abilities {
            developer: text.contains("developer"),
            tools: has_xml_tools || variables.contains("tools"),
            system_tools: system_tools.iter().any(|part| text.contains(part)),
            calls: text.contains("tool_calls"),
        };
        let shows_tools = able.tools || able.system_tools;
        let mut hash = sha256(text);
        hash.truncate(16);
        Ok(Self {
            template,
            special_tokens: special_tokens.clone(),
            able,
            has_xml_tools,
            format: if shows_tools { ToolFormat::of_template(text) } else { ToolFormat::Prompt },
            think_tags: THINK_TAGS.into_iter().find(|tags| text.contains(tags.close)),
            hash,
        })
    }

    /// The conversation as text, with the generation prompt.
    ///
    /// A `developer` message becomes `system` if the template never mentions `developer`.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] with the template's message if it refuses the conversation.
    pub fn render(&self, messages: &[Message]) -> Result<String, EngineError> {
        self.render_with(messages, &ChatOptions::default(), self.format, true)
    }

    /// [`Self::render`] with the functions that the model may call, and with the options' variables.
    ///
    /// Functions, calls and results are shown as the template does, or as text in `format` if it
    /// cannot. `generate` adds the generation prompt.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] with the template's message if it refuses the conversation.
    pub fn render_with(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        format: ToolFormat,
        generate: bool,
    ) -> Result<String, EngineError> {
        let render = |messages: Vec<Value>, tools: &Value| {
            self.render_values(messages, tools, options, generate)
        };
        let shown = Conversation::new(messages, options.callable(), format, self.able);
        let first = render(shown.values(true), &shown.tools);
        let result = match first {
            Err(first) if shown.has_silent_turns() => {
                let second = render(shown.values(false), &shown.tools);
                second.map_err(|_| first)
            }
            other => other,
        };
        result.or_else(|error| {
            let other = shown.without_added_system();
            let other = other.map(|c| render(c.values(false), &c.tools));
            other.and_then(Result::ok).ok_or(error)
        })
    }

    fn render_values(
        &self,
        messages: Vec<Value>,
        tools: &Value,
        options: &ChatOptions,
        generate: bool,
    ) -> Result<String, EngineError> {
        let fail = |e: Error| {
            let reason = e.detail().map_or_else(|| e.to_string(), str::to_owned);
            EngineError::Invalid(format!("the chat template refuses these messages: {reason}"))
        };
        let given = options.template_variables.iter();
        let mut variables: Vec<(&str, Value)> =
            given.map(|(name, value)| (name.as_str(), value_of(value))).collect();
        if self.has_xml_tools && !tools.is_none() {
            variables.push(("xml_tools", tools.clone()));
        }
        let special_tokens = Value::from_serialize(&self.special_tokens);
        let context = context! {
            messages => python(Value::from(messages)),
            add_generation_prompt => generate,
            tools => tools.clone(),
            documents => (),
            ..merge_maps([special_tokens, Value::from_iter(variables)])
        };
        self.template.render(context).map_err(fail)
    }

    /// The format of calls that the template shows.
    pub fn tool_format(&self) -> ToolFormat {
        self.format
    }

    /// The texts around reasoning, if the template mentions them.
    pub fn think_tags(&self) -> Option<ThinkTags> {
        self.think_tags
    }

    /// First 16 hexadecimal digits of the SHA-256 of the template's text.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

/// Replaces `{% generation %}` blocks, which mark the assistant's tokens for training masks and
/// print nothing else, by `{% if true %}`.
fn without_generation_blocks(text: &str) -> Result<String, EngineError> {
    let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
        .map_err(|error| EngineError::component("chat template", error))?;
    let replace = |tag: &Captures| {
        let statement = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {statement} {}%}}", &tag[1], &tag[3])
    };
    Ok(tag.replace_all(text, replace).into_owned())
}

/// The filter `tojson`.
fn to_json(state: &State, value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let mut text = String::new();
    write_json(&value, &kwargs, &mut Bounded::new(state, &mut text))?;
    Ok(Value::from_safe_string(text))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot read {format:?}"))
    })?;
    Ok(text)
}

// Messages as the values that a template renders. Templates that know tools get OpenAI's fields, with arguments as
// objects, as transformers passes them. For other templates, tools, calls and results become text: a description in the
// system message, calls in the assistant's text, and results in turns of the user.

/// What a template can show, according to its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Abilities {
    /// The role `developer`.
    developer: bool,
    /// Functions in the variable `tools` or `xml_tools`.
    tools: bool,
    /// Functions as a text in the system message's `tools`: Phi 4's own template.
    system_tools: bool,
    /// `tool_calls` of the assistant, and the role `tool`.
    calls: bool,
}

/// One turn of the conversation that the template renders: its `role`, its `content` and further fields. The content is
/// null, Python's `None`, if the assistant only calls tools.
type Turn = Map<String, Json>;

fn turn(role: &str, content: &str) -> Turn {
    let fields = [("role", role), ("content", content)];
    fields.into_iter().map(|(key, text)| (key.to_owned(), Json::from(text))).collect()
}

/// Adds to the content of a turn.
fn append(turn: &mut Turn, gap: &str, more: &str) {
    let said = turn["content"].as_str().unwrap_or_default();
    turn["content"] = Json::from(format!("{said}{gap}{more}"));
}

fn has_role(turn: Option<&Turn>, role: &str) -> bool {
    turn.is_some_and(|turn| turn["role"] == role)
}

/// A conversation in the form that a template can show.
struct Conversation {
    turns: Vec<Turn>,
    /// The variable `tools`.
    tools: Value,
    /// The description of the tools, if Hone added a system message for it.
    added_system: Option<String>,
}

impl Conversation {
    /// Adapts messages and tools to the template.
    fn new(messages: &[Message], tools: &[Tool], format: ToolFormat, able: Abilities) -> Self {
        let shows_calls = able.calls && format != ToolFormat::Prompt;
        let turns = turns(messages, format, able.developer, shows_calls);
        let mut own = Self { turns, tools: Value::from(()), added_system: None };
        if tools.is_empty() {
            return own;
        }
        if able.tools && format != ToolFormat::Prompt {
            own.tools = python(tools.iter().map(|tool| value_of(&tool_json(tool))).collect());
        } else if able.system_tools && format == ToolFormat::Phi {
            let list = Json::Array(tools.iter().map(function_json).collect());
            own.system().insert("tools".to_owned(), Json::from(dumps(&list)));
        } else {
            own.describe(description(tools, format));
        }
        own
    }

    /// The values of the turns.
    ///
    /// With `silent`, an assistant that only calls tools has the content `None`, as in OpenAI's clients;
    /// else an empty text, for templates that concatenate it.
    fn values(&self, silent: bool) -> Vec<Value> {
        let value = |turn: &Turn| {
            if silent || !turn["content"].is_null() {
                return value_of(turn);
            }
            let mut shown = turn.clone();
            shown["content"] = Json::from("");
            value_of(&shown)
        };
        self.turns.iter().map(value).collect()
    }

    /// Whether [`Self::values`] depends on `silent`.
    fn has_silent_turns(&self) -> bool {
        self.turns.iter().any(|turn| turn["content"].is_null())
    }

    /// The conversation with the description of the tools in the first turn of the user, for templates
    /// that refuse system messages; `None` if Hone added no system message.
    fn without_added_system(mut self) -> Option<Self> {
        let description = self.added_system.take()?;
        self.turns.remove(0);
        let user = self.turns.iter_mut().find(|turn| turn["role"] == "user")?;
        let content = user["content"].as_str().unwrap_or_default();
        user["content"] = Json::from(format!("{description}\n\n{content}"));
        Some(self)
    }

    /// The system message, which becomes the first turn if there is no other.
    fn system(&mut self) -> &mut Turn {
        if !has_role(self.turns.first(), "system") {
            self.turns.insert(0, turn("system", ""));
        }
        // The branch above makes sure that there is a first turn.
        &mut self.turns[0]
    }

    /// Adds a description of the tools to the system message.
    fn describe(&mut self, description: String) {
        let is_new = !has_role(self.turns.first(), "system");
        append(self.system(), if is_new { "" } else { "\n\n" }, &description);
        self.added_system = is_new.then_some(description);
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
    // Whether the last turn has results of tools, which the next result joins.
    let mut in_results = false;
    for message in messages {
        called.extend(message.tool_calls.iter().map(|call| (call.id.as_str(), call.name.as_str())));
        let role = match message.role {
            Role::Developer if !knows_developer => Role::System,
            role => role,
        };
        let mut next = match role {
            // The template's role is the name of a token.
            Role::Tool if !shows_calls && format == ToolFormat::Phi => {
                turn("tool_response", &message.content)
            }
            Role::Tool if !shows_calls => {
                let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
                if in_results && let Some(last) = turns.last_mut() {
                    append(last, "\n", &result);
                    continue;
                }
                turn("user", &result)
            }
            Role::Assistant if !message.tool_calls.is_empty() => {
                calling_turn(message, format, shows_calls)
            }
            role => turn(role.as_str(), &message.content),
        };
        in_results = role == Role::Tool;
        if role != Role::Tool || shows_calls {
            add_fields(&mut next, message, format, &called);
        }
        turns.push(next);
    }
    turns
}

/// The turn of an assistant that calls tools.
fn calling_turn(message: &Message, format: ToolFormat, shows_calls: bool) -> Turn {
    let mut own = turn("assistant", &message.content);
    if !shows_calls {
        let gap = if message.content.is_empty() { "" } else { "\n" };
        append(&mut own, gap, &written(&message.tool_calls, format));
        return own;
    }
    if message.content.is_empty() {
        own["content"] = Json::Null;
    }
    let call = |call: &ToolCall| {
        let arguments = arguments_json(&call.arguments);
        let function = json!({"name": call.name, "arguments": arguments});
        json!({"id": shown_id(&call.id, format), "type": "function", "function": function})
    };
    own.insert("tool_calls".to_owned(), message.tool_calls.iter().map(call).collect());
    own
}

/// Adds the fields of a message beside role, content and calls.
fn add_fields(
    turn: &mut Turn,
    message: &Message,
    format: ToolFormat,
    called: &HashMap<&str, &str>,
) {
    let mut add = |key: &str, text: &str| turn.insert(key.to_owned(), Json::from(text));
    let id = message.tool_call_id.as_deref();
    // OpenAI's results name only the call, but some templates need the function.
    let function = id.filter(|_| message.role == Role::Tool).and_then(|id| called.get(id).copied());
    if let Some(name) = message.name.as_deref().or(function) {
        add("name", name);
    }
    if let Some(id) = id {
        add("tool_call_id", &shown_id(id, format));
    }
    if let Some(reasoning) = &message.reasoning {
        // transformers passes it under both names.
        add("reasoning_content", reasoning);
        add("thinking", reasoning);
    }
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
mod tests;
