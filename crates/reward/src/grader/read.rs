//! Reads the fields of a grader's JSON; errors contain the field's path and value.

use std::fmt::Display;

use serde_json::{Map, Value};

use super::formula::FormulaError;
use super::template::{Template, TemplateError};

/// An error in a grader's JSON. Paths lead to a field, as in `graders.x.operation`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraderError {
    /// A field has an invalid value, or is absent or null.
    #[error("{path} is {value}: it must be {allowed}")]
    Value {
        /// The field.
        path: String,
        /// Its value, truncated, or `missing`.
        value: String,
        /// The allowed values.
        allowed: String,
    },
    /// The grader's type has no such field.
    #[error("{path} is not a field of a {kind} grader: the fields are {fields}")]
    Unknown {
        /// The field.
        path: String,
        /// The grader's type.
        kind: &'static str,
        /// The fields it has.
        fields: String,
    },
    /// A template has an error.
    #[error("{path}: {error}")]
    Template {
        /// The field.
        path: String,
        /// The template's error.
        #[source]
        error: TemplateError,
    },
    /// A formula has an error.
    #[error("{path} is {formula:?}: {error}")]
    Formula {
        /// The field.
        path: String,
        /// The formula, truncated.
        formula: String,
        /// The formula's error.
        #[source]
        error: FormulaError,
    },
}

impl GraderError {
    /// The field's path.
    pub fn path(&self) -> &str {
        match self {
            Self::Value { path, .. }
            | Self::Unknown { path, .. }
            | Self::Template { path, .. }
            | Self::Formula { path, .. } => path,
        }
    }
}

/// An object in the JSON. A null field counts as absent.
#[derive(Clone, Copy)]
pub(super) struct GraderObject<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> GraderObject<'a> {
    /// The object at a path; the path of the whole grader may be empty.
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
        self.get(name).ok_or_else(|| GraderError::Value {
            path: self.path(name),
            value: "missing".to_owned(),
            allowed: allowed.to_owned(),
        })
    }

    pub(super) fn wrong(&self, name: &str, allowed: impl Display) -> GraderError {
        wrong(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// Refuses other fields than these, which are separated by spaces.
    pub(super) fn only(&self, kind: &'static str, fields: &str) -> Result<(), GraderError> {
        let unknown = |(name, value): &(&String, &Value)| {
            !value.is_null() && !fields.split(' ').any(|field| field == *name)
        };
        match self.map.iter().find(unknown) {
            Some((name, _)) => {
                let fields = fields.replace(' ', ", ");
                Err(GraderError::Unknown { path: self.path(name), kind, fields })
            }
            None => Ok(()),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, GraderError> {
        self.need(name, "a string")?.as_str().ok_or_else(|| self.wrong(name, "a string"))
    }

    /// The option that the field names.
    pub(super) fn choice<T: Copy>(
        &self,
        name: &str,
        options: &[(&'static str, T)],
    ) -> Result<(&'static str, T), GraderError> {
        let names: Vec<&str> = options.iter().map(|(known, _)| *known).collect();
        let allowed = format!("one of {}", names.join(", "));
        let word = self.need(name, &allowed)?.as_str();
        let option = options.iter().find(|(known, _)| Some(*known) == word);
        option.copied().ok_or_else(|| self.wrong(name, allowed))
    }

    pub(super) fn number(
        &self,
        name: &str,
        least: f64,
        most: f64,
    ) -> Result<Option<f64>, GraderError> {
        let fits = |value: &Value| value.as_f64().filter(|x| (least..=most).contains(x));
        let wrong = || self.wrong(name, format_args!("a number from {least} to {most}"));
        self.get(name).map(|value| fits(value).ok_or_else(wrong)).transpose()
    }

    pub(super) fn template(&self, name: &str) -> Result<Template, GraderError> {
        let error = |error| GraderError::Template { path: self.path(name), error };
        Template::parse(self.text(name)?).map_err(error)
    }

    /// A list of distinct strings, at least one.
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

pub(super) fn wrong(path: &str, value: &Value, allowed: impl Display) -> GraderError {
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    GraderError::Value { path: path.to_owned(), value: short(&text), allowed: allowed.to_string() }
}

/// At most the first 80 characters of `text`.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
