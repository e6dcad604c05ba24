//! Turns rows into prompts: conversation, system message, worked examples and metadata.

use std::collections::BTreeMap;
use std::fmt;

use minijinja::{Environment, UndefinedBehavior};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use hone_core::digest::Digest;
use hone_core::text::shortened;
use hone_core::types::{Message, Role};

use crate::config::DatasetConfig;
use crate::error::{BadRow, DatasetError, RowPlace};
use crate::read::{DatasetRow, text_of};

/// Metadata key of the answer, which rewards read.
pub const ANSWER: &str = "answer";

const TEMPLATE: &str = "template";
const EXAMPLE: &str = "few_shot_answer";

/// Identifies a prompt by its content: the first 128 bits of the SHA-256 of the row's conversation,
/// without the configuration's system message and examples. Rows with the same conversation share
/// it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptId(pub u128);

impl PromptId {
    /// The id of a conversation.
    pub fn of(messages: &[Message]) -> Self {
        let digest = messages.iter().fold(Digest::new(), |digest, message| {
            digest.field(message.role.as_str()).field(&message.content)
        });
        Self(u128::from_be_bytes(digest.prefix()))
    }

    /// Parses the output of `Display`; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        hex.then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for PromptId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PromptId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("a prompt id has 32 hex digits"))
    }
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Identifies the content.
    pub id: PromptId,
    /// Position of its row.
    pub place: RowPlace,
    /// System message, worked examples and the row's conversation.
    pub messages: Vec<Message>,
    /// The other columns, without nulls: texts unchanged, other values as JSON, and the answer
    /// under [`ANSWER`].
    pub metadata: BTreeMap<String, String>,
}

/// Turns rows into prompts.
pub(crate) struct PromptBuilder<'a> {
    config: &'a DatasetConfig,
    templates: Environment<'a>,
    examples: Vec<Message>,
    /// Rows that are still to become examples.
    missing_examples: usize,
}

impl<'a> PromptBuilder<'a> {
    /// Compiles the templates.
    pub(crate) fn new(config: &'a DatasetConfig) -> Result<Self, DatasetError> {
        let mut templates = Environment::new();
        templates.set_undefined_behavior(UndefinedBehavior::Strict);
        for (key, source) in [(TEMPLATE, &config.template), (EXAMPLE, &config.few_shot_answer)] {
            templates.add_template(key, source).map_err(|error| DatasetError::Config {
                key: format!("dataset.{key}"),
                value: source.clone(),
                reason: error.detail().unwrap_or("it is not a template").to_owned(),
            })?;
        }
        let mut examples = Vec::new();
        for example in &config.few_shot {
            examples.push(Message { role: Role::User, content: example.user.clone() });
            examples.push(Message { role: Role::Assistant, content: example.assistant.clone() });
        }
        Ok(Self { config, templates, examples, missing_examples: config.few_shot_rows })
    }

    /// Whether the next usable row is to become a worked example.
    pub(crate) fn needs_example(&self) -> bool {
        self.missing_examples > 0
    }

    /// Makes the row a worked example of all later prompts.
    pub(crate) fn add_example(&mut self, row: &DatasetRow) -> Result<(), BadRow> {
        let mut own = self.conversation(row)?;
        own.retain(|message| !is_system(message.role));
        let place = row.place;
        let [Message { role: Role::User, .. }] = own[..] else {
            let reason = "cannot be an example of dataset.few_shot_rows: its conversation is not \
                          one question of the user";
            return Err(BadRow::whole(place, reason));
        };
        self.metadata(row)?;
        let content = self.render(EXAMPLE, row)?;
        own.push(Message { role: Role::Assistant, content });
        self.examples.extend(own);
        self.missing_examples -= 1;
        Ok(())
    }

    /// Makes the row a prompt.
    pub(crate) fn prompt(&self, row: &DatasetRow) -> Result<Prompt, BadRow> {
        let own = self.conversation(row)?;
        let metadata = self.metadata(row)?;
        let id = PromptId::of(&own);
        let systems = own.iter().take_while(|message| is_system(message.role)).count();
        let mut messages = Vec::with_capacity(own.len() + self.examples.len() + 1);
        if systems == 0 && !self.config.system_prompt.is_empty() {
            let content = self.config.system_prompt.clone();
            messages.push(Message { role: Role::System, content });
        }
        let mut own = own.into_iter();
        messages.extend(own.by_ref().take(systems));
        messages.extend(self.examples.iter().cloned());
        messages.extend(own);
        Ok(Prompt { id, place: row.place, messages, metadata })
    }

    fn conversation(&self, row: &DatasetRow) -> Result<Vec<Message>, BadRow> {
        let c = self.config;
        let user = |content| vec![Message { role: Role::User, content }];
        if !c.template.is_empty() {
            return self.render(TEMPLATE, row).map(user);
        }
        let column = |name: &str| row.columns.get(name).filter(|value| !value.is_null());
        let place = row.place;
        if let Some(value) = column(&c.messages_column) {
            if let (Value::String(text), true) = (value, row.cells_are_text) {
                let value: Value = serde_json::from_str(text).map_err(|error| {
                    BadRow::column(place, &c.messages_column, format!("is not JSON: {error}"))
                })?;
                return parse_messages(place, &c.messages_column, &value);
            }
            return parse_messages(place, &c.messages_column, value);
        }
        match column(&c.prompt_column) {
            Some(Value::String(text)) if text.trim().is_empty() => {
                Err(BadRow::column(place, &c.prompt_column, "is empty"))
            }
            Some(Value::String(text)) => Ok(user(text.clone())),
            // TRL's datasets have conversations in this column.
            Some(value @ Value::Array(_)) => parse_messages(place, &c.prompt_column, value),
            Some(_) => {
                let reason = "is neither a text nor a list of messages";
                Err(BadRow::column(place, &c.prompt_column, reason))
            }
            None => {
                let reason = format!("is missing, and so is `{}`", c.prompt_column);
                Err(BadRow::column(place, &c.messages_column, reason))
            }
        }
    }

    fn metadata(&self, row: &DatasetRow) -> Result<BTreeMap<String, String>, BadRow> {
        let c = self.config;
        let mut metadata = BTreeMap::new();
        for (name, value) in &row.columns {
            let is_prompt = *name == c.messages_column
                || (*name == c.prompt_column && self.prompt_is_column(row));
            if !is_prompt && !value.is_null() {
                metadata.insert(name.clone(), text_of(value.clone()));
            }
        }
        if !c.answer_column.is_empty() {
            let Some(answer) = metadata.remove(&c.answer_column) else {
                return Err(BadRow::column(row.place, &c.answer_column, "is missing"));
            };
            if metadata.insert(ANSWER.to_owned(), answer).is_some() {
                let reason = format!("conflicts with dataset.answer_column, `{}`", c.answer_column);
                return Err(BadRow::column(row.place, ANSWER, reason));
            }
        }
        Ok(metadata)
    }

    /// Whether the conversation comes from the prompt column. Otherwise that column is metadata.
    fn prompt_is_column(&self, row: &DatasetRow) -> bool {
        let messages = row.columns.get(&self.config.messages_column);
        self.config.template.is_empty() && messages.is_none_or(Value::is_null)
    }

    fn render(&self, key: &str, row: &DatasetRow) -> Result<String, BadRow> {
        // Without nulls, a template that uses one fails instead of rendering "none".
        let known: Map<String, Value> = row
            .columns
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let rendered = self.templates.get_template(key).and_then(|t| t.render(&known));
        let text = rendered.map_err(|error| {
            let mut columns: Vec<&str> = known.keys().map(String::as_str).collect();
            columns.sort_unstable();
            let reason = format!(
                "dataset.{key} fails: {error}; the row's columns are {}",
                columns.join(", ")
            );
            BadRow::whole(row.place, reason)
        })?;
        if text.trim().is_empty() {
            return Err(BadRow::whole(row.place, format!("dataset.{key} renders to nothing")));
        }
        Ok(text)
    }
}

fn is_system(role: Role) -> bool {
    matches!(role, Role::System | Role::Developer)
}

/// Reads a conversation, which must end with a user or tool message. Ignores other keys of a
/// message.
fn parse_messages(place: RowPlace, column: &str, value: &Value) -> Result<Vec<Message>, BadRow> {
    let bad = |reason: &str| BadRow::column(place, column, reason);
    let Value::Array(items) = value else {
        return Err(bad("is not a list of {role, content}"));
    };
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let at = |key: &str| format!("{column}[{index}]{key}");
        let Value::Object(item) = item else {
            return Err(BadRow::column(place, at(""), "is not an object {role, content}"));
        };
        let role = item.get("role").cloned().unwrap_or_default();
        let role = serde_json::from_value(role.clone()).map_err(|_| {
            let allowed = "it must be system, developer, user, assistant or tool";
            let reason = match role {
                Value::Null => format!("is missing: {allowed}"),
                other => format!("is {}: {allowed}", shortened(&other.to_string(), 40)),
            };
            BadRow::column(place, at(".role"), reason)
        })?;
        let content = match item.get("content") {
            Some(Value::String(content)) => content.clone(),
            None | Some(Value::Null) => {
                return Err(BadRow::column(place, at(".content"), "is missing"));
            }
            Some(_) => return Err(BadRow::column(place, at(".content"), "is not a text")),
        };
        messages.push(Message { role, content });
    }
    match messages.last().map(|last| last.role) {
        None => Err(bad("is empty")),
        Some(Role::Assistant) => {
            Err(bad("ends with the assistant's turn, so there is no reply to sample"))
        }
        Some(Role::System | Role::Developer) => {
            Err(bad("ends with a system message, so there is no question to answer"))
        }
        Some(Role::User | Role::Tool) => Ok(messages),
    }
}
