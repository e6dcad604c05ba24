//! `json_schema`: accepts JSON that a schema allows.

use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use parking_lot::Mutex;
use serde_json::Value;

use hone_core::text::inexact_number;

use super::json_text;
use crate::ScoreInput;
use crate::kinds::prelude::*;

/// Longest schema that is read from metadata, in bytes.
const LONGEST_SCHEMA: usize = 65_536;

define_kind! {
    pub struct JsonSchema {
        /// The schema, as a table or as JSON in a text.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub schema: Option<Value> = None,
        /// Metadata key of the schema, instead of `schema`. For trusted datasets and clients: checking
        /// a malicious schema can take very long.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub schema_from: Option<String> = None,
        /// Whether the content of the first fenced block counts, where there is one.
        pub fenced: bool = false,
    }
    kind: "json_schema",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    example: "schema = { type = \"object\", required = [\"answer\"] }",
    formula: "1 if the completion (or, with fenced, its first fenced block) is JSON that the \
              schema allows, else 0; missing where schema_from names no sound schema",
}

impl Kind for JsonSchema {
    fn check(&self) -> Checked {
        match (&self.schema, &self.schema_from) {
            (Some(_), None) | (None, Some(_)) => Ok(()),
            (None, None) => Err(Problem::new("schema", " is missing: give it, or schema_from")),
            (Some(_), Some(key)) => {
                let allowed = "absent where schema is given";
                Err(Problem::value("schema_from", quoted(key), allowed))
            }
        }
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (source, fenced) = (SchemaSource::new(self)?, self.fenced);
        per_sample(move |input| {
            let validator = source.validator(input)?;
            let value = serde_json::from_str::<Value>(json_text(&input.text, fenced));
            Some(indicator(value.is_ok_and(|value| validator.is_valid(&value))))
        })
    }

    fn reads(&self) -> Vec<String> {
        self.schema_from.clone().into_iter().collect()
    }
}

enum SchemaSource {
    /// The configuration.
    Fixed(Arc<Validator>),
    /// Each sample's metadata, under this key. The samples of a group share their schema, so the
    /// last one is kept compiled, `None` if it is unsound.
    Metadata(String, Mutex<Option<(String, Option<Arc<Validator>>)>>),
}

impl SchemaSource {
    fn new(p: &JsonSchema) -> Result<Self, Problem> {
        if let Some(key) = &p.schema_from {
            return Ok(Self::Metadata(key.clone(), Mutex::default()));
        }
        let unsound = |why: String| Problem::new("schema", format!(" is not a JSON schema: {why}"));
        let schema = match &p.schema {
            Some(Value::String(text)) => {
                serde_json::from_str(text).map_err(|error| unsound(error.to_string()))?
            }
            other => other.clone().unwrap_or_default(),
        };
        compile(&schema).map(|validator| Self::Fixed(Arc::new(validator))).map_err(unsound)
    }

    /// The schema for a sample; `None` if its metadata has none, or one that is unsound or too long.
    fn validator(&self, input: &ScoreInput) -> Option<Arc<Validator>> {
        let (key, last) = match self {
            Self::Fixed(validator) => return Some(Arc::clone(validator)),
            Self::Metadata(key, last) => (key, last),
        };
        let text = input.metadata.get(key).filter(|text| text.len() <= LONGEST_SCHEMA)?;
        let mut last = last.lock();
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

/// Compiles a schema. Patterns are matched in linear time, therefore look-around and back references
/// are refused; references to other documents are not followed.
fn compile(schema: &Value) -> Result<Validator, String> {
    if let Some(number) = inexact_number(schema) {
        return Err(format!("the number {number:e} has more than 64 bits"));
    }
    jsonschema::options()
        .with_pattern_options(PatternOptions::regex().size_limit(1 << 20))
        .build(schema)
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{function, sample};

    #[test]
    fn schemas_come_from_the_configuration_or_the_sample() {
        let schema = r#"{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 0, "pattern": "^a$"}}}"#;
        let parsed = serde_json::from_str(schema).unwrap();
        let fixed = function(&JsonSchema { schema: Some(parsed), ..JsonSchema::default() });
        let key = Some("schema".to_owned());
        let referred = function(&JsonSchema { schema_from: key, ..JsonSchema::default() });
        for (text, value) in
            [("{\"n\": 3}", 1.0), ("{\"n\": -3}", 0.0), ("{}", 0.0), ("3", 0.0), ("{", 0.0)]
        {
            let sample = sample(text, &[("schema", schema)]);
            assert_eq!(fixed(&sample), Some(value), "{text}");
            assert_eq!(referred(&sample), Some(value), "{text}");
        }
        for unsound in [
            "",
            "{",
            "{\"const\": 18446744073709551617}",
            "{\"type\": 5}",
            "{\"$ref\": \"http://example.com/schema\"}",
        ] {
            assert_eq!(referred(&sample("3", &[("schema", unsound)])), None, "{unsound}");
        }
        assert_eq!(referred(&sample("3", &[])), None);
        let long = format!("{{\"title\": \"{}\"}}", "a".repeat(70_000));
        assert_eq!(referred(&sample("3", &[("schema", &long)])), None);
        let circular = sample("{\"a\": {\"a\": 1}}", &[("schema", "{\"$ref\": \"#\"}")]);
        assert!(referred(&circular).is_none_or(|value| value == 1.0));
    }
}
