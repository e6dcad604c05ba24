//! Turns rows into prompts: conversation, system message, worked examples and metadata.

mod messages;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use minijinja::{Environment, UndefinedBehavior};
use regex::Regex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use hone_core::digest::Digest;
use hone_core::text::{boxed, shortened, trim};
use hone_core::types::{Message, Role};

use crate::config::{DatasetConfig, FewShot};
use crate::error::{BadRow, DatasetError, RowPlace};
use crate::read::{DatasetRow, text_of};
use messages::parse_messages;

pub(crate) use messages::normalize;

/// Metadata key of the answer, which rewards read.
pub const ANSWER: &str = "answer";

const TEMPLATE: &str = "template";
const EXAMPLE: &str = "few_shot_answer";
/// Variable of the templates: what `dataset.extract_answer` finds.
const EXTRACTED: &str = "extracted_answer";
/// Number of extracted answers that a report shows.
const SHOWN_ANSWERS: usize = 3;
/// Length to which an error shortens an answer column without an answer.
const SHOWN_TEXT: usize = 80;

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

pub(crate) struct PromptBuilder<'a> {
    config: &'a DatasetConfig,
    templates: Environment<'a>,
    examples: Vec<Message>,
    /// Rows that are still to become examples.
    missing_examples: usize,
    /// `None` takes the whole answer column.
    extractor: Option<AnswerExtractor>,
    /// Counts of the current file.
    pub(crate) extraction: Extraction,
}

/// What `dataset.extract_answer` found in a file.
#[derive(Default)]
pub(crate) struct Extraction {
    pub(crate) answers: Vec<String>,
    pub(crate) missed: u64,
    pub(crate) first_missed: Option<BadRow>,
}

impl<'a> PromptBuilder<'a> {
    pub(crate) fn new(config: &'a DatasetConfig) -> Result<Self, DatasetError> {
        let mut templates = Environment::new();
        templates.set_undefined_behavior(UndefinedBehavior::Strict);
        for (key, source) in [(TEMPLATE, &config.template), (EXAMPLE, &config.few_shot_answer)] {
            templates.add_template(key, source).map_err(|error| {
                let reason = error.detail().unwrap_or("it is not a template");
                DatasetError::config(&format!("dataset.{key}"), source, reason)
            })?;
        }
        Ok(Self {
            config,
            templates,
            examples: examples(config),
            missing_examples: config.few_shot_rows,
            extractor: AnswerExtractor::new(&config.extract_answer)?,
            extraction: Extraction::default(),
        })
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
        own.push(Message::new(Role::Assistant, content));
        self.examples.extend(own);
        self.missing_examples -= 1;
        Ok(())
    }

    pub(crate) fn prompt(&mut self, row: &DatasetRow) -> Result<Prompt, BadRow> {
        let own = self.conversation(row)?;
        let metadata = self.metadata(row)?;
        let id = PromptId::of(&own);
        let messages = with_context(&self.config.system_prompt, &self.examples, own);
        Ok(Prompt { id, place: row.place, messages, metadata })
    }

    fn conversation(&self, row: &DatasetRow) -> Result<Vec<Message>, BadRow> {
        let c = self.config;
        let user = |content| vec![Message::new(Role::User, content)];
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

    fn metadata(&mut self, row: &DatasetRow) -> Result<BTreeMap<String, String>, BadRow> {
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
            let answer = self.extract(row.place, answer)?;
            if metadata.insert(ANSWER.to_owned(), answer).is_some() {
                let reason = format!("conflicts with dataset.answer_column, `{}`", c.answer_column);
                return Err(BadRow::column(row.place, ANSWER, reason));
            }
        }
        Ok(metadata)
    }

    /// The answer within the text of the answer column.
    fn extract(&mut self, place: RowPlace, text: String) -> Result<String, BadRow> {
        let Some(extractor) = &self.extractor else { return Ok(text) };
        if let Some(answer) = extractor.find(&text) {
            if self.extraction.answers.len() < SHOWN_ANSWERS {
                self.extraction.answers.push(answer.to_owned());
            }
            return Ok(answer.to_owned());
        }
        let (rule, text) = (&self.config.extract_answer, shortened(&text, SHOWN_TEXT));
        let reason = format!("is {text:?}, in which {EXTRACT} = {rule:?} finds no answer");
        let bad = BadRow::column(place, &self.config.answer_column, reason);
        self.extraction.missed += 1;
        self.extraction.first_missed.get_or_insert_with(|| bad.clone());
        Err(bad)
    }

    /// Whether the conversation comes from the prompt column. Otherwise that column is metadata.
    fn prompt_is_column(&self, row: &DatasetRow) -> bool {
        let messages = row.columns.get(&self.config.messages_column);
        self.config.template.is_empty() && messages.is_none_or(Value::is_null)
    }

    fn render(&self, key: &str, row: &DatasetRow) -> Result<String, BadRow> {
        // Without nulls, a template that uses one fails instead of rendering "none".
        let mut known: Map<String, Value> = row
            .columns
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        if let Some(extractor) = &self.extractor
            && let Some(text) = known.get(&self.config.answer_column).cloned().map(text_of)
            && let Some(answer) = extractor.find(&text)
        {
            known.insert(EXTRACTED.to_owned(), Value::from(answer));
        }
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

/// A conversation as the prompts of a dataset with this configuration have it: with
/// `dataset.system_prompt` and the examples of `dataset.few_shot`, without those of
/// `dataset.few_shot_rows`.
pub fn with_configured_context(config: &DatasetConfig, own: Vec<Message>) -> Vec<Message> {
    with_context(&config.system_prompt, &examples(config), own)
}

/// The messages of `dataset.few_shot`.
fn examples(config: &DatasetConfig) -> Vec<Message> {
    let turns = |example: &FewShot| {
        let user = Message::new(Role::User, example.user.clone());
        [user, Message::new(Role::Assistant, example.assistant.clone())]
    };
    config.few_shot.iter().flat_map(turns).collect()
}

/// Inserts the examples after the system messages of a conversation, which gets `system_prompt` if it
/// has none.
fn with_context(system_prompt: &str, examples: &[Message], own: Vec<Message>) -> Vec<Message> {
    let systems = own.iter().take_while(|message| is_system(message.role)).count();
    let mut messages = Vec::with_capacity(own.len() + examples.len() + 1);
    if systems == 0 && !system_prompt.is_empty() {
        messages.push(Message::new(Role::System, system_prompt));
    }
    let mut own = own.into_iter();
    messages.extend(own.by_ref().take(systems));
    messages.extend(examples.iter().cloned());
    messages.extend(own);
    messages
}

fn is_system(role: Role) -> bool {
    matches!(role, Role::System | Role::Developer)
}

// Finds the answer within the text of the answer column (`dataset.extract_answer`).

/// The configuration key.
const EXTRACT: &str = "dataset.extract_answer";
const BOXED: &str = r"\boxed{}";

/// Where the answer is within the answer column.
enum AnswerExtractor {
    /// After this text, up to its next occurrence or the end, as Python's `split(marker)[1]`.
    Marker(String),
    /// In the last `\boxed{…}`.
    Boxed,
    /// In the first group of the first match.
    Pattern(Regex),
}

impl AnswerExtractor {
    /// Reads the key's value. A text with a parenthesis is a pattern, because only that needs a
    /// group; any other text is a marker.
    fn new(rule: &str) -> Result<Option<Self>, DatasetError> {
        if rule.is_empty() {
            return Ok(None);
        }
        if rule == BOXED {
            return Ok(Some(Self::Boxed));
        }
        if !rule.contains('(') {
            return Ok(Some(Self::Marker(rule.to_owned())));
        }
        let error = |reason: String| DatasetError::config(EXTRACT, rule, reason);
        let pattern = Regex::new(rule).map_err(|cause| {
            let cause = cause.to_string();
            let last = cause.lines().last().unwrap_or_default().trim();
            error(format!("not a regular expression: {}", last.trim_start_matches("error: ")))
        })?;
        if pattern.captures_len() < 2 {
            return Err(error("it needs a group, in parentheses, around the answer".to_owned()));
        }
        Ok(Some(Self::Pattern(pattern)))
    }

    /// The answer, trimmed; `None` if there is none or it is blank.
    fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        let found = match self {
            Self::Marker(marker) => text.split(marker.as_str()).nth(1)?,
            Self::Boxed => boxed(text)?,
            Self::Pattern(pattern) => pattern.captures(text)?.get(1)?.as_str(),
        };
        Some(trim(found)).filter(|found| !found.is_empty())
    }
}

// Identifies prompts by their content.

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

// Selects the held-out prompts by a hash of their content and a seed, not by their place in the file.

/// A uniformly distributed 64-bit key: the first bytes of the SHA-256 of a purpose, numbers and a
/// prompt's id.
pub(crate) fn key(purpose: &str, numbers: &[u64], id: PromptId) -> u64 {
    let purpose = Digest::new().bytes(purpose);
    let digest = numbers.iter().fold(purpose, |digest, number| digest.bytes(number.to_le_bytes()));
    u64::from_le_bytes(digest.bytes(id.0.to_le_bytes()).prefix())
}

/// The ids to hold out: a fraction of them if `amount` is below 1, else that number, but never all.
///
/// A fraction selects the prompts whose key is below it, so a new row does not change the side of
/// any other prompt. A number selects the prompts with the smallest keys, so a new row can replace
/// only the one with the largest key. Rows with the same conversation have the same key, so no
/// conversation is on both sides.
pub(crate) fn held_out(ids: &BTreeSet<PromptId>, amount: f64, seed: u64) -> BTreeSet<PromptId> {
    let mut keyed: Vec<(u64, PromptId)> =
        ids.iter().map(|id| (key("hold out", &[seed], *id), *id)).collect();
    keyed.sort_unstable();
    let count = if amount < 1.0 {
        // 2^64, exactly.
        let below = amount * 18_446_744_073_709_551_616.0;
        keyed.iter().take_while(|(key, _)| (*key as f64) < below).count()
    } else {
        amount as usize
    };
    keyed.truncate(count.min(ids.len().saturating_sub(1)));
    keyed.into_iter().map(|(_, id)| id).collect()
}

#[cfg(test)]
mod tests;
