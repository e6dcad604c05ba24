//! CSV and TSV: a line of column names, then a record each, quoted as RFC 4180 says. An empty cell
//! is a missing value; every other one is text. A column without a name is left out (tools write
//! their row numbers under one).

use std::collections::BTreeSet;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::{BadRow, DatasetRow, RowPlace, Visit, not_text, too_long, without_mark};

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
    let mut lines = Lines::new(bytes);
    let mut names: Option<Vec<String>> = None;
    // The bytes are in memory, so reading them cannot fail; records may have any length.
    while reader.read_byte_record(&mut record).map_err(|error| error.to_string())? {
        let end = usize::try_from(reader.position().byte()).unwrap_or(usize::MAX);
        let start = record.position().map_or(0, csv::Position::byte);
        let (line, start) = lines.of(usize::try_from(start).unwrap_or(usize::MAX));
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

/// Line numbers of increasing offsets. The csv crate's own count is a line behind after `\r\n` and
/// blank lines, whose last byte it takes for the next record's first.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u64,
}

impl<'a> Lines<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, line: 1 }
    }

    /// The line and the offset of the first byte from `offset` on that does not end a line.
    fn of(&mut self, offset: usize) -> (u64, usize) {
        while let Some(byte) = self.bytes.get(self.at) {
            let ends = matches!(byte, b'\r' | b'\n');
            if self.at >= offset && !ends {
                break;
            }
            let half = *byte == b'\r' && self.bytes.get(self.at + 1) == Some(&b'\n');
            self.line += u64::from(ends && !half);
            self.at += 1;
        }
        (self.line, self.at)
    }
}
