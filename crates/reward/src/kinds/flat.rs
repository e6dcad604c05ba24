//! The flat TOML form of a part: `kind` and the kind's parameters in one table with the part's
//! other keys.
//!
//! `#[serde(flatten)]` would accept unknown keys and lose the key of a wrong value. Therefore the
//! table is split by key, and each piece is read by itself.

use serde::de::DeserializeOwned;
use serde::ser::{Error, SerializeMap};
use toml::{Table, Value};

use hone_core::config::describe::{describe, one_of};
use hone_core::config::quoted;

use super::kind::AnyKind;
use super::shaping::Shaping;

/// Reads a table. The error is a sentence that begins with the key.
pub fn read<T: DeserializeOwned>(table: Table) -> Result<T, String> {
    let value = Value::Table(table);
    serde_path_to_error::deserialize(value.clone())
        .map_err(|e| describe(e.path(), e.inner().message(), &value).sentence())
}

/// Moves these keys into a table of their own.
pub fn split_off(table: &mut Table, keys: &[&str]) -> Table {
    keys.iter().filter_map(|key| table.remove_entry(*key)).collect()
}

/// Removes `kind`, which must be a name in the list of kinds.
pub fn take_kind<K: AnyKind>(table: &mut Table) -> Result<String, String> {
    let names = || K::entries().into_iter().map(|entry| entry.kind);
    let allowed = || one_of(&names().map(quoted).collect::<Vec<_>>());
    match table.remove("kind") {
        Some(Value::String(kind)) if names().any(|name| name == kind) => Ok(kind),
        Some(other) => Err(format!("kind is {other}: it must be {}", allowed())),
        None => Err(format!("kind is missing: it must be {}", allowed())),
    }
}

/// Reads a table of the keys of [`Shaping`] and the parameters of `kind`.
pub fn read_kind<K: AnyKind>(kind: &str, mut table: Table) -> Result<(Shaping, K), String> {
    let shape = read(split_off(&mut table, &Shaping::KEYS))?;
    Ok((shape, K::read(kind, table)?))
}

/// Writes the shape where it is not the default, then the kind and its parameters.
pub fn write_kind<M: SerializeMap>(
    map: &mut M,
    shape: &Shaping,
    kind: &impl AnyKind,
) -> Result<(), M::Error> {
    let mut write = |value: serde_json::Result<serde_json::Value>| {
        let value = value.map_err(M::Error::custom)?;
        let mut entries = value.as_object().into_iter().flatten();
        entries.try_for_each(|(key, value)| map.serialize_entry(key, value))
    };
    if !shape.is_default() {
        write(serde_json::to_value(shape))?;
    }
    write(Ok(serde_json::json!({ "kind": kind.name() })))?;
    write(kind.parameters())
}
