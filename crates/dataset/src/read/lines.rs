//! JSONL: one JSON object a line, blank lines ignored, `\n` or `\r\n`.

use std::io;
use std::io::BufRead;

use serde_json::Value;

use super::{BadRow, DatasetRow, RowPlace, Visit, not_text, too_long, without_mark};

pub(super) fn rows(mut input: impl BufRead, limit: usize, visit: &mut Visit) -> Result<(), String> {
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        let whole = match next(&mut input, limit, &mut line) {
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

/// Reads a line into `line`, without its end; `false` when it is longer than `limit`, and then only
/// its beginning. `None` at the end of the file.
fn next(input: &mut impl BufRead, limit: usize, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    let (mut any, mut whole) = (false, true);
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(any.then_some(whole));
        }
        any = true;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let part = &buffer[..end.unwrap_or(buffer.len())];
        // What is beyond the limit is not kept, so that no line fills the memory.
        let room = limit.saturating_sub(line.len());
        let content = part.strip_suffix(b"\r").filter(|_| end.is_some()).unwrap_or(part);
        whole &= content.len() <= room;
        line.extend_from_slice(&part[..part.len().min(room)]);
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
            // serde_json counts lines of its own; the column is what helps.
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            let reason = format!("not JSON: {message} at column {}", error.column());
            Err(BadRow::whole(place, reason))
        }
    }
}
