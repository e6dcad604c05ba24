//! Files to rows: one row at a time, each with its place, whatever the format.
//!
//! Invariant: no content of a file makes this panic. A row that cannot be read is handed on as a
//! [`BadRow`] and reading goes on; the error is for what ends reading the file.

mod lines;
mod parquet;
mod table;

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{BadRow, RowPlace};
use crate::DatasetFormat;

/// One row as it stands in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DatasetRow {
    /// Where it stands.
    pub place: RowPlace,
    /// Its columns; nothing is missing but what the file leaves out, nulls included.
    pub columns: Map<String, Value>,
    /// Whether a conversation may stand as JSON text in a cell: CSV and Parquet.
    pub cells_are_text: bool,
}

/// Receives each row.
pub(super) type Visit<'a> = dyn FnMut(Result<DatasetRow, BadRow>) + 'a;

/// Reads every row of the file.
pub(super) fn rows(
    path: &Path,
    format: DatasetFormat,
    max_row_bytes: usize,
    visit: &mut Visit,
) -> Result<(), String> {
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err("it is a directory".to_owned());
    }
    let format = resolve(path, format);
    if format == DatasetFormat::Parquet {
        return parquet::rows(file, max_row_bytes, visit);
    }
    let start = first_bytes(&mut file).map_err(|error| error.to_string())?;
    if let Some(what) = foreign(&start) {
        return Err(format!("it is not {} but {what}", written_as(format)));
    }
    match format {
        DatasetFormat::Csv | DatasetFormat::Tsv => {
            let delimiter = if format == DatasetFormat::Tsv { b'\t' } else { b',' };
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
            table::rows(&bytes, delimiter, max_row_bytes, visit)
        }
        _ => lines::rows(BufReader::new(file), max_row_bytes, visit),
    }
}

/// The format of a file, by its name where none is configured.
pub(super) fn resolve(path: &Path, format: DatasetFormat) -> DatasetFormat {
    if format != DatasetFormat::Auto {
        return format;
    }
    let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("csv") => DatasetFormat::Csv,
        Some("tsv") => DatasetFormat::Tsv,
        Some("parquet" | "pq") => DatasetFormat::Parquet,
        _ => DatasetFormat::Jsonl,
    }
}

fn written_as(format: DatasetFormat) -> &'static str {
    match format {
        DatasetFormat::Csv => "CSV",
        DatasetFormat::Tsv => "TSV",
        DatasetFormat::Parquet => "Parquet",
        DatasetFormat::Jsonl | DatasetFormat::Auto => "JSONL",
    }
}

fn first_bytes(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut start = Vec::new();
    file.by_ref().take(4).read_to_end(&mut start)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(start)
}

/// What a file that is no text begins like.
fn foreign(start: &[u8]) -> Option<&'static str> {
    match start {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16 text; save it as UTF-8"),
        [0x1f, 0x8b, ..] => Some("compressed with gzip; unpack it first"),
        [0x28, 0xb5, 0x2f, 0xfd] => Some("compressed with zstd; unpack it first"),
        b"PK\x03\x04" => Some("a zip archive or a spreadsheet; export it first"),
        b"PAR1" => Some("Parquet (dataset.format = \"parquet\")"),
        _ => None,
    }
}

/// A text without its byte order mark.
fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Why bytes are not text.
fn not_text(bytes: &[u8], error: &std::str::Utf8Error) -> String {
    let at = error.valid_up_to();
    let byte = bytes.get(at).copied().unwrap_or_default();
    format!("is not UTF-8: byte {} is {byte:#04x}", at + 1)
}

fn too_long(limit: usize) -> String {
    format!("longer than dataset.max_row_bytes ({limit})")
}

#[cfg(test)]
mod tests;
