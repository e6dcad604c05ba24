//! Values as Python prints them, and JSON with Python's separators.

use std::borrow::Cow;
use std::fmt::{self, Display as _};
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;

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
        Notation::new(false).write(f, self.0, 0)
    }
}

/// `json.dumps(json, ensure_ascii=False)`.
pub(super) fn dumps(json: &Json) -> String {
    let mut text = String::new();
    // Writing to a text does not fail.
    let _ = Notation::new(true).write(&mut text, &Value::from_serialize(json), 0);
    text
}

/// The filter `tojson` of transformers: `json.dumps` with its options, of which `ensure_ascii` is false unless it
/// is given. Jinja's filter would escape HTML.
pub(super) fn write_json(
    value: &Value,
    kwargs: &Kwargs,
    to: &mut impl fmt::Write,
) -> Result<(), Error> {
    let fail = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    let mut json = Notation::new(true);
    if let Some(indent) = kwargs.get::<Option<Value>>("indent")? {
        json.indent = Some(match (indent.as_usize(), indent.as_str()) {
            (Some(width), _) if width <= MAX_INDENT => " ".repeat(width),
            (None, Some(text)) => text.to_owned(),
            _ => {
                return Err(fail(format!("indent is {indent}: at most {MAX_INDENT} are possible")));
            }
        });
        json.separators[0] = ",".into();
    }
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")? {
        let given: Vec<Cow<'_, str>> =
            separators.try_iter()?.map(|text| text.to_string().into()).collect();
        json.separators =
            given.try_into().map_err(|_| fail("separators must be two texts".to_owned()))?;
    }
    json.ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    json.sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let written = json.write(to, value, 0);
    written.map_err(|_| fail("it writes more than a chat template may".to_owned()))
}

/// How values are written: as Python's `repr`, or as its `json.dumps` with these options.
struct Notation {
    is_json: bool,
    /// What follows an item, and a key.
    separators: [Cow<'static, str>; 2],
    /// The indentation of one level; `None` for one line.
    indent: Option<String>,
    /// Whether characters beyond ASCII become escapes.
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Notation {
    fn new(is_json: bool) -> Self {
        let separators = [", ".into(), ": ".into()];
        Self { is_json, separators, indent: None, ensure_ascii: false, sort_keys: false }
    }

    fn write<W: fmt::Write>(&self, to: &mut W, value: &Value, depth: usize) -> fmt::Result {
        let kind = value.kind();
        match (kind, value.as_str()) {
            (_, Some(text)) => self.write_text(to, text),
            (ValueKind::Map | ValueKind::Seq, _) => self.write_items(to, value, depth),
            (ValueKind::Number, _) if !value.is_integer() => match f64::try_from(value.clone()) {
                Ok(number) if number.is_finite() || !self.is_json => {
                    to.write_str(&python_float(number))
                }
                _ => to.write_str("null"),
            },
            (ValueKind::Number, _) => write!(to, "{value}"),
            _ if !self.is_json => write!(to, "{value}"),
            (ValueKind::Iterable, _) => self.write_items(to, value, depth),
            (ValueKind::Bool, _) => write!(to, "{}", value.is_true()),
            (ValueKind::Plain, _) => self.write_text(to, &value.to_string()),
            _ => to.write_str("null"),
        }
    }

    fn write_items<W: fmt::Write>(&self, to: &mut W, value: &Value, depth: usize) -> fmt::Result {
        let is_map = value.kind() == ValueKind::Map;
        let mut items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
        if is_map && self.sort_keys {
            items.sort();
        }
        let [separator, key_separator] = &self.separators;
        let new_line = |to: &mut W, depth| match &self.indent {
            Some(indent) => write!(to, "\n{}", indent.repeat(depth)),
            None => Ok(()),
        };
        to.write_char(if is_map { '{' } else { '[' })?;
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                to.write_str(separator)?;
            }
            new_line(to, depth + 1)?;
            if !is_map {
                self.write(to, item, depth + 1)?;
                continue;
            }
            // Keys of JSON are texts.
            let quote = if self.is_json && item.as_str().is_none() { "\"" } else { "" };
            to.write_str(quote)?;
            self.write(to, item, depth + 1)?;
            write!(to, "{quote}{key_separator}")?;
            self.write(to, &value.get_item(item).unwrap_or_default(), depth + 1)?;
        }
        if !items.is_empty() {
            new_line(to, depth)?;
        }
        to.write_char(if is_map { '}' } else { ']' })
    }

    fn write_text(&self, to: &mut impl fmt::Write, text: &str) -> fmt::Result {
        if !self.is_json {
            return write_text(to, text);
        }
        // A text always serializes.
        let json = serde_json::to_string(text).unwrap_or_default();
        if !self.ensure_ascii {
            return to.write_str(&json);
        }
        json.chars().try_for_each(|c| match c {
            ' '..='~' => to.write_char(c),
            _ => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|u| write!(to, "\\u{u:04x}")),
        })
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
fn write_text(f: &mut impl fmt::Write, text: &str) -> fmt::Result {
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
