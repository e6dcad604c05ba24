//! The declaration of a request's fields. The reader refuses what it excludes, and the OpenAPI document shows
//! it as a JSON schema.

use serde_json::{Map, Value, json};

/// The fields of a request, in groups that several requests share.
pub(in crate::http) type FieldTable = &'static [&'static [Field]];

/// One field.
#[derive(Clone, Copy)]
pub(in crate::http) struct Field {
    pub(in crate::http) name: &'static str,
    pub(super) kind: FieldKind,
    pub(super) effect: FieldEffect,
    is_required: bool,
    /// What the field does, for the document.
    about: &'static str,
}

/// The value that a field must have.
#[derive(Clone, Copy)]
pub(super) enum FieldKind {
    Flag,
    Text,
    /// A text of at most this many characters.
    ShortText(usize),
    OneOf(&'static [&'static str]),
    Number(f64, f64),
    Integer(i64, i64),
    /// A shape that the request's reader checks. The function returns its JSON schema.
    Json(fn() -> Value),
}

/// What becomes of a field.
#[derive(Clone, Copy)]
pub(super) enum FieldEffect {
    Served,
    /// Accepted with any value, because the field would change nothing.
    Ignored,
    /// Not supported: refused unless its value is false, 0 or empty.
    Refused,
    /// Refused unless it has its default value, which is written as JSON.
    Only(&'static str),
}

impl Field {
    const fn new(name: &'static str, kind: FieldKind, about: &'static str) -> Self {
        Self { name, kind, effect: FieldEffect::Served, is_required: false, about }
    }

    /// `true` or `false`.
    pub(in crate::http) const fn flag(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Flag, about)
    }

    pub(in crate::http) const fn text(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Text, about)
    }

    /// A text of at most `longest` characters.
    pub(in crate::http) const fn short_text(
        name: &'static str,
        longest: usize,
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::ShortText(longest), about)
    }

    /// One of `texts`.
    pub(in crate::http) const fn one_of(
        name: &'static str,
        texts: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::OneOf(texts), about)
    }

    /// A number from `least` to `most`.
    pub(in crate::http) const fn number(
        name: &'static str,
        least: f64,
        most: f64,
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::Number(least, most), about)
    }

    /// A whole number from `least` to `most`.
    pub(in crate::http) const fn integer(
        name: &'static str,
        least: i64,
        most: i64,
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::Integer(least, most), about)
    }

    /// A shape that the reader checks, with its JSON schema.
    pub(in crate::http) const fn json(
        name: &'static str,
        schema: fn() -> Value,
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::Json(schema), about)
    }

    /// A field without effect.
    pub(in crate::http) const fn ignored(name: &'static str) -> Self {
        let field = Self::json(name, || json!({}), "Has no effect.");
        Self { effect: FieldEffect::Ignored, ..field }
    }

    /// A field that is not supported.
    pub(in crate::http) const fn refused(name: &'static str) -> Self {
        let schema = || json!({"enum": [null, false, 0, "", [], {}]});
        let field = Self::json(name, schema, "Not supported.");
        Self { effect: FieldEffect::Refused, ..field }
    }

    /// A field of which only the default value is supported.
    pub(in crate::http) const fn only(name: &'static str, default: &'static str) -> Self {
        let field = Self::json(name, || json!({}), "Only the default is supported.");
        Self { effect: FieldEffect::Only(default), ..field }
    }

    /// The field as one that a request must have.
    pub(in crate::http) const fn required(self) -> Self {
        Self { is_required: true, ..self }
    }

    /// Whether a request must have the field.
    pub(in crate::http) fn is_required(&self) -> bool {
        self.is_required
    }

    /// The JSON schema of the value in a body, which may be null if the field is not required.
    pub(in crate::http) fn body_schema(&self) -> Value {
        let schema = self.value_schema();
        self.described(if self.is_required { schema } else { or_null(schema) })
    }

    /// The JSON schema of the value in a query, which is a text.
    pub(in crate::http) fn query_schema(&self) -> Value {
        self.described(match self.effect {
            FieldEffect::Refused => json!({"const": ""}),
            _ => self.value_schema(),
        })
    }

    fn value_schema(&self) -> Value {
        match self.effect {
            FieldEffect::Only(default) => json!({"const": parsed(default)}),
            _ => self.kind.schema(),
        }
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
    pub(super) fn problem(&self, value: &Value) -> Option<String> {
        let (is_valid, allowed) = match *self {
            Self::Flag => (value.is_boolean(), "true or false".to_owned()),
            Self::Text => (value.is_string(), "a string".to_owned()),
            Self::ShortText(longest) => match value.as_str() {
                None => (false, "a string".to_owned()),
                Some(text) => {
                    (text.chars().count() <= longest, format!("at most {longest} characters long"))
                }
            },
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
            Self::Json(_) => return None,
        };
        (!is_valid).then_some(allowed)
    }

    fn schema(&self) -> Value {
        match *self {
            Self::Flag => json!({"type": "boolean"}),
            Self::Text => json!({"type": "string"}),
            Self::ShortText(longest) => json!({"type": "string", "maxLength": longest}),
            Self::OneOf(texts) => json!({"type": "string", "enum": texts}),
            Self::Number(least, most) => {
                json!({"type": "number", "minimum": least, "maximum": most})
            }
            Self::Integer(least, most) => {
                json!({"type": "integer", "minimum": least, "maximum": most})
            }
            Self::Json(schema) => schema(),
        }
    }
}

impl FieldEffect {
    /// Why a value is refused, after the field's name; `None` if it is not.
    pub(super) fn refusal(&self, value: &Value) -> Option<String> {
        match *self {
            Self::Served | Self::Ignored => None,
            Self::Refused => {
                (!is_empty(value)).then(|| "is not supported: leave it out".to_owned())
            }
            Self::Only(default) => {
                let default = parsed(default);
                let is_number = value.is_number() && value.as_f64() == default.as_f64();
                (*value != default && !is_number)
                    .then(|| format!("is {value}: only the default is supported"))
            }
        }
    }
}

/// All fields of a table.
pub(in crate::http) fn fields_of(table: FieldTable) -> impl Iterator<Item = &'static Field> {
    table.iter().copied().flatten()
}

/// The JSON schema of an object with the fields of a table and no others.
pub(in crate::http) fn object_schema(table: FieldTable) -> Value {
    let properties: Map<String, Value> =
        fields_of(table).map(|field| (field.name.to_owned(), field.body_schema())).collect();
    let required: Vec<_> =
        fields_of(table).filter(|field| field.is_required).map(|field| field.name).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

/// A schema that permits null, too.
pub(in crate::http) fn or_null(mut schema: Value) -> Value {
    if schema.as_object().is_some_and(Map::is_empty) {
        return schema;
    }
    if let Some(value) = schema.get("const") {
        return json!({"enum": [value, null]});
    }
    let has_enum = match schema.get_mut("enum").and_then(Value::as_array_mut) {
        Some(list) => {
            if !list.contains(&Value::Null) {
                list.push(Value::Null);
            }
            true
        }
        None => false,
    };
    match schema.get("type").and_then(Value::as_str).map(str::to_owned) {
        Some(kind) => {
            if let Some(slot) = schema.get_mut("type") {
                *slot = json!([kind, "null"]);
            }
            schema
        }
        None if has_enum => schema,
        None => json!({"anyOf": [schema, {"type": "null"}]}),
    }
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
        let audio = FieldEffect::Refused;
        let only = FieldEffect::Only("1");
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
