//! From a row to a prompt: its conversation, the system prompt, the worked examples, the metadata.

use std::collections::BTreeMap;
use std::fmt;

use minijinja::{Environment, UndefinedBehavior};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use hone_core::types::{Message, Role};

use super::error::{BadRow, DatasetError, RowPlace};
use super::read::DatasetRow;
use crate::DatasetConfig;

/// Metadata key of the answer, where rewards look for it.
pub const ANSWER: &str = "answer";

const TEMPLATE: &str = "template";
const EXAMPLE: &str = "few_shot_answer";

/// A prompt's content: the first 128 bits of the SHA-256 of the row's own conversation, without the
/// system prompt and the examples of the configuration. Rows that ask the same share it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptId(pub u128);

impl PromptId {
    /// The id of a conversation.
    pub fn of(messages: &[Message]) -> Self {
        let mut hash = Sha256::new();
        for message in messages {
            for part in [message.role.as_str(), &message.content] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        let mut first = [0; 16];
        first.copy_from_slice(&hash.finalize()[..16]);
        Self(u128::from_be_bytes(first))
    }

    /// Reads what `Display` wrote; `None` for anything else.
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

/// One prompt, ready to be sampled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its content.
    pub id: PromptId,
    /// Where its row stands.
    pub place: RowPlace,
    /// System prompt, examples and the row's conversation.
    pub messages: Vec<Message>,
    /// The other columns: texts as they are, anything else as JSON, nulls left out; the answer as
    /// [`ANSWER`].
    pub metadata: BTreeMap<String, String>,
}

/// Turns rows into prompts.
pub(super) struct PromptBuilder<'a> {
    config: &'a DatasetConfig,
    templates: Environment<'a>,
    examples: Vec<Message>,
    rows_wanted: usize,
}

impl<'a> PromptBuilder<'a> {
    /// Compiles the templates.
    pub fn new(config: &'a DatasetConfig) -> Result<Self, DatasetError> {
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
        Ok(Self { config, templates, examples, rows_wanted: config.few_shot_rows })
    }

    /// Rows of the file that are still wanted as examples.
    pub fn rows_wanted(&self) -> usize {
        self.rows_wanted
    }

    /// Makes the row an example of all prompts to come instead of a prompt.
    pub fn add_example(&mut self, row: &DatasetRow) -> Result<(), BadRow> {
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
        self.rows_wanted -= 1;
        Ok(())
    }

    /// The row as a prompt.
    pub fn prompt(&self, row: &DatasetRow) -> Result<Prompt, BadRow> {
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
                return messages(place, &c.messages_column, &value);
            }
            return messages(place, &c.messages_column, value);
        }
        match column(&c.prompt_column) {
            Some(Value::String(text)) if text.trim().is_empty() => {
                Err(BadRow::column(place, &c.prompt_column, "is empty"))
            }
            Some(Value::String(text)) => Ok(user(text.clone())),
            // As TRL's datasets have it.
            Some(value @ Value::Array(_)) => messages(place, &c.prompt_column, value),
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
                metadata.insert(name.clone(), super::plain(value.clone()));
            }
        }
        if !c.answer_column.is_empty() {
            let Some(answer) = metadata.remove(&c.answer_column) else {
                return Err(BadRow::column(row.place, &c.answer_column, "is missing"));
            };
            if metadata.insert(ANSWER.to_owned(), answer).is_some() {
                let reason = format!("stands beside dataset.answer_column, `{}`", c.answer_column);
                return Err(BadRow::column(row.place, ANSWER, reason));
            }
        }
        Ok(metadata)
    }

    /// Whether the conversation was read from the prompt's column; else that is metadata.
    fn prompt_is_column(&self, row: &DatasetRow) -> bool {
        let messages = row.columns.get(&self.config.messages_column);
        self.config.template.is_empty() && messages.is_none_or(Value::is_null)
    }

    fn render(&self, key: &str, row: &DatasetRow) -> Result<String, BadRow> {
        // Nulls are left out, so that a template which needs them fails rather than says "none".
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

/// A conversation that waits for the assistant's turn; other keys of a message are ignored.
fn messages(place: RowPlace, column: &str, value: &Value) -> Result<Vec<Message>, BadRow> {
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
                other => format!("is {}: {allowed}", shortened(&other.to_string())),
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
        Some(Role::Assistant) => Err(bad("ends with the assistant's turn; nothing is left to say")),
        Some(Role::System | Role::Developer) => Err(bad("asks nothing: it ends with the system's")),
        Some(Role::User | Role::Tool) => Ok(messages),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
