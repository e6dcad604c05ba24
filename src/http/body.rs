//! JSON bodies. Errors of requests name the field, its value and the allowed values.
//!
//! `null` counts as absent, as in OpenAI's API.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::header;
use axum::http::request::Parts;
use serde::Serialize;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Time within which a client must send its whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A request body that is a JSON object.
///
/// The content type must be `application/json`: browsers then send a preflight request first, so
/// that a foreign web page cannot post feedback to a server on its visitor's machine.
pub(super) struct JsonObject(pub(super) Map<String, Value>);

/// A request body that is any JSON, under the conditions of [`JsonObject`].
pub(super) struct JsonValue(pub(super) Value);

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
        let header = request.headers().get(header::CONTENT_TYPE);
        let kind = header.and_then(|v| v.to_str().ok()).unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::not_json(kind));
        }
        let bytes = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state))
            .await
            .map_err(|_| ApiError::slow_body())??;
        let value = serde_json::from_slice(&bytes);
        let invalid = |error: serde_json::Error| {
            ApiError::body(format!("the body is not valid JSON: {error}"))
        };
        value.map(Self).map_err(invalid)
    }
}

/// The parameters of a request's query, each a string, as the fields of an object.
pub(super) struct QueryObject(pub(super) Map<String, Value>);

impl<S: Send + Sync> FromRequestParts<S> for QueryObject {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<BTreeMap<String, String>>::from_request_parts(parts, state).await;
        let invalid = |error: QueryRejection| ApiError::body(error.body_text());
        let Query(pairs) = query.map_err(invalid)?;
        Ok(Self(pairs.into_iter().map(|(name, text)| (name, Value::from(text))).collect()))
    }
}

/// OpenAI's list object, for responses.
#[derive(Serialize)]
pub(super) struct List<T> {
    object: &'static str,
    data: Vec<T>,
}

impl<T> List<T> {
    pub(super) fn new(data: impl Iterator<Item = T>) -> Self {
        Self { object: "list", data: data.collect() }
    }
}

/// The fields of one JSON object in a request body.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object in the body, such as `messages[0].`, which errors put before names.
    prefix: String,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: String::new() }
    }

    /// [`Self::new`] for an object that may have only the fields `names`.
    pub(super) fn only(map: &'a Map<String, Value>, names: &[&str]) -> Result<Self, ApiError> {
        let fields = Self::new(map);
        if let Some(name) = fields.names().find(|name| !names.contains(name)) {
            let message = format!("{name} is not a field: the fields are {}", names.join(", "));
            return Err(ApiError::unsupported(name, message));
        }
        Ok(fields)
    }

    /// The object at `path`, such as `messages[0]`.
    pub(super) fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let map = value.as_object().ok_or_else(|| invalid(path, value, "an object"))?;
        Ok(Self { map, prefix: format!("{path}.") })
    }

    /// The full path of a field.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The names of the present fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    /// The error for a present field with a wrong value.
    pub(super) fn invalid(&self, name: &str, allowed: impl Display) -> ApiError {
        invalid(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// The error for an absent field.
    pub(super) fn missing(&self, name: &str, allowed: impl Display) -> ApiError {
        let path = self.path(name);
        ApiError::field(&path, format!("{path} is missing: it must be {allowed}"))
    }

    /// Converts a field if it is present; `convert` returns `None` for a wrong value.
    pub(super) fn read<T>(
        &self,
        name: &str,
        allowed: impl Display,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let read = |value| convert(value).ok_or_else(|| self.invalid(name, allowed));
        self.get(name).map(read).transpose()
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A string of at most `longest` characters.
    pub(super) fn short_text(
        &self,
        name: &str,
        longest: usize,
    ) -> Result<Option<&'a str>, ApiError> {
        match self.text(name)? {
            Some(text) if text.chars().count() > longest => {
                Err(self.invalid(name, format_args!("at most {longest} characters long")))
            }
            other => Ok(other),
        }
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(super) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let allowed = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, allowed, |v| v.as_f64().filter(|x| range.contains(x)))
    }

    pub(super) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let allowed = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(name, allowed, |v| v.as_i64().filter(|x| range.contains(x)))
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }
}

/// The error `path is value: it must be allowed`.
pub(super) fn invalid(path: &str, value: &Value, allowed: impl Display) -> ApiError {
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
