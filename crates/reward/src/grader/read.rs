//! Reading a grader's JSON, naming the path and the value of what is wrong.

use std::fmt::Display;

use serde_json::{Map, Value};

use super::formula::FormulaError;
use super::template::{Template, TemplateError};

/// What is wrong with a grader's JSON. Paths are those of its fields, as `graders.x.operation`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraderError {
    /// A field has a value that it cannot have.
    #[error("{path} is {value}: it must be {allowed}")]
    Value {
        /// The field.
        path: String,
        /// What it is, shortened.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// A field is absent or null.
    #[error("{path} is missing: it must be {allowed}")]
    Missing {
        /// The field.
        path: String,
        /// What it may be.
        allowed: String,
    },
    /// A field that such a grader does not have.
    #[error("{path} is not a field of a {kind} grader: the fields are {fields}")]
    Unknown {
        /// The field.
        path: String,
        /// The grader's type.
        kind: &'static str,
        /// The fields it has.
        fields: String,
    },
    /// A template.
    #[error("{path}: {error}")]
    Template {
        /// The field.
        path: String,
        /// What is wrong.
        error: TemplateError,
    },
    /// A formula.
    #[error("{path} is {formula:?}: {error}")]
    Formula {
        /// The field.
        path: String,
        /// The formula, shortened.
        formula: String,
        /// What is wrong.
        error: FormulaError,
    },
}

impl GraderError {
    /// The field's path.
    pub fn path(&self) -> &str {
        match self {
            Self::Value { path, .. }
            | Self::Missing { path, .. }
            | Self::Unknown { path, .. }
            | Self::Template { path, .. }
            | Self::Formula { path, .. } => path,
        }
    }
}

/// An object within the JSON; null fields are absent ones.
#[derive(Clone, Copy)]
pub(super) struct Object<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> Object<'a> {
    /// The object at a path; the whole grader's may be empty.
    pub(super) fn new(at: &'a str, value: &'a Value) -> Result<Self, GraderError> {
        let path = if at.is_empty() { "the grader" } else { at };
        let map = value.as_object().ok_or_else(|| wrong(path, value, "an object"))?;
        Ok(Self { map, at })
    }

    pub(super) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn need(&self, name: &str, allowed: &str) -> Result<&'a Value, GraderError> {
        let missing =
            || GraderError::Missing { path: self.path(name), allowed: allowed.to_owned() };
        self.get(name).ok_or_else(missing)
    }

    pub(super) fn wrong(&self, name: &str, allowed: impl Display) -> GraderError {
        wrong(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// Refuses fields other than these.
    pub(super) fn only(&self, kind: &'static str, fields: &[&str]) -> Result<(), GraderError> {
        let known = |name: &&String| fields.contains(&name.as_str());
        match self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k).find(|n| !known(n)) {
            Some(name) => {
                let fields = fields.join(", ");
                Err(GraderError::Unknown { path: self.path(name), kind, fields })
            }
            None => Ok(()),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, GraderError> {
        self.need(name, "a string")?.as_str().ok_or_else(|| self.wrong(name, "a string"))
    }

    /// One of these words, by its place.
    pub(super) fn choice(&self, name: &str, words: &[&str]) -> Result<usize, GraderError> {
        let allowed = format!("one of {}", words.join(", "));
        let word = self.need(name, &allowed)?.as_str();
        let place = word.and_then(|word| words.iter().position(|known| *known == word));
        place.ok_or_else(|| self.wrong(name, allowed))
    }

    pub(super) fn number(&self, name: &str, least: f64, most: f64) -> Found<f64> {
        let fits = |value: &Value| value.as_f64().filter(|x| (least..=most).contains(x));
        let wrong = || self.wrong(name, format_args!("a number from {least} to {most}"));
        self.get(name).map(|value| fits(value).ok_or_else(wrong)).transpose()
    }

    pub(super) fn template(&self, name: &str) -> Result<Template, GraderError> {
        let error = |error| GraderError::Template { path: self.path(name), error };
        Template::parse(self.text(name)?).map_err(error)
    }

    /// A list of strings, at least one, none twice.
    pub(super) fn words(&self, name: &str) -> Result<Vec<String>, GraderError> {
        const ALLOWED: &str = "a list of different strings, at least one";
        let list = self.need(name, ALLOWED)?.as_array();
        let words = |list: &Vec<Value>| -> Option<Vec<String>> {
            list.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        };
        let different = |list: &Vec<String>| {
            !list.is_empty() && list.iter().enumerate().all(|(at, word)| !list[..at].contains(word))
        };
        let words = list.filter(|list| list.len() <= 1000).and_then(words).filter(different);
        words.ok_or_else(|| self.wrong(name, ALLOWED))
    }
}

/// A field that may be absent.
pub(super) type Found<T> = Result<Option<T>, GraderError>;

pub(super) fn wrong(path: &str, value: &Value, allowed: impl Display) -> GraderError {
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    GraderError::Value { path: path.to_owned(), value: short(&text), allowed: allowed.to_string() }
}

/// At most 80 characters of it.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
