//! Renders chat templates with minijinja, as transformers' `apply_chat_template` does: jinja2 with
//! `trim_blocks`, `lstrip_blocks` and loop controls.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use regex::{Captures, Regex};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use hone_core::digest::sha256;
use hone_core::types::{Message, Role};

use crate::error::EngineError;

/// The template's name in its environment.
const NAME: &str = "chat_template";

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    knows_developer: bool,
    hash: String,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` (`bos_token`, …) are variables in it.
    ///
    /// # Errors
    /// [`EngineError::Component`] if the template does not parse.
    pub fn new(text: &str, special_tokens: &BTreeMap<String, String>) -> Result<Self, EngineError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, without_generation_blocks(text)?)
            .map_err(|error| EngineError::component("the chat template does not parse", error))?;
        let mut hash = sha256(text);
        hash.truncate(16);
        Ok(Self {
            environment,
            special_tokens: special_tokens.clone(),
            knows_developer: text.contains("developer"),
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
        let fail = |e: Error| {
            let reason = e.detail().map_or_else(|| e.to_string(), str::to_owned);
            EngineError::Invalid(format!("the chat template refuses these messages: {reason}"))
        };
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                let role = match message.role {
                    Role::Developer if !self.knows_developer => Role::System,
                    role => role,
                };
                Value::from_object(TemplateMessage { role, content: message.content.clone() })
            })
            .collect();
        let template = self.environment.get_template(NAME).map_err(fail)?;
        template
            .render(context! {
                messages,
                add_generation_prompt => true,
                tools => (),
                documents => (),
                ..Value::from_serialize(&self.special_tokens)
            })
            .map_err(fail)
    }

    /// First 16 hexadecimal digits of the SHA-256 of the template's text.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

/// A message that prints its keys in Python's order.
#[derive(Debug)]
struct TemplateMessage {
    role: Role,
    content: String,
}

impl Object for TemplateMessage {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(Value::from(self.role.as_str())),
            "content" => Some(Value::from(self.content.as_str())),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
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

/// `json.dumps(value, ensure_ascii=False, indent=indent)`. Jinja's filter would escape HTML.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Accepted and ignored, as in transformers. Templates pass the defaults.
    for option in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = kwargs.get(option)?;
    }
    kwargs.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width);
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter)),
    };
    let fail = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    written.map_err(|e| fail(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|e| fail(e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Writes JSON on one line with Python's separators `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: Role, content: &str) -> Message {
        Message::new(role, content)
    }

    fn render(template: &str, messages: &[Message]) -> Result<String, EngineError> {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate::new(template, &tokens)?.render(messages)
    }

    fn user(content: &str) -> Vec<Message> {
        vec![message(Role::User, content)]
    }

    #[test]
    fn trims_blocks_like_jinja() {
        let template = "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n\
                        [{{ m['content'].strip() }}]\n  {% endif %}\n{% endfor %}\n\
                        {%- if add_generation_prompt %}<a>{% endif %}";
        assert_eq!(render(template, &user("  hi ")).unwrap(), "<s>[hi]\n<a>");
    }

    #[test]
    fn prints_json_like_python() {
        let template = "{{ messages[0] | tojson }} {{ [1, 'ü'] | tojson(indent=2) }}";
        let text = render(template, &user("a<b>&'\"")).unwrap();
        assert_eq!(text, "{\"role\": \"user\", \"content\": \"a<b>&'\\\"\"} [\n  1,\n  \"ü\"\n]");
    }

    #[test]
    fn a_refusal_has_the_templates_message() {
        let error = render("{{ raise_exception('no system role here') }}", &user("x"));
        assert_eq!(
            error.unwrap_err().to_string(),
            "the chat template refuses these messages: no system role here"
        );
    }

    #[test]
    fn supports_features_of_published_templates() {
        let template = "{% if tools is not none %}tools{% endif %}\
            {% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\
            {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}\
            {{ strftime_now('%Y') | length }}{{ 'a,b'.split(',')[1] }}{{ missing.none_is_fine is defined }}";
        let messages = [message(Role::User, "one"), message(Role::User, "two")];
        // An attribute of an undefined value is an error in jinja2, too.
        assert!(render(template, &messages).is_err());
        let template = template.replace("missing.none_is_fine", "missing");
        assert_eq!(render(&template, &messages).unwrap(), "one4bFalse");
    }

    #[test]
    fn a_bad_date_format_is_an_error() {
        assert!(render("{{ strftime_now('%Q!') }}", &user("x")).is_err());
    }

    #[test]
    fn developer_becomes_system_in_templates_without_that_role() {
        let dev = [message(Role::Developer, "d")];
        assert_eq!(render("{{ messages[0].role }}", &dev).unwrap(), "system");
        let knows = "{# developer #}{{ messages[0].role }}";
        assert_eq!(render(knows, &dev).unwrap(), "developer");
    }

    #[test]
    fn the_hash_is_that_of_the_text() {
        let hash =
            |text: &str| ChatTemplate::new(text, &BTreeMap::new()).unwrap().hash().to_owned();
        assert_eq!(hash("abc"), "ba7816bf8f01cfea");
    }
}
