//! What requests contain: JSON bodies, queries and paths, and the fields of a request. A table declares the fields: the
//! reader refuses what it excludes, and the OpenAPI document shows it as a JSON schema. Errors name the field, its
//! value and the allowed values.
//!
//! `null` counts as absent, as in OpenAI's API.

#[cfg(test)]
pub mod testing;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::auth::Caller;
use super::error::{ApiError, ErrorCode, large_body};
use super::state::AppState;

/// Time within which a client must send its whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Levels of objects and lists that a body may have. Responses repeat parts of requests some levels deeper, and
/// clients read JSON with at most 128 levels (serde_json) or few more.
const MAX_LEVELS: usize = 100;

/// A request body that is a JSON object.
///
/// The content type must be `application/json`: browsers then send a preflight request first, so
/// that a foreign web page cannot post feedback to a server on its visitor's machine.
pub struct JsonObject(pub Map<String, Value>);

/// A request body that is any JSON, under the conditions of [`JsonObject`].
pub struct JsonValue(pub Value);

impl<S: Send + Sync> FromRequest<S> for JsonObject {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match JsonValue::from_request(request, state).await?.0 {
            Value::Object(map) => Ok(Self(map)),
            _ => Err(ApiError::body("the body must be a JSON object")),
        }
    }
}

impl<S: Send + Sync> FromRequest<S> for JsonValue {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING) {
            let encoding = encoding.to_str().unwrap_or_default();
            if !encoding.eq_ignore_ascii_case("identity") {
                let message =
                    format!("content-encoding is {encoding:?}: a body must not be compressed");
                return Err(ApiError::new(ErrorCode::UnsupportedMediaType, message));
            }
        }
        let header = request.headers().get(header::CONTENT_TYPE);
        let kind = header.and_then(|v| v.to_str().ok()).unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            let message = format!("content-type is {kind:?}: it must be application/json");
            return Err(ApiError::new(ErrorCode::UnsupportedMediaType, message));
        }
        let bytes = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        let slow = "the body did not arrive in time";
        let bytes = bytes.map_err(|_| ApiError::new(ErrorCode::RequestTimeout, slow))??;
        let value = parse(&bytes).map_err(ApiError::body)?;
        if has_more_levels(&value, MAX_LEVELS) {
            let message =
                format!("the body has more than {MAX_LEVELS} levels of objects and lists");
            return Err(ApiError::body(message));
        }
        Ok(Self(value))
    }
}

/// Reads JSON in which no object has a name twice: readers differ in which value counts, so that a proxy could check
/// another one than Hone uses.
fn parse(bytes: &[u8]) -> Result<Value, String> {
    let distinct = serde_json::from_slice(bytes).map(|Distinct(value)| value);
    distinct.map_err(|error| format!("the body is not valid JSON: {error}"))
}

/// JSON whose objects have distinct names.
struct Distinct(Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DistinctVisitor).map(Self)
    }
}

struct DistinctVisitor;

impl<'de> Visitor<'de> for DistinctVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Distinct(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let Distinct(value) = fields.next_value()?;
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("the name {name:?} is repeated")));
            }
            object.insert(name, value);
        }
        Ok(object.into())
    }
}

/// Refuses a body that declares more than `most` bytes before it is read, so that a client that sends
/// `Expect: 100-continue` does not send it. A body that declares nothing is limited by `DefaultBodyLimit`.
pub async fn check_length(State(most): State<usize>, request: Request, next: Next) -> Response {
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > most as u64) {
        return large_body().into_response();
    }
    next.run(request).await
}

/// Whether objects and lists are nested more than `levels` deep.
fn has_more_levels(value: &Value, levels: usize) -> bool {
    let inner_has = |value: &Value| has_more_levels(value, levels.saturating_sub(1));
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(inner_has),
        Value::Object(fields) => levels == 0 || fields.values().any(inner_has),
        _ => false,
    }
}

/// What a handler gets of a request beside its content.
pub struct Call(pub Arc<AppState>, pub Caller);

impl FromRequestParts<Arc<AppState>> for Call {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<AppState>,
    ) -> Result<Self, ApiError> {
        // Authentication adds the caller.
        let caller = parts.extensions.get().cloned().ok_or_else(ApiError::internal)?;
        Ok(Self(Arc::clone(state), caller))
    }
}

/// The parameters of a request's query, each a string, as the fields of an object.
pub struct QueryObject(pub Map<String, Value>);

impl<S: Send + Sync> FromRequestParts<S> for QueryObject {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<BTreeMap<String, String>>::from_request_parts(parts, state).await;
        let invalid = |error: QueryRejection| ApiError::body(error.body_text());
        let Query(pairs) = query.map_err(invalid)?;
        Ok(Self(pairs.into_iter().map(|(name, text)| (name, Value::from(text))).collect()))
    }
}

/// The parameter of a request's path. A text that is not UTF-8 names nothing.
pub struct PathText(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathText {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            Err(_) => {
                let message = format!("there is no {}", parts.uri.path());
                Err(ApiError::new(ErrorCode::NotFound, message))
            }
        }
    }
}

/// OpenAI's list object, for responses.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ListOf{T}")]
pub struct List<T> {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<T>,
}

impl<T> List<T> {
    pub fn new(data: impl Iterator<Item = T>) -> Self {
        Self { object: "list", data: data.collect() }
    }
}

// The fields of JSON objects.

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
    /// What the field does, for the document; empty if its name says it.
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
    /// An object with these fields and no others.
    Object(FieldTable),
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

    pub const fn flag(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Flag, about)
    }

    pub const fn text(name: &'static str, about: &'static str) -> Self {
        Self::new(name, FieldKind::Text, about)
    }

    pub const fn short_text(name: &'static str, longest: usize, about: &'static str) -> Self {
        Self::new(name, FieldKind::ShortText(longest), about)
    }

    pub const fn one_of(
        name: &'static str,
        texts: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        Self::new(name, FieldKind::OneOf(texts), about)
    }

    pub const fn number(name: &'static str, least: f64, most: f64, about: &'static str) -> Self {
        Self::new(name, FieldKind::Number(least, most), about)
    }

    pub const fn integer(name: &'static str, least: i64, most: i64, about: &'static str) -> Self {
        Self::new(name, FieldKind::Integer(least, most), about)
    }

    pub const fn object(name: &'static str, table: FieldTable, about: &'static str) -> Self {
        Self::new(name, FieldKind::Object(table), about)
    }

    /// A shape that the reader checks, with its JSON schema.
    pub const fn json(name: &'static str, schema: fn() -> Value, about: &'static str) -> Self {
        Self::new(name, FieldKind::Json(schema), about)
    }

    pub const fn ignored(name: &'static str) -> Self {
        Self::new(name, FieldKind::Ignored, "Has no effect.")
    }

    pub const fn refused(name: &'static str) -> Self {
        Self::new(name, FieldKind::Refused, "Not supported.")
    }

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
        if !self.about.is_empty() {
            schema["description"] = self.about.into();
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
            Self::Object(_) => (value.is_object(), "an object".to_owned()),
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
            Self::Object(table) => object_schema(table),
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

pub fn text_schema() -> Value {
    json!({"type": "string"})
}

pub fn maybe_text() -> Value {
    or_null(text_schema())
}

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
    let empty = [json!(null), json!(false), json!(""), json!([]), json!({})];
    empty.contains(value) || value.as_f64() == Some(0.0)
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
        fields.check(table)?;
        Ok(fields)
    }

    /// [`Self::of`] for the object at `path`.
    pub fn of_table_at(path: &str, value: &'a Value, table: FieldTable) -> Result<Self, ApiError> {
        let fields = Self::at(path, value)?;
        fields.check(table)?;
        Ok(fields)
    }

    /// Refuses fields that a table does not have, and values that it excludes.
    pub fn check(&self, table: FieldTable) -> Result<(), ApiError> {
        let is_unknown = |name: &&str| !fields_of(table).any(|field| field.name == *name);
        if let Some(name) = self.names().find(is_unknown) {
            let names: Vec<_> = fields_of(table).map(|field| field.name).collect();
            return Err(if names.len() > MAX_LISTED || !self.prefix.is_empty() {
                self.unsupported(name, "is not a known field")
            } else {
                let listed = names.join(", ");
                self.unsupported(name, format_args!("is not a field: the fields are {listed}"))
            });
        }
        for field in fields_of(table) {
            let Some(value) = self.checked(field.name, field.kind)? else { continue };
            if let Some(reason) = field.kind.refusal(value) {
                return Err(self.unsupported(field.name, reason));
            }
            if let FieldKind::Object(inner) = field.kind {
                Self::of_table_at(&self.path(field.name), value, inner)?;
            }
        }
        Ok(())
    }

    /// The fields of an object whose table was checked.
    pub fn inner(&self, name: &str) -> Option<Self> {
        let map = self.get(name).and_then(Value::as_object)?;
        Some(Self { map, prefix: format!("{}.", self.path(name)) })
    }

    pub fn float(&self, name: &str) -> Option<f64> {
        self.get(name).and_then(Value::as_f64)
    }

    pub fn whole(&self, name: &str) -> Option<i64> {
        self.get(name).and_then(Value::as_i64)
    }

    /// The object at `path`, such as `messages[0]`.
    pub fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let map = value.as_object().ok_or_else(|| invalid(path, value, "an object"))?;
        Ok(Self { map, prefix: format!("{path}.") })
    }

    /// Refuses fields that are not `known`.
    pub fn refuse_others(&self, known: &[&str]) -> Result<(), ApiError> {
        let other = self.names().find(|name| !known.contains(name));
        other.map_or(Ok(()), |name| Err(self.unsupported(name, "is not a known field")))
    }

    /// The object in a field, which must be there.
    pub fn member(&self, name: &str) -> Result<Self, ApiError> {
        let value = self.get(name).ok_or_else(|| self.missing(name, "an object"))?;
        Fields::at(&self.path(name), value)
    }

    /// The entries of a list in a field, each with its path; no entry if the field is absent.
    pub fn entries(
        &self,
        name: &str,
    ) -> Result<impl Iterator<Item = (String, &'a Value)> + use<'a>, ApiError> {
        let (base, list) = (self.path(name), self.list(name)?.map_or(&[][..], Vec::as_slice));
        Ok(list.iter().enumerate().map(move |(at, value)| (format!("{base}[{at}]"), value)))
    }

    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

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

    /// A copy of a text that must be there.
    pub fn string(&self, name: &str) -> Result<String, ApiError> {
        self.required(name, "a string").map(str::to_owned)
    }

    pub fn owned(&self, name: &str) -> Result<Option<String>, ApiError> {
        Ok(self.text(name)?.map(str::to_owned))
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        Ok(self.checked(name, FieldKind::Flag)?.and_then(Value::as_bool))
    }

    pub fn is_set(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.boolean(name)?.unwrap_or(false))
    }

    pub fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        Ok(self.checked(name, FieldKind::Number(least, most))?.and_then(Value::as_f64))
    }

    pub fn integer(&self, name: &str, least: i64, most: i64) -> Result<Option<i64>, ApiError> {
        Ok(self.checked(name, FieldKind::Integer(least, most))?.and_then(Value::as_i64))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }
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

    #[test]
    fn a_name_has_one_value() {
        for text in [r#"{"a": {"b": 1}, "c": [{"b": null}, true, -1, 1.5, "b"]}"#, "1e400", "[", ""]
        {
            let whole = serde_json::from_str::<serde_json::Value>(text);
            assert_eq!(parse(text.as_bytes()).ok(), whole.ok());
        }
        for text in [r#"{"a": 1, "\u0061": 2}"#, r#"[{"b": {"a": 1, "c": 2, "a": 1}}]"#] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains("the name \"a\" is repeated at line 1"), "{error}");
        }
    }

    #[test]
    fn objects_and_lists_are_levels() {
        let nested = json!({"a": [1, {"b": "text"}], "c": 2});
        assert_eq!([2, 3].map(|levels| has_more_levels(&nested, levels)), [true, false]);
        assert!(!has_more_levels(&json!("text"), 0) && has_more_levels(&json!([]), 0));
    }
}
