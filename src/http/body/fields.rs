//! Reads the fields of a JSON object.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::field::{Field, FieldTable, fields_of};
use crate::http::error::ApiError;

/// Largest number of names that the error for an unknown field lists.
const MAX_LISTED: usize = 10;

/// The fields of one JSON object in a request body.
#[derive(Clone)]
pub(in crate::http) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object in the body, such as `messages[0].`, which errors put before names.
    prefix: String,
}

impl<'a> Fields<'a> {
    pub(in crate::http) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: String::new() }
    }

    /// [`Self::new`] for an object with the fields of a table. Those whose kind is not
    /// [`Field::json`] have valid values then.
    pub(in crate::http) fn of(
        map: &'a Map<String, Value>,
        table: FieldTable,
    ) -> Result<Self, ApiError> {
        let fields = Self::new(map);
        if let Some(name) = fields.names().find(|name| !fields_of(table).any(|f| f.name == *name)) {
            return Err(unknown(name, table));
        }
        for field in fields_of(table) {
            fields.check(field)?;
        }
        Ok(fields)
    }

    fn check(&self, field: &Field) -> Result<(), ApiError> {
        let name = field.name;
        let Some(value) = self.get(name) else { return Ok(()) };
        if let Some(reason) = field.effect.refusal(value) {
            return Err(ApiError::unsupported(name, format!("{name} {reason}")));
        }
        match field.kind.problem(value) {
            Some(allowed) => Err(self.invalid(name, allowed)),
            None => Ok(()),
        }
    }

    /// The value of a field that its table declares as a number.
    pub(in crate::http) fn float(&self, name: &str) -> Option<f64> {
        self.get(name).and_then(Value::as_f64)
    }

    /// The value of a field that its table declares as a whole number.
    pub(in crate::http) fn whole(&self, name: &str) -> Option<i64> {
        self.get(name).and_then(Value::as_i64)
    }

    /// The object at `path`, such as `messages[0]`.
    pub(in crate::http) fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let map = value.as_object().ok_or_else(|| invalid(path, value, "an object"))?;
        Ok(Self { map, prefix: format!("{path}.") })
    }

    /// The full path of a field.
    pub(in crate::http) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(in crate::http) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The names of the present fields.
    pub(in crate::http) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    /// The error for a present field with a wrong value.
    pub(in crate::http) fn invalid(&self, name: &str, allowed: impl Display) -> ApiError {
        invalid(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// The error for an absent field.
    pub(in crate::http) fn missing(&self, name: &str, allowed: impl Display) -> ApiError {
        let path = self.path(name);
        ApiError::field(&path, format!("{path} is missing: it must be {allowed}"))
    }

    /// Converts a field if it is present; `convert` returns `None` for a wrong value.
    pub(in crate::http) fn read<T>(
        &self,
        name: &str,
        allowed: impl Display,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let read = |value| convert(value).ok_or_else(|| self.invalid(name, allowed));
        self.get(name).map(read).transpose()
    }

    pub(in crate::http) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A string of at most `longest` characters.
    pub(in crate::http) fn short_text(
        &self,
        name: &str,
        longest: usize,
    ) -> Result<Option<&'a str>, ApiError> {
        match self.text(name)? {
            Some(text) if text.chars().count() > longest => {
                Err(self.invalid(name, format_args!("at most {longest} characters long")))
            }
            other => Ok(other),
        }
    }

    pub(in crate::http) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(in crate::http) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let allowed = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, allowed, |v| v.as_f64().filter(|x| range.contains(x)))
    }

    pub(in crate::http) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let allowed = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(name, allowed, |v| v.as_i64().filter(|x| range.contains(x)))
    }

    pub(in crate::http) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub(in crate::http) fn object(
        &self,
        name: &str,
    ) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }
}

/// The error for a field that a table does not have.
fn unknown(name: &str, table: FieldTable) -> ApiError {
    let names: Vec<_> = fields_of(table).map(|field| field.name).collect();
    let message = if names.len() > MAX_LISTED {
        format!("{name} is not a known field")
    } else {
        format!("{name} is not a field: the fields are {}", names.join(", "))
    };
    ApiError::unsupported(name, message)
}

/// The error `path is value: it must be allowed`.
pub(in crate::http) fn invalid(path: &str, value: &Value, allowed: impl Display) -> ApiError {
    ApiError::field(path, format!("{path} is {}: it must be {allowed}", shown(value)))
}

/// A value in an error message, shortened to 80 characters.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
