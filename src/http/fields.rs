//! Reads the fields of a JSON object; an error names the field, its value and what is allowed.
//! `null` is the same as absence, as OpenAI's clients mean it.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// One object of a request's body.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// `messages[0].` before the names in errors.
    prefix: String,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: String::new() }
    }

    /// The object at `path` (as `messages[0]`).
    pub(super) fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let map = value.as_object().ok_or_else(|| refuse(path, value, "an object"))?;
        Ok(Self { map, prefix: format!("{path}.") })
    }

    /// The field's full name.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The names of fields that are not null.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    /// Refuses a present field.
    pub(super) fn wrong(&self, name: &str, allowed: impl Display) -> ApiError {
        refuse(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// Refuses an absent field.
    pub(super) fn missing(&self, name: &str, what: impl Display) -> ApiError {
        let path = self.path(name);
        ApiError::field(&path, format!("{path} is missing: it must be {what}"))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let read = |v: &'a Value| v.as_str().ok_or_else(|| self.wrong(name, "a string"));
        self.get(name).map(read).transpose()
    }

    /// A string of at most `longest` characters.
    pub(super) fn short_text(
        &self,
        name: &str,
        longest: usize,
    ) -> Result<Option<&'a str>, ApiError> {
        match self.text(name)? {
            Some(text) if text.chars().count() > longest => {
                Err(self.wrong(name, format_args!("at most {longest} characters long")))
            }
            other => Ok(other),
        }
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let read = |v: &Value| v.as_bool().ok_or_else(|| self.wrong(name, "true or false"));
        self.get(name).map(read).transpose()
    }

    pub(super) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let read = |v: &Value| {
            v.as_f64().filter(|x| range.contains(x)).ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.wrong(name, format_args!("a number from {low} to {high}"))
            })
        };
        self.get(name).map(read).transpose()
    }

    pub(super) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let read = |v: &Value| {
            v.as_i64().filter(|x| range.contains(x)).ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.wrong(name, format_args!("a whole number from {low} to {high}"))
            })
        };
        self.get(name).map(read).transpose()
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        let read = |v: &'a Value| v.as_array().ok_or_else(|| self.wrong(name, "a list"));
        self.get(name).map(read).transpose()
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let read = |v: &'a Value| v.as_object().ok_or_else(|| self.wrong(name, "an object"));
        self.get(name).map(read).transpose()
    }
}

/// `path is value: it must be allowed`.
pub(super) fn refuse(path: &str, value: &Value, allowed: impl Display) -> ApiError {
    ApiError::field(path, format!("{path} is {}: it must be {allowed}", shown(value)))
}

/// A value in an error message, shortened.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
