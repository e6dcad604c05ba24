//! JSON: one array, each element of which is a row.

use serde_json::{Deserializer, Value};

use super::row::{DatasetRow, Visit, not_text, too_long, without_mark};
use crate::error::{BadRow, RowPlace};

pub(super) fn rows(bytes: &[u8], limit: usize, visit: &mut Visit) -> Result<(), String> {
    let bytes = without_mark(bytes);
    let text = std::str::from_utf8(bytes).map_err(|e| format!("it {}", not_text(bytes, &e)))?;
    let mut array = ArrayText { text, at: 0 };
    if array.take('[') && array.take(']') {
        return array.end();
    }
    let mut number = 0;
    loop {
        number += 1;
        let place = RowPlace::Row(number);
        let (value, size) = array.element()?;
        visit(match value {
            _ if size > limit => Err(BadRow::whole(place, too_long(limit))),
            Value::Object(columns) => Ok(DatasetRow { place, columns, cells_are_text: false }),
            _ => Err(BadRow::whole(place, "not a JSON object")),
        });
        if array.take(']') {
            return array.end();
        }
        if !array.take(',') {
            return Err(array.error("expected `,` or `]`"));
        }
    }
}

/// The text of an array, read up to `at`.
struct ArrayText<'a> {
    text: &'a str,
    at: usize,
}

impl ArrayText<'_> {
    /// Reads white space, and then `wanted` if it is next.
    fn take(&mut self, wanted: char) -> bool {
        self.skip_space();
        let found = self.text[self.at..].starts_with(wanted);
        self.at += if found { wanted.len_utf8() } else { 0 };
        found
    }

    fn skip_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_ascii_start().len();
    }

    /// Reads a value; returns it with its length in bytes.
    fn element(&mut self) -> Result<(Value, usize), String> {
        self.skip_space();
        let mut values = Deserializer::from_str(&self.text[self.at..]).into_iter();
        match values.next() {
            Some(Ok(value)) => {
                let size = values.byte_offset();
                self.at += size;
                Ok((value, size))
            }
            Some(Err(error)) => {
                // serde_json counts lines and columns from the element.
                let message = error.to_string();
                let message = message.split(" at line ").next().unwrap_or_default();
                let lines = self.text[self.at..].split_inclusive('\n');
                let before: usize = lines.take(error.line().saturating_sub(1)).map(str::len).sum();
                self.at += before + error.column().saturating_sub(1);
                Err(self.error(message))
            }
            None => Err(self.error("the array is not closed")),
        }
    }

    fn end(&self) -> Result<(), String> {
        match self.text[self.at..].trim_ascii_start() {
            "" => Ok(()),
            _ => Err(self.error("text follows the array")),
        }
    }

    fn error(&self, message: &str) -> String {
        let before = self.text.as_bytes().get(..self.at).unwrap_or(self.text.as_bytes());
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
        format!("it is not JSON: {message} at line {line}, column {column}")
    }
}
