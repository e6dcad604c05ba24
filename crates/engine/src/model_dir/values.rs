//! Access to JSON values, and errors that name them.

use serde_json::{Map, Value};

use crate::error::EngineError;

/// Longest excerpt of a value in an error, in characters.
const MAX_SHOWN: usize = 60;

/// A parsed `config.json`.
pub(super) type Config = Map<String, Value>;

/// The value of a key; `null` if the key is missing.
pub(super) fn get<'a>(config: &'a Config, key: &str) -> &'a Value {
    config.get(key).unwrap_or(&Value::Null)
}

/// A value as text, shortened if it is long.
pub(super) fn show(value: &Value) -> String {
    if value.is_null() {
        return "missing".to_owned();
    }
    let mut text = value.to_string();
    if let Some((at, _)) = text.char_indices().nth(MAX_SHOWN) {
        text.truncate(at);
        text.push('…');
    }
    text
}

/// The error for a model that cannot be served.
pub(super) fn refuse(reason: String) -> EngineError {
    EngineError::Model(reason)
}

/// The error for a value of `config.json` that cannot be served.
pub(super) fn refuse_value(key: &str, value: &Value, expected: &str) -> EngineError {
    refuse(format!("config.json: {key} is {}; {expected}", show(value)))
}
