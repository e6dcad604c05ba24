//! Reads the rows of a file in any format.
//!
//! No content of a file causes a panic. A row that cannot be read is reported as a
//! [`BadRow`](crate::error::BadRow), and reading continues; an error means that the rest of the
//! file cannot be read.

mod array;
mod parquet;
mod row;
mod table;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use crate::error::{BadRow, RowPlace};
use row::{Visit, not_text, too_long, without_mark};

pub(crate) use row::{DatasetRow, text_of};

/// The format that a file's name implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileFormat {
    /// One JSON object per line, or one JSON array of objects if the file begins with `[`.
    Jsonl,
    /// Comma-separated values (RFC 4180) with a header line.
    Csv,
    /// Tab-separated values with a header line.
    Tsv,
    Parquet,
}

impl FileFormat {
    pub(crate) fn of(path: &Path) -> Self {
        let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
        match extension.as_deref() {
            Some("csv") => Self::Csv,
            Some("tsv") => Self::Tsv,
            Some("parquet" | "pq") => Self::Parquet,
            _ => Self::Jsonl,
        }
    }
}

/// Calls `visit` with every row of the file.
pub(crate) fn read_rows(
    path: &Path,
    format: FileFormat,
    max_row_bytes: usize,
    visit: &mut Visit,
) -> Result<(), String> {
    let shown = |error: io::Error| error.to_string();
    let file = File::open(path).map_err(shown)?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err("it is a directory".to_owned());
    }
    if format == FileFormat::Parquet {
        return parquet::rows(file, max_row_bytes, visit);
    }
    let mut input = BufReader::new(file);
    let start = input.fill_buf().map_err(shown)?;
    if let Some(what) = other_format(start) {
        let name = format!("{format:?}").to_uppercase();
        return Err(format!("it is not {name} but {what}"));
    }
    // No line of JSONL begins with a bracket, because a row is an object.
    let is_array = without_mark(start).trim_ascii_start().starts_with(b"[");
    if format == FileFormat::Jsonl && !is_array {
        return rows(input, max_row_bytes, visit);
    }
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).map_err(shown)?;
    match format {
        FileFormat::Csv => table::rows(&bytes, b',', max_row_bytes, visit),
        FileFormat::Tsv => table::rows(&bytes, b'\t', max_row_bytes, visit),
        _ => array::rows(&bytes, max_row_bytes, visit),
    }
}

/// Recognizes formats that are not text by their first bytes.
fn other_format(start: &[u8]) -> Option<&'static str> {
    match start {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16 text; save it as UTF-8"),
        [0x1f, 0x8b, ..] => Some("compressed with gzip; unpack it first"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("compressed with zstd; unpack it first"),
        [b'P', b'K', 3, 4, ..] => Some("a zip archive or a spreadsheet; export it first"),
        [b'P', b'A', b'R', b'1', ..] => Some("Parquet; name the file *.parquet"),
        _ => None,
    }
}

// JSONL: one JSON object per line; lines end with `\n` or `\r\n`; blank lines are ignored.

fn rows(mut input: impl BufRead, limit: usize, visit: &mut Visit) -> Result<(), String> {
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        let whole = match read_line(&mut input, limit, &mut line) {
            Ok(Some(whole)) => whole,
            Ok(None) => return Ok(()),
            Err(error) => return Err(format!("line {}: {error}", number + 1)),
        };
        number += 1;
        let place = RowPlace::Line(number);
        let bytes = if number == 1 { without_mark(&line) } else { &line };
        if !whole {
            visit(Err(BadRow::whole(place, too_long(limit))));
        } else if !bytes.trim_ascii().is_empty() {
            visit(parse(place, bytes));
        }
    }
}

/// Reads at most `limit` bytes of a line, without its end, into `line`. Returns whether that is the
/// whole line, or `None` at the end of the file.
fn read_line(
    input: &mut impl BufRead,
    limit: usize,
    line: &mut Vec<u8>,
) -> io::Result<Option<bool>> {
    let (mut any, mut whole) = (false, true);
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(any.then_some(whole));
        }
        any = true;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let part = &buffer[..end.unwrap_or(buffer.len())];
        // Bytes beyond the limit are discarded, so that a long line does not fill the memory.
        let free = limit.saturating_sub(line.len());
        let content = part.strip_suffix(b"\r").filter(|_| end.is_some()).unwrap_or(part);
        whole &= content.len() <= free;
        line.extend_from_slice(&part[..part.len().min(free)]);
        let used = end.map_or(buffer.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(Some(whole));
        }
    }
}

fn parse(place: RowPlace, bytes: &[u8]) -> Result<DatasetRow, BadRow> {
    let text = std::str::from_utf8(bytes)
        .map_err(|error| BadRow::whole(place, format!("it {}", not_text(bytes, &error))))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(columns)) => Ok(DatasetRow { place, columns, cells_are_text: false }),
        Ok(_) => Err(BadRow::whole(place, "not a JSON object")),
        Err(error) => {
            // serde_json's line number counts within this line, so only its column is useful.
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            let reason = format!("not JSON: {message} at column {}", error.column());
            Err(BadRow::whole(place, reason))
        }
    }
}

#[cfg(test)]
mod tests;
