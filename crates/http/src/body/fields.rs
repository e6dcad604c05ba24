//! Declares the fields of requests, and reads those of a JSON object. The reader refuses what a declaration excludes,
//! and the OpenAPI document shows it as a JSON schema.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Largest number of names that the error for an unknown field lists.
const MAX_LISTED: usize = 10;

/// The fields of a request, in groups that several requests share.
pub type FieldTable = &'static [&'static [Field]];

/// One field.
#[derive(Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    kind: FieldKind,
    /// Whether a request must have the field.
    pub is_required: bool,
    /// What the field does, for the document.
    about: &'static str,
}

/// The value that a field must have.
#[derive(Clone, Copy)]
pub enum FieldKind {
    Flag,
    Text,
    /// A text of at most this many characters.
    ShortText(usize),
    OneOf(&'static [&'static str]),
    Number(f64, f64),
    Integer(i64, i64),
    /// A shape that the request's reader checks. The function returns its JSON schema.
    Json(fn() -> Value),
    /// Accepted with any value, because the field would change nothing.
    Ignored,
    /// Not supported: refused unless its value is false, 0 or empty.
    Refused,
    /// Refused unless it has its default value, which is written as JSON.
    Only(&'static str),
}

impl Field {
    const fn new(name: &'static str, kind: FieldKind, about: &'static str) -> Self {
        Self { name, kind, is_required: false, about }
    }

    /// `true` or `false`.
    pub const fn flag(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Flag, about)
    }

    pub const fn text(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Text, about)
    }

    /// A text of at most `longest` characters.
    pub const fn short_text(name: &'static str, longest: usize, about: &'static str) -> Self {
        Self::new(name, FieldKind::ShortText(longest), about)
    }

    /// One of `texts`.
    pub const fn one_of(
        name: &'static str,
        texts: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::OneOf(texts), about)
    }

    /// A number from `least` to `most`.
    pub const fn number(name: &'static str, least: f64, most: f64, about: &'static str) -> Self {
        Self::new(name, FieldKind::Number(least, most), about)
    }

    /// A whole number from `least` to `most`.
    pub const fn integer(name: &'static str, least: i64, most: i64, about: &'static str) -> Self {
        Self::new(name, FieldKind::Integer(least, most), about)
    }

    /// A shape that the reader checks, with its JSON schema.
    pub const fn json(name: &'static str, schema: fn() -> Value, about: &'static str) -> Self {
        Self::new(name, FieldKind::Json(schema), about)
    }

    /// A field without effect.
    pub const fn ignored(name: &'static str) -> Self {
        Self::new(name, FieldKind::Ignored, "Has no effect.")
    }

    /// A field that is not supported.
    pub const fn refused(name: &'static str) -> Self {
        Self::new(name, FieldKind::Refused, "Not supported.")
    }

    /// A field of which only the default value is supported.
    pub const fn only(name: &'static str, default: &'static str) -> Self {
        Self::new(name, FieldKind::Only(default), "Only the default is supported.")
    }

    /// The field as one that a request must have.
    pub const fn required(self) -> Self {
        Self { is_required: true, ..self }
    }

    /// The JSON schema of the value in a body, which may be null if the field is not required.
    fn body_schema(&self) -> Value {
        let schema = self.kind.schema();
        self.described(if self.is_required { schema } else { or_null(schema) })
    }

    /// The JSON schema of the value in a query, which is a text.
    pub fn query_schema(&self) -> Value {
        self.described(match self.kind {
            FieldKind::Refused => json!({"const": ""}),
            kind => kind.schema(),
        })
    }

    fn described(&self, mut schema: Value) -> Value {
        if let Some(map) = schema.as_object_mut() {
            map.insert("description".to_owned(), Value::from(self.about));
        }
        schema
    }
}

impl FieldKind {
    /// What a value must be; `None` if it is that.
    pub fn problem(&self, value: &Value) -> Option<String> {
        let (is_valid, allowed) = match *self {
            Self::Flag => (value.is_boolean(), "true or false".to_owned()),
            Self::ShortText(longest) if value.is_string() => {
                let is_short = value.as_str().is_some_and(|text| text.chars().count() <= longest);
                (is_short, format!("at most {longest} characters long"))
            }
            Self::Text | Self::ShortText(_) => (value.is_string(), "a string".to_owned()),
            Self::OneOf(texts) => {
                let quoted: Vec<_> = texts.iter().map(|text| format!("{text:?}")).collect();
                let is_one = value.as_str().is_some_and(|text| texts.contains(&text));
                (is_one, format!("one of {}", quoted.join(", ")))
            }
            Self::Number(least, most) => {
                let is_within = value.as_f64().is_some_and(|x| (least..=most).contains(&x));
                (is_within, format!("a number from {least} to {most}"))
            }
            Self::Integer(least, most) => {
                let is_within = value.as_i64().is_some_and(|x| (least..=most).contains(&x));
                (is_within, format!("a whole number from {least} to {most}"))
            }
            Self::Json(_) | Self::Ignored | Self::Refused | Self::Only(_) => return None,
        };
        (!is_valid).then_some(allowed)
    }

    fn schema(&self) -> Value {
        match *self {
            Self::Flag => json!({"type": "boolean"}),
            Self::Text => text_schema(),
            Self::ShortText(longest) => json!({"type": "string", "maxLength": longest}),
            Self::OneOf(texts) => json!({"type": "string", "enum": texts}),
            Self::Number(least, most) => {
                json!({"type": "number", "minimum": least, "maximum": most})
            }
            Self::Integer(least, most) => {
                json!({"type": "integer", "minimum": least, "maximum": most})
            }
            Self::Json(schema) => schema(),
            Self::Ignored => json!({}),
            Self::Refused => json!({"enum": [null, false, 0, "", [], {}]}),
            Self::Only(default) => json!({"const": parsed(default)}),
        }
    }

    /// Why a value is not supported, after the field's name; `None` if it is.
    fn refusal(&self, value: &Value) -> Option<String> {
        match *self {
            Self::Refused if !is_empty(value) => Some("is not supported: leave it out".to_owned()),
            Self::Only(default) => {
                let default = parsed(default);
                let is_number = value.is_number() && value.as_f64() == default.as_f64();
                (*value != default && !is_number)
                    .then(|| format!("is {value}: only the default is supported"))
            }
            _ => None,
        }
    }
}

/// All fields of a table.
pub fn fields_of(table: FieldTable) -> impl Iterator<Item = &'static Field> {
    table.iter().copied().flatten()
}

/// The JSON schema of an object with the fields of a table and no others.
pub fn object_schema(table: FieldTable) -> Value {
    let members = fields_of(table).map(|field| (field.name, field.body_schema()));
    let mut schema = closed(0, &members.collect::<Vec<_>>());
    let required = fields_of(table).filter(|field| field.is_required);
    schema["required"] = required.map(|field| field.name).collect();
    schema
}

/// The JSON schema of an object that has the first `required` ones of these members, and may have the rest.
pub fn open(required: usize, members: &[(&str, Value)]) -> Value {
    let names: Vec<_> = members.iter().take(required).map(|(name, _)| *name).collect();
    let members = members.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone()));
    let members: Map<String, Value> = members.collect();
    json!({"type": "object", "properties": members, "required": names})
}

/// [`open`] for an object without any other member.
pub fn closed(required: usize, members: &[(&str, Value)]) -> Value {
    let mut schema = open(required, members);
    schema["additionalProperties"] = false.into();
    schema
}

/// The JSON schema of a text.
pub fn text_schema() -> Value {
    json!({"type": "string"})
}

/// The JSON schema of a text or null.
pub fn maybe_text() -> Value {
    or_null(text_schema())
}

/// The JSON schema of `true`, `false` or null.
pub fn maybe_flag() -> Value {
    json!({"type": ["boolean", "null"]})
}

/// The JSON schema of a list of at least `least` items.
pub fn list_of(least: usize, items: Value) -> Value {
    json!({"type": "array", "items": items, "minItems": least})
}

/// A schema that permits null, too.
pub fn or_null(mut schema: Value) -> Value {
    if schema.as_object().is_some_and(Map::is_empty) {
        return schema;
    }
    if let Some(value) = schema.get("const") {
        return json!({"enum": [value, null]});
    }
    let list = schema.get_mut("enum").and_then(Value::as_array_mut);
    let has_enum = list.is_some();
    if let Some(list) = list.filter(|list| !list.contains(&Value::Null)) {
        list.push(Value::Null);
    }
    match schema.get("type").and_then(Value::as_str).map(str::to_owned) {
        Some(kind) => schema["type"] = json!([kind, "null"]),
        None if has_enum => {}
        None => return json!({"anyOf": [schema, {"type": "null"}]}),
    }
    schema
}

fn parsed(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

/// Whether a value changes nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// The fields of one JSON object in a request body.
#[derive(Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object in the body, such as `messages[0].`, which errors put before names.
    prefix: String,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: String::new() }
    }

    /// [`Self::new`] for the fields of a table, of which all but those of [`Field::json`] have valid values then.
    pub fn of(map: &'a Map<String, Value>, table: FieldTable) -> Result<Self, ApiError> {
        let fields = Self::new(map);
        if let Some(name) = fields.names().find(|name| !fields_of(table).any(|f| f.name == *name)) {
            return Err(unknown(name, table));
        }
        for field in fields_of(table) {
            let Some(value) = fields.get(field.name) else { continue };
            if let Some(reason) = field.kind.refusal(value) {
                let message = format!("{} {reason}", field.name);
                return Err(ApiError::unsupported(field.name, message));
            }
            fields.checked(field.name, field.kind)?;
        }
        Ok(fields)
    }

    /// The value of a field that its table declares as a number.
    pub fn float(&self, name: &str) -> Option<f64> {
        self.get(name).and_then(Value::as_f64)
    }

    /// The value of a field that its table declares as a whole number.
    pub fn whole(&self, name: &str) -> Option<i64> {
        self.get(name).and_then(Value::as_i64)
    }

    /// The object at `path`, such as `messages[0]`.
    pub fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let map = value.as_object().ok_or_else(|| invalid(path, value, "an object"))?;
        Ok(Self { map, prefix: format!("{path}.") })
    }

    /// [`Self::at`] for an object without fields that are not `known`.
    pub fn known_at(path: &str, value: &'a Value, known: &[&str]) -> Result<Self, ApiError> {
        let fields = Self::at(path, value)?;
        fields.refuse_others(known)?;
        Ok(fields)
    }

    /// Refuses fields that are not `known`.
    pub fn refuse_others(&self, known: &[&str]) -> Result<(), ApiError> {
        let Some(other) = self.names().find(|name| !known.contains(name)) else { return Ok(()) };
        let path = self.path(other);
        Err(ApiError::unsupported(&path, format!("{path} is not a known field")))
    }

    /// The object in a field, which must be there.
    pub fn member(&self, name: &str) -> Result<Self, ApiError> {
        let value = self.get(name).ok_or_else(|| self.missing(name, "an object"))?;
        Fields::at(&self.path(name), value)
    }

    /// The entries of a list in a field, each with its path.
    pub fn entries(
        &self,
        name: &str,
    ) -> Result<Option<impl Iterator<Item = (String, &'a Value)> + use<'a>>, ApiError> {
        let base = self.path(name);
        let list = self.list(name)?;
        Ok(list.map(|list| {
            list.iter().enumerate().map(move |(at, value)| (format!("{base}[{at}]"), value))
        }))
    }

    /// The full path of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The names of the present fields.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    /// The error for a present field with a wrong value.
    pub fn invalid(&self, name: &str, allowed: impl Display) -> ApiError {
        invalid(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// The error for an absent field.
    pub fn missing(&self, name: &str, allowed: impl Display) -> ApiError {
        let path = self.path(name);
        ApiError::field(&path, format!("{path} is missing: it must be {allowed}"))
    }

    /// The error for a field with a value that exists, but not here. `reason` follows the path.
    pub fn unsupported(&self, name: &str, reason: impl Display) -> ApiError {
        let path = self.path(name);
        ApiError::unsupported(&path, format!("{path} {reason}"))
    }

    /// Converts a field if it is present; `convert` returns `None` for a wrong value.
    pub fn read<T>(
        &self,
        name: &str,
        allowed: impl Display,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let read = |value| convert(value).ok_or_else(|| self.invalid(name, allowed));
        self.get(name).map(read).transpose()
    }

    /// The value of a field, which must be of a kind if it is present.
    fn checked(&self, name: &str, kind: FieldKind) -> Result<Option<&'a Value>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match kind.problem(value) {
            Some(allowed) => Err(self.invalid(name, allowed)),
            None => Ok(Some(value)),
        }
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        Ok(self.checked(name, FieldKind::Text)?.and_then(Value::as_str))
    }

    /// A text that must be there, as `allowed` describes it.
    pub fn required(&self, name: &str, allowed: impl Display) -> Result<&'a str, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name, allowed))
    }

    /// A copy of a text.
    pub fn owned(&self, name: &str) -> Result<Option<String>, ApiError> {
        Ok(self.text(name)?.map(str::to_owned))
    }

    /// A string of at most `longest` characters.
    pub fn short_text(&self, name: &str, longest: usize) -> Result<Option<&'a str>, ApiError> {
        Ok(self.checked(name, FieldKind::ShortText(longest))?.and_then(Value::as_str))
    }

    pub fn one_of(
        &self,
        name: &str,
        texts: &'static [&'static str],
    ) -> Result<Option<&'a str>, ApiError> {
        Ok(self.checked(name, FieldKind::OneOf(texts))?.and_then(Value::as_str))
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        Ok(self.checked(name, FieldKind::Flag)?.and_then(Value::as_bool))
    }

    /// Whether a field is `true`.
    pub fn is_set(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.boolean(name)?.unwrap_or(false))
    }

    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let kind = FieldKind::Number(*range.start(), *range.end());
        Ok(self.checked(name, kind)?.and_then(Value::as_f64))
    }

    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let kind = FieldKind::Integer(*range.start(), *range.end());
        Ok(self.checked(name, kind)?.and_then(Value::as_i64))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }
}

/// The error for a field that a table does not have.
fn unknown(name: &str, table: FieldTable) -> ApiError {
    let names: Vec<_> = fields_of(table).map(|field| field.name).collect();
    let message = if names.len() > MAX_LISTED {
        format!("{name} is not a known field")
    } else {
        format!("{name} is not a field: the fields are {}", names.join(", "))
    };
    ApiError::unsupported(name, message)
}

/// The error `path is value: it must be allowed`.
pub fn invalid(path: &str, value: &Value, allowed: impl Display) -> ApiError {
    ApiError::field(path, format!("{path} is {}: it must be {allowed}", shown(value)))
}

/// A value in an error message, shortened to 80 characters.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: FieldTable = &[
        &[Field::number("temperature", 0.0, 2.0, "a"), Field::integer("n", 1, 8, "b").required()],
        &[Field::one_of("order", &["asc", "desc"], "c"), Field::only("penalty", "1")],
        &[Field::refused("audio"), Field::ignored("tier"), Field::json("stop", list, "d")],
    ];

    fn list() -> Value {
        json!({"anyOf": [{"type": "string"}, {"type": "array"}]})
    }

    #[test]
    fn a_table_is_an_object_schema() {
        let schema = object_schema(TABLE);
        assert_eq!(schema["required"], json!(["n"]));
        assert_eq!(schema["additionalProperties"], json!(false));
        let schemas = &schema["properties"];
        for (name, expected) in [
            (
                "temperature",
                json!({"type": ["number", "null"], "minimum": 0.0, "maximum": 2.0, "description": "a"}),
            ),
            ("n", json!({"type": "integer", "minimum": 1, "maximum": 8, "description": "b"})),
            (
                "order",
                json!({"type": ["string", "null"], "enum": ["asc", "desc", null], "description": "c"}),
            ),
            (
                "penalty",
                json!({"enum": [1, null], "description": "Only the default is supported."}),
            ),
            (
                "audio",
                json!({"enum": [null, false, 0, "", [], {}], "description": "Not supported."}),
            ),
            ("tier", json!({"description": "Has no effect."})),
            ("stop", json!({"anyOf": [list(), {"type": "null"}], "description": "d"})),
        ] {
            assert_eq!(schemas[name], expected, "{name}");
        }
    }

    #[test]
    fn values_have_the_declared_kind() {
        for (kind, valid, invalid) in [
            (FieldKind::Flag, json!([true, false]), json!([0, "true"])),
            (FieldKind::Text, json!(["", "a"]), json!([0, []])),
            (FieldKind::ShortText(2), json!(["", "éé"]), json!(["abc", 5])),
            (FieldKind::OneOf(&["a"]), json!(["a"]), json!(["b", 1])),
            (FieldKind::Number(-1.0, 1.0), json!([-1, 0.5, 1]), json!([1.1, -2, "0"])),
            (FieldKind::Integer(1, 8), json!([1, 8]), json!([0, 9, 1.5, u64::MAX, "1"])),
            (FieldKind::Json(list), json!([1, "a"]), json!([])),
        ] {
            for value in valid.as_array().unwrap() {
                assert_eq!(kind.problem(value), None, "{value}");
            }
            for value in invalid.as_array().unwrap() {
                assert!(kind.problem(value).is_some(), "{value}");
            }
        }
    }

    #[test]
    fn unsupported_fields_are_refused_unless_they_change_nothing() {
        let audio = FieldKind::Refused;
        let only = FieldKind::Only("1");
        for value in [json!(false), json!(0), json!([]), json!({}), json!("")] {
            assert_eq!(audio.refusal(&value), None, "{value}");
        }
        for value in [json!(true), json!(1), json!([1]), json!("a")] {
            assert!(audio.refusal(&value).is_some(), "{value}");
        }
        assert_eq!((only.refusal(&json!(1)), only.refusal(&json!(1.0))), (None, None));
        assert!(only.refusal(&json!(2)).is_some() && only.refusal(&json!("1")).is_some());
    }
}
