//! Functions that read a completion as JSON.

use std::sync::{Arc, Mutex, PoisonError};

use jsonschema::{PatternOptions, Validator};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::indicator;
use crate::ScoreInput;

/// Longest schema that is read from metadata, in bytes.
const LONGEST_SCHEMA: usize = 65_536;

/// `json_valid`: `[the completion is one JSON value]`, in {0, 1}; typical weight 0.5 to 1. White
/// space may stand around it; nesting deeper than 127 is refused.
///
/// With `fenced`, the content of the first fenced block counts where there is one.
pub fn json_valid(text: &str, fenced: bool) -> f64 {
    indicator(serde_json::from_str::<IgnoredAny>(body(text, fenced)).is_ok())
}

/// The completion, or its first fenced block where `fenced` allows one.
fn body(text: &str, fenced: bool) -> &str {
    let block = || {
        let (_, after) = text.split_once("```")?;
        // The rest of the fence's line names the language.
        let (_, content) = after.split_once('\n')?;
        Some(content.split_once("```")?.0)
    };
    if fenced { block().unwrap_or(text) } else { text }
}

/// Where `json_schema` takes its schema from.
pub enum Schema {
    /// One for all, from the configuration.
    Fixed(Validator),
    /// Each sample's metadata, under this key.
    Metadata(String, LastSchema),
}

/// The schema compiled last: a group's samples share theirs.
#[derive(Default)]
pub struct LastSchema(Mutex<Option<(String, Option<Arc<Validator>>)>>);

impl LastSchema {
    fn of(&self, text: &str) -> Option<Arc<Validator>> {
        if text.len() > LONGEST_SCHEMA {
            return None;
        }
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, validator)) = &*last
            && known == text
        {
            return validator.clone();
        }
        let schema = serde_json::from_str::<Value>(text).ok();
        let validator = schema.and_then(|schema| compile(&schema).ok()).map(Arc::new);
        *last = Some((text.to_owned(), validator.clone()));
        validator
    }
}

/// Compiles a schema. Patterns are matched in linear time (look-around and back references are
/// refused), and no reference outside the schema is followed.
///
/// # Errors
/// One sentence.
pub fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::regex().size_limit(1 << 20))
        .build(schema)
        .map_err(|error| error.to_string())
}

/// `json_schema`: `[the completion is JSON that the schema allows]`, in {0, 1}; typical weight
/// 0.5 to 1. The text is found as in [`json_valid`].
///
/// Missing where the metadata has no schema, or one that is not sound or longer than 64 KiB.
pub fn json_schema(input: &ScoreInput, schema: &Schema, fenced: bool) -> Option<f64> {
    let read = || serde_json::from_str::<Value>(body(&input.text, fenced)).ok();
    let allowed = match schema {
        Schema::Fixed(validator) => read().is_some_and(|value| validator.is_valid(&value)),
        Schema::Metadata(key, last) => {
            let validator = last.of(input.metadata.get(key)?)?;
            read().is_some_and(|value| validator.is_valid(&value))
        }
    };
    Some(indicator(allowed))
}
