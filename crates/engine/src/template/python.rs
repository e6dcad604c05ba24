//! Values as Python prints them, and JSON with Python's separators.

use std::fmt::{self, Display as _, Write as _};
use std::io;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, Serializer};

/// Most spaces of an indentation.
const MAX_INDENT: usize = 64;

/// A list or map that prints as in Python wherever minijinja prints it: its own prints texts in double quotes.
#[derive(Debug)]
struct PyValue(Value);

impl Object for PyValue {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.0.kind() == ValueKind::Map { ObjectRepr::Map } else { ObjectRepr::Seq }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.as_object()?.get_value(key).map(python)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.as_object().map_or(Enumerator::NonEnumerable, |object| object.enumerate())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PyRepr(&self.0).fmt(f)
    }
}

/// A value that prints as in Python, and so do those within it.
pub(super) fn python(value: Value) -> Value {
    match value.kind() {
        ValueKind::Map | ValueKind::Seq => Value::from_object(PyValue(value)),
        _ => value,
    }
}

/// The value of `json` for templates.
pub(super) fn value_of(json: &impl Serialize) -> Value {
    python(Value::from_serialize(json))
}

/// `repr(value)`. Tuples print as lists.
pub(super) struct PyRepr<'a>(pub(super) &'a Value);

impl fmt::Display for PyRepr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0;
        let items = || value.try_iter().into_iter().flatten().enumerate();
        let separate = |f: &mut fmt::Formatter<'_>, i| f.write_str(if i > 0 { ", " } else { "" });
        match (value.kind(), value.as_str()) {
            (_, Some(text)) => write_text(f, text),
            (ValueKind::Map, _) => {
                f.write_char('{')?;
                for (i, key) in items() {
                    separate(f, i)?;
                    let inner = value.get_item(&key).unwrap_or_default();
                    write!(f, "{}: {}", PyRepr(&key), PyRepr(&inner))?;
                }
                f.write_char('}')
            }
            (ValueKind::Seq, _) => {
                f.write_char('[')?;
                for (i, item) in items() {
                    separate(f, i)?;
                    write!(f, "{}", PyRepr(&item))?;
                }
                f.write_char(']')
            }
            (ValueKind::None, _) => f.write_str("None"),
            (ValueKind::Number, _) if !value.is_integer() => f64::try_from(value.clone())
                .map_or(Ok(()), |number| f.write_str(&python_float(number))),
            _ => write!(f, "{value}"),
        }
    }
}

/// `repr(number)`.
fn python_float(number: f64) -> String {
    let magnitude = number.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{number:?}");
    }
    // Python's exponent has a sign and at least two digits.
    let text = format!("{number:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
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
    // Serializing JSON to memory does not fail.
    let mut bytes = Vec::new();
    let written = PythonFormatter::default().write(json, &mut bytes);
    written.ok().and_then(|()| String::from_utf8(bytes).ok()).unwrap_or_default()
}

/// The filter `tojson` of transformers: `json.dumps` with its options, of which `ensure_ascii` is false unless it
/// is given. Jinja's filter would escape HTML.
pub(super) fn write_json(
    value: &Value,
    kwargs: &Kwargs,
    to: &mut impl io::Write,
) -> Result<(), Error> {
    let fail = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    let mut formatter = PythonFormatter::default();
    if let Some(indent) = kwargs.get::<Option<Value>>("indent")? {
        formatter.indent = Some(match (indent.as_usize(), indent.as_str()) {
            (Some(width), _) if width <= MAX_INDENT => " ".repeat(width),
            (None, Some(text)) => text.to_owned(),
            _ => {
                return Err(fail(format!("indent is {indent}: at most {MAX_INDENT} are possible")));
            }
        });
        formatter.separators.0 = ",".to_owned();
    }
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")? {
        let given: Vec<String> = separators.try_iter()?.map(|text| text.to_string()).collect();
        let Ok([item, key]) = <[String; 2]>::try_from(given) else {
            return Err(fail("separators must be two texts".to_owned()));
        };
        formatter.separators = (item, key);
    }
    formatter.ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorts = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let written = if sorts {
        serde_json::to_value(value).and_then(|mut json| {
            json.sort_all_objects();
            formatter.write(&json, to)
        })
    } else {
        formatter.write(value, to)
    };
    written.map_err(|error| fail(error.to_string()))
}

/// Writes JSON as Python's `json.dumps`.
struct PythonFormatter {
    /// After an item, and after a key.
    separators: (String, String),
    /// The indentation of one level; `None` for one line.
    indent: Option<String>,
    /// Whether characters beyond ASCII become escapes.
    ensure_ascii: bool,
    depth: usize,
    is_empty: bool,
}

impl Default for PythonFormatter {
    fn default() -> Self {
        let separators = (", ".to_owned(), ": ".to_owned());
        Self { separators, indent: None, ensure_ascii: false, depth: 0, is_empty: true }
    }
}

impl PythonFormatter {
    fn write(self, value: &impl Serialize, to: &mut impl io::Write) -> serde_json::Result<()> {
        value.serialize(&mut Serializer::with_formatter(to, self))
    }

    fn begin<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(bracket)
    }

    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match &self.indent {
            Some(indent) => write!(writer, "\n{}", indent.repeat(self.depth)),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if !first {
            writer.write_all(self.separators.0.as_bytes())?;
        }
        self.is_empty = false;
        self.new_line(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.separators.1.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        fragment.chars().try_for_each(|c| {
            if (' '..='~').contains(&c) {
                return write!(writer, "{c}");
            }
            c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(writer, "\\u{unit:04x}"))
        })
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
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
        let shown = PyRepr(&Value::from_serialize(&json)).to_string();
        let expected =
            r#"{'b': [1, -2.5, True, None], 'a': {"it's": 'a\n"b"\\'}, 'é\xa0': "it's"}"#;
        assert_eq!(shown, expected);
        assert_eq!(
            dumps(&json),
            "{\"b\": [1, -2.5, true, null], \"a\": {\"it's\": \"a\\n\\\"b\\\"\\\\\"}, \
             \"é\u{a0}\": \"it's\"}"
        );
    }

    #[test]
    fn wrong_options_of_tojson_are_named() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", crate::template::to_json);
        for (arguments, reason) in [
            ("indent=1000", "indent is 1000: at most 64 are possible"),
            ("separators=(',',)", "separators must be two texts"),
            ("width=1", "unknown keyword argument 'width'"),
        ] {
            let template = format!("{{{{ value | tojson({arguments}) }}}}");
            let error = environment.render_str(&template, minijinja::context! { value => 1 });
            let error = error.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
