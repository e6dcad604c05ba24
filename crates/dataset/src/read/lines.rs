//! JSONL: one JSON object per line; lines end with `\n` or `\r\n`; blank lines are ignored.

use std::io::{self, BufRead};

use serde_json::Value;

use super::row::{DatasetRow, Visit, not_text, too_long, without_mark};
use crate::error::{BadRow, RowPlace};

pub(super) fn rows(mut input: impl BufRead, limit: usize, visit: &mut Visit) -> Result<(), String> {
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
