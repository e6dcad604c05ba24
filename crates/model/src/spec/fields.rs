//! Reads single fields of `config.json`.

use std::fmt::Display;

use serde_json::Value;

use crate::{ModelError, Result};

/// The value of a field. `null` counts as absent.
pub(crate) fn get<'a>(config: &'a Value, field: &str) -> Option<&'a Value> {
    config.get(field).filter(|value| !value.is_null())
}

/// The error for a field whose value is not `expected`.
pub(crate) fn wrong(
    field: &'static str,
    value: Option<&Value>,
    expected: &'static str,
) -> ModelError {
    invalid(field, value.map_or_else(|| "missing".to_owned(), Value::to_string), expected)
}

/// The error for a field that leads to `value`, which is not `expected`.
pub(crate) fn invalid(
    field: &'static str,
    value: impl Display,
    expected: &'static str,
) -> ModelError {
    let reason = format!("config.json: `{field}` is {value}, but must be {expected}");
    ModelError::Unsupported(reason)
}

/// Largest size in a model's configuration: more would overflow products of sizes, or fill the memory.
const LARGEST: usize = u32::MAX as usize;

/// A whole number above 0, and at most [`LARGEST`].
pub(crate) fn size(config: &Value, field: &'static str) -> Result<usize> {
    let value = config.get(field);
    value
        .and_then(Value::as_u64)
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| (1..=LARGEST).contains(n))
        .ok_or_else(|| {
            let is_large = value.and_then(Value::as_u64).is_some_and(|n| n > 0);
            wrong(
                field,
                value,
                if is_large { "at most 4294967295" } else { "a whole number above 0" },
            )
        })
}

/// A whole number above 0, or a default if the field is absent.
pub(crate) fn size_or(config: &Value, field: &'static str, default: usize) -> Result<usize> {
    optional_size(config, field).map(|found| found.unwrap_or(default))
}

/// A whole number above 0, if the field is present.
pub(crate) fn optional_size(config: &Value, field: &'static str) -> Result<Option<usize>> {
    get(config, field).map(|_| size(config, field)).transpose()
}

/// A finite number above 0, or a default if the field is absent.
pub(crate) fn number_or(config: &Value, field: &'static str, default: f64) -> Result<f64> {
    optional_number(config, field).map(|found| found.unwrap_or(default))
}

/// A finite number above 0, if the field is present.
pub(crate) fn optional_number(config: &Value, field: &'static str) -> Result<Option<f64>> {
    let Some(value) = get(config, field) else { return Ok(None) };
    positive(value).ok_or_else(|| wrong(field, Some(value), "a number above 0")).map(Some)
}

/// A finite number above 0.
pub(crate) fn number(config: &Value, field: &'static str) -> Result<f64> {
    optional_number(config, field)?.ok_or_else(|| wrong(field, None, "a number above 0"))
}

/// True or false, or a default if the field is absent.
pub(crate) fn flag_or(config: &Value, field: &'static str, default: bool) -> Result<bool> {
    match get(config, field) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| wrong(field, Some(value), "true or false")),
    }
}

/// A list of numbers above 0.
pub(crate) fn numbers(config: &Value, field: &'static str) -> Result<Vec<f64>> {
    let value = config.get(field);
    let list = value.and_then(Value::as_array);
    list.and_then(|list| list.iter().map(positive).collect())
        .ok_or_else(|| wrong(field, value, "a list of numbers above 0"))
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|n| n.is_finite() && *n > 0.0)
}
