//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`, and
//! Anthropic's headers of all responses.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, header};
use axum::middleware::Next;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use crate::http::auth::ApiKey;
use crate::http::error::ApiError;
use crate::http::observe::REQUEST_ID;

/// Anthropic's name of `x-request-id`.
const OWN_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The path of the API, without those below it.
const PATH: &str = "/v1/messages";

/// Gives the errors of these routes Anthropic's shape, whatever refused the request, and adds Anthropic's headers
/// with the request's id and the limits of its key.
pub async fn shape_errors(request: Request, next: Next) -> Response {
    let below = request.uri().path().strip_prefix(PATH);
    let is_own = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !is_own {
        return response;
    }
    let id = response.headers().get(REQUEST_ID).cloned();
    if let Some(error) = response.extensions().get::<ApiError>() {
        let id = id.as_ref().and_then(|id| id.to_str().ok());
        // An object of strings always serializes.
        let body = serde_json::to_string(&MessageError::new(error, id)).unwrap_or_default();
        *response.body_mut() = Body::from(body);
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if let Some(id) = id {
        response.headers_mut().insert(OWN_REQUEST_ID, id);
    }
    if let Some(key) = response.extensions().get::<Arc<ApiKey>>().cloned() {
        key.limiter.add_anthropic_headers(response.headers_mut(), Instant::now());
    }
    response
}

/// The body of an error, and the data of an event that ends a stream.
#[derive(Serialize, JsonSchema)]
pub struct MessageError<'a> {
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    error: ErrorDetail<'a>,
    request_id: Option<&'a str>,
}

/// What is wrong.
#[derive(Serialize, JsonSchema)]
struct ErrorDetail<'a> {
    r#type: &'static str,
    message: &'a str,
}

impl<'a> MessageError<'a> {
    /// The shape of `error`.
    pub fn new(error: &'a ApiError, request_id: Option<&'a str>) -> Self {
        let error = ErrorDetail { r#type: kind(error.status()), message: error.message() };
        Self { r#type: "error", error, request_id }
    }
}

/// Anthropic's type of an error with this status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}
