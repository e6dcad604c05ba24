//! Reads a JSON object from a request, refusing everything else in OpenAI's shape.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use serde_json::{Map, Value};

use super::error::ApiError;

/// A client that sends its body more slowly than this is cut off.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The body, a JSON object.
///
/// `application/json` is required: it makes browsers ask first, so that no foreign page can post
/// feedback to a server on its visitor's machine.
pub(super) struct JsonObject(pub(super) Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for JsonObject {
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
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(ApiError::body("the body must be a JSON object")),
            Err(error) => Err(ApiError::body(format!("the body is not valid JSON: {error}"))),
        }
    }
}
