//! Rows, and what the readers of all formats share.

use std::str::Utf8Error;

use serde_json::{Map, Value};

use crate::error::{BadRow, RowPlace};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DatasetRow {
    pub(crate) place: RowPlace,
    /// The columns that the file has for this row, including nulls.
    pub(crate) columns: Map<String, Value>,
    /// Whether a cell may contain a conversation as JSON text, as in CSV and Parquet files.
    pub(crate) cells_are_text: bool,
}

impl DatasetRow {
    /// The row in a dataset in which `rows` rows of earlier files precede it.
    pub(crate) fn after(self, rows: u64) -> Self {
        Self { place: self.place.after(rows), ..self }
    }
}

pub(super) type Visit<'a> = dyn FnMut(Result<DatasetRow, BadRow>) + 'a;

/// A value as text: texts unchanged, other values as JSON.
pub(crate) fn text_of(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

pub(super) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Describes bytes that are not UTF-8.
pub(super) fn not_text(bytes: &[u8], error: &Utf8Error) -> String {
    let at = error.valid_up_to();
    let byte = bytes.get(at).copied().unwrap_or_default();
    format!("is not UTF-8: byte {} is {byte:#04x}", at + 1)
}

pub(super) fn too_long(limit: usize) -> String {
    format!("longer than {limit} bytes")
}
