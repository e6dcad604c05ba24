//! The flat TOML form of one reward part: `name`, `kind`, `weight`, then the kind's parameters.
//!
//! `#[serde(flatten)]` would accept unknown keys and lose the key of a wrong value, so the flat
//! table is folded to `{kind: {parameters}}` and read as an ordinary enum.

use serde::ser::{Error, SerializeMap};
use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use super::describe::{describe, one_of};
use super::{RewardConfig, RewardKind};

/// The `kind`s in the order of [`RewardKind`].
const KINDS: [&str; 7] = [
    "feedback",
    "exact_match",
    "numeric_match",
    "regex",
    "format_strict",
    "format_incremental",
    "length",
];

#[derive(Deserialize)]
struct Head {
    name: String,
    #[serde(default = "one")]
    weight: f64,
}

fn one() -> f64 {
    1.0
}

/// Reads a value; the error is a sentence that begins with the key.
fn read<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value.clone())
        .map_err(|e| describe(e.path(), e.inner().message(), &value).sentence())
}

impl TryFrom<Table> for RewardConfig {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let quoted = KINDS.map(|k| format!("\"{k}\""));
        let allowed = one_of(&quoted);
        let kind = match table.remove("kind") {
            Some(Value::String(kind)) if KINDS.contains(&kind.as_str()) => kind,
            Some(other) => return Err(format!("kind is {other}: it must be {allowed}")),
            None => return Err(format!("kind is missing: it must be {allowed}")),
        };
        let head: Table =
            ["name", "weight"].iter().filter_map(|k| table.remove_entry(*k)).collect();
        let Head { name, weight } = read(Value::Table(head))?;
        let kind: RewardKind = read(Value::Table(Table::from_iter([(kind, Value::Table(table))])))?;
        Ok(Self { name, weight, kind })
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Not as a TOML table, which has no form for enums with fields.
        let nested = serde_json::to_value(&self.kind).map_err(S::Error::custom)?;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("weight", &self.weight)?;
        for (kind, parameters) in nested.as_object().into_iter().flatten() {
            map.serialize_entry("kind", kind)?;
            for (key, value) in parameters.as_object().into_iter().flatten() {
                map.serialize_entry(key, value)?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_round_trips() {
        let kinds = [
            RewardKind::Feedback {},
            RewardKind::ExactMatch {
                reference: "answer".into(),
                ignore_case: true,
                extract: String::new(),
            },
            RewardKind::NumericMatch {
                reference: "n".into(),
                tolerance: 0.5,
                extract: "(.*)".into(),
            },
            RewardKind::Regex { pattern: "^a$".into() },
            RewardKind::FormatStrict {},
            RewardKind::FormatIncremental {},
            RewardKind::Length { ideal: 5, spread: 2 },
        ];
        assert_eq!(kinds.len(), KINDS.len());
        for (kind, name) in kinds.into_iter().zip(KINDS) {
            let part = RewardConfig { name: "part".into(), weight: 0.5, kind };
            let text = toml::to_string(&part).unwrap();
            assert!(text.contains(&format!("kind = \"{name}\"")), "{text}");
            assert_eq!(toml::from_str::<RewardConfig>(&text).unwrap(), part, "{text}");
        }
    }
}
