//! Renders chat templates with minijinja, as transformers' `apply_chat_template` does: jinja2 with
//! `trim_blocks`, `lstrip_blocks` and loop controls.
//!
//! `conversation` adapts messages and tools to what a template can show, `python` has the values and
//! filters that print as in Python, and `bounded` ends renderings that take too much.

mod bounded;
mod conversation;
mod python;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use minijinja::value::{Kwargs, merge_maps};
use minijinja::{Environment, Error, ErrorKind, State, Value, context};
use regex::{Captures, Regex};

use hone_core::digest::sha256;
use hone_core::types::{ChatOptions, Message};

use crate::error::EngineError;
use crate::tools::ToolFormat;
use bounded::{Bounded, BoundedTemplate};
use conversation::{Abilities, Conversation};
use python::{python, value_of, write_json};

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

#[cfg(test)]
mod tests;
