//! CSV and TSV: a header line, then one record per row, quoted according to RFC 4180. An empty cell
//! is a missing value; every other cell is text. Columns without a name are ignored, because tools
//! write row numbers into them.

use std::collections::BTreeSet;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::row::{DatasetRow, Visit, not_text, too_long, without_mark};
use crate::error::{BadRow, RowPlace};

pub(super) fn rows(
    bytes: &[u8],
    delimiter: u8,
    limit: usize,
    visit: &mut Visit,
) -> Result<(), String> {
    let bytes = without_mark(bytes);
    let mut reader = ReaderBuilder::new()
        .delimiter(delimiter)
        .has_headers(false)
        .flexible(true)
        .from_reader(bytes);
    let mut record = ByteRecord::new();
    let mut lines = LineCounter::new(bytes);
    let mut names: Option<Vec<String>> = None;
    // Reading from memory cannot fail, and records may have any number of cells.
    while reader.read_byte_record(&mut record).map_err(|error| error.to_string())? {
        let end = usize::try_from(reader.position().byte()).unwrap_or(usize::MAX);
        let start = record.position().map_or(0, csv::Position::byte);
        let (line, start) = lines.line_of(usize::try_from(start).unwrap_or(usize::MAX));
        let place = RowPlace::Line(line);
        match &names {
            None => names = Some(header(&record)?),
            Some(_) if end.saturating_sub(start) > limit.saturating_add(2) => {
                let reason = too_long(limit) + "; is a quotation mark left open?";
                visit(Err(BadRow::whole(place, reason)));
            }
            Some(names) => visit(cells(place, names, &record)),
        }
    }
    Ok(())
}

fn header(record: &ByteRecord) -> Result<Vec<String>, String> {
    let mut seen = BTreeSet::new();
    let mut names = Vec::with_capacity(record.len());
    for cell in record {
        let name = std::str::from_utf8(cell)
            .map_err(|error| format!("the line of column names {}", not_text(cell, &error)))?;
        let name = name.trim();
        if !name.is_empty() && !seen.insert(name) {
            return Err(format!("two columns are named `{name}`"));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

fn cells(place: RowPlace, names: &[String], record: &ByteRecord) -> Result<DatasetRow, BadRow> {
    if record.len() != names.len() {
        let reason = format!("it has {} cells for {} columns", record.len(), names.len());
        return Err(BadRow::whole(place, reason));
    }
    let mut columns = Map::new();
    for (name, cell) in names.iter().zip(record) {
        let text = std::str::from_utf8(cell)
            .map_err(|error| BadRow::column(place, name, not_text(cell, &error)))?;
        if !name.is_empty() {
            let value = if text.is_empty() { Value::Null } else { Value::from(text) };
            columns.insert(name.clone(), value);
        }
    }
    Ok(DatasetRow { place, columns, cells_are_text: true })
}

/// Computes the line numbers of increasing offsets. The csv crate's own count is one line too low
/// after `\r\n` and blank lines, because it counts their last byte as the next record's first.
struct LineCounter<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u64,
}

impl<'a> LineCounter<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, line: 1 }
    }

    /// The line and the offset of the first byte at or after `offset` that does not end a line.
    fn line_of(&mut self, offset: usize) -> (u64, usize) {
        while let Some(byte) = self.bytes.get(self.at) {
            let ends = matches!(byte, b'\r' | b'\n');
            if self.at >= offset && !ends {
                break;
            }
            let first_of_two = *byte == b'\r' && self.bytes.get(self.at + 1) == Some(&b'\n');
            self.line += u64::from(ends && !first_of_two);
            self.at += 1;
        }
        (self.line, self.at)
    }
}
