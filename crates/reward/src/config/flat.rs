//! The flat TOML form of one reward part: `name`, `kind`, `weight` and what shapes it, then the
//! kind's parameters.
//!
//! `#[serde(flatten)]` would accept unknown keys and lose the key of a wrong value, so the flat
//! table is folded to `{kind: {parameters}}` and read as an ordinary enum.

use serde::ser::{Error, SerializeMap};
use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use hone_core::config::describe::{describe, one_of};

use super::{AdaptiveConfig, EnsembleMember, KINDS, RewardConfig, RewardKind, Shaping};

#[derive(Deserialize)]
struct Head {
    name: String,
    #[serde(default = "one")]
    weight: f64,
    adaptive: Option<AdaptiveConfig>,
}

fn one() -> f64 {
    1.0
}

/// Reads a value; the error is a sentence that begins with the key.
fn read<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value.clone())
        .map_err(|e| describe(e.path(), e.inner().message(), &value).sentence())
}

/// Takes these keys out of a table.
fn split(table: &mut Table, keys: &[&str]) -> Value {
    Value::Table(keys.iter().filter_map(|key| table.remove_entry(*key)).collect())
}

/// Takes `kind` out of a table.
fn kind_of(table: &mut Table) -> Result<String, String> {
    let wrong = || one_of(&KINDS.map(|kind| format!("\"{kind}\"")));
    match table.remove("kind") {
        Some(Value::String(kind)) if KINDS.contains(&kind.as_str()) => Ok(kind),
        Some(other) => Err(format!("kind is {other}: it must be {}", wrong())),
        None => Err(format!("kind is missing: it must be {}", wrong())),
    }
}

fn read_kind(kind: String, parameters: Table) -> Result<RewardKind, String> {
    read(Value::Table(Table::from_iter([(kind, Value::Table(parameters))])))
}

impl TryFrom<Table> for RewardConfig {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = kind_of(&mut table)?;
        let Head { name, weight, adaptive } =
            read(split(&mut table, &["name", "weight", "adaptive"]))?;
        let shape = read(split(&mut table, &Shaping::KEYS))?;
        Ok(Self { name, weight, kind: read_kind(kind, table)?, shape, adaptive })
    }
}

impl TryFrom<Table> for EnsembleMember {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = kind_of(&mut table)?;
        let shape = read(split(&mut table, &Shaping::KEYS))?;
        Ok(Self { kind: read_kind(kind, table)?, shape })
    }
}

/// Writes the shape where it is not the default, then the kind and its parameters.
fn write<M: SerializeMap>(map: &mut M, shape: &Shaping, kind: &RewardKind) -> Result<(), M::Error> {
    // Not as a TOML table, which has no form for enums with fields.
    if !shape.is_default() {
        let shape = serde_json::to_value(shape).map_err(M::Error::custom)?;
        for (key, value) in shape.as_object().into_iter().flatten() {
            map.serialize_entry(key, value)?;
        }
    }
    let nested = serde_json::to_value(kind).map_err(M::Error::custom)?;
    for (kind, parameters) in nested.as_object().into_iter().flatten() {
        map.serialize_entry("kind", kind)?;
        for (key, value) in parameters.as_object().into_iter().flatten() {
            map.serialize_entry(key, value)?;
        }
    }
    Ok(())
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("weight", &self.weight)?;
        write(&mut map, &self.shape, &self.kind)?;
        if let Some(adaptive) = &self.adaptive {
            map.serialize_entry("adaptive", adaptive)?;
        }
        map.end()
    }
}

impl Serialize for EnsembleMember {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        write(&mut map, &self.shape, &self.kind)?;
        map.end()
    }
}
