//! What requests contain: JSON bodies, queries and paths. `fields` declares and reads the fields of a request.
//! Errors name the field, its value and the allowed values.
//!
//! `null` counts as absent, as in OpenAI's API.

mod fields;
#[cfg(test)]
pub mod testing;

use std::collections::BTreeMap;
use std::fmt;
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
use serde_json::{Map, Value};

use super::error::{ApiError, ErrorCode, large_body};

pub use fields::{
    Field, FieldKind, FieldTable, Fields, closed, fields_of, invalid, list_of, maybe_flag,
    maybe_text, object_schema, open, or_null, text_schema,
};

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{has_more_levels, parse};

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
