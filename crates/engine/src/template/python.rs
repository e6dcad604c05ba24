//! Values that templates see and print as in Python: dictionaries in the order of their keys, and
//! JSON with Python's separators.

use std::fmt;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// A dictionary in the order of its keys. Minijinja's own sorts them.
#[derive(Debug)]
pub(super) struct PyDict(Vec<(String, Value)>);

impl PyDict {
    /// The value of a dictionary with these items.
    pub(super) fn value<K: Into<String>>(items: impl IntoIterator<Item = (K, Value)>) -> Value {
        let items = items.into_iter().map(|(key, value)| (key.into(), value));
        Value::from_object(Self(items.collect()))
    }
}

impl Object for PyDict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('{')?;
        for (index, (name, value)) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write_text(f, name)?;
            f.write_str(": ")?;
            write_repr(f, value)?;
        }
        f.write_char('}')
    }
}

/// A list that prints as Python's.
#[derive(Debug)]
pub(super) struct PyList(Vec<Value>);

impl PyList {
    /// The value of a list with these items.
    pub(super) fn value(items: impl IntoIterator<Item = Value>) -> Value {
        Value::from_object(Self(items.into_iter().collect()))
    }
}

impl Object for PyList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('[')?;
        for (index, value) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write_repr(f, value)?;
        }
        f.write_char(']')
    }
}

/// The value of JSON, with its order of keys.
pub(super) fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(truth) => Value::from(*truth),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => Value::from(signed),
            (None, Some(unsigned)) => Value::from(unsigned),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => PyList::value(items.iter().map(value_of)),
        Json::Object(map) => {
            PyDict::value(map.iter().map(|(name, value)| (name.as_str(), value_of(value))))
        }
    }
}

/// `repr(value)`.
fn write_repr(f: &mut fmt::Formatter<'_>, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => write_text(f, text),
        // Numbers, `None`, `True` and `False` as in Python; dictionaries and lists render themselves.
        None => write!(f, "{value}"),
    }
}

/// `repr(text)`: in single quotes, unless only double ones need no escapes.
fn write_text(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    f.write_char(quote)?;
    for c in text.chars() {
        let code = u32::from(c);
        match c {
            '\n' => f.write_str("\\n")?,
            '\r' => f.write_str("\\r")?,
            '\t' => f.write_str("\\t")?,
            '\\' => f.write_str("\\\\")?,
            c if c == quote => write!(f, "\\{c}")?,
            c if c == ' ' || !(c.is_control() || c.is_whitespace()) => f.write_char(c)?,
            _ if code <= 0xff => write!(f, "\\x{code:02x}")?,
            _ => write!(f, "\\u{code:04x}")?,
        }
    }
    f.write_char(quote)
}

/// `json.dumps(json, ensure_ascii=False)`.
pub(super) fn dumps(json: &Json) -> String {
    let mut bytes = Vec::new();
    let written = json.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter));
    // Serializing JSON to memory does not fail.
    written.ok().and_then(|()| String::from_utf8(bytes).ok()).unwrap_or_default()
}

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, indent=indent)`. Jinja's filter would
/// escape HTML.
pub(super) fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Accepted and ignored, as in transformers. Templates pass the defaults.
    for option in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = kwargs.get(option)?;
    }
    kwargs.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width);
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter)),
    };
    let fail = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    written.map_err(|e| fail(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|e| fail(e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Writes JSON on one line with Python's separators `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn dictionaries_print_as_in_python() {
        let json =
            json!({"b": [1, -2.5, true, null], "a": {"it's": "a\n\"b\"\\"}, "é\u{a0}": "it's"});
        let shown = value_of(&json).to_string();
        let expected =
            r#"{'b': [1, -2.5, True, None], 'a': {"it's": 'a\n"b"\\'}, 'é\xa0': "it's"}"#;
        assert_eq!(shown, expected);
        assert_eq!(
            dumps(&json),
            "{\"b\": [1, -2.5, true, null], \"a\": {\"it's\": \"a\\n\\\"b\\\"\\\\\"}, \
             \"é\u{a0}\": \"it's\"}"
        );
    }
}
