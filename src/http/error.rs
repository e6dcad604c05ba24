//! The one place that maps errors to status codes, in OpenAI's shape:
//! `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::extract::rejection::{BytesRejection, FailedToBufferBody};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use hone_engine::EngineError;
use hone_store::StoreError;
use hone_train::TrainError;
use hone_train::policy::PolicyError;

/// An answer that is not a success.
#[derive(Debug, Clone)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u64>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// 400 for a field; the message names it and its value.
    pub(super) fn field(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
            .code("invalid_value")
    }

    /// 400 for a field that hone does not know or cannot honour.
    pub(super) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::field(param, message).code("unsupported_parameter")
    }

    /// 400 for a body that is not a JSON object.
    pub(super) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).code("invalid_body")
    }

    /// 401.
    pub(super) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key")
    }

    /// 403.
    pub(super) fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, message).code("forbidden")
    }

    /// 404.
    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message).code("not_found")
    }

    /// 404 for a model's name.
    pub(super) fn no_such_model(asked: &str, known: &str) -> Self {
        let message = format!("model is {asked:?}: it must be {known}");
        Self { param: Some("model".to_owned()), ..Self::new(StatusCode::NOT_FOUND, message) }
            .code("model_not_found")
    }

    /// 404 for a completion, 400 for its choice: see `feedback`.
    pub(super) fn no_such_completion(id: &str) -> Self {
        let message = format!("completion_id is {id:?}: there is no such completion");
        Self {
            param: Some("completion_id".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, message)
        }
        .code("completion_not_found")
    }

    /// 404 for a conversation.
    pub(super) fn no_such_session(session: &str) -> Self {
        let message =
            format!("session_id is {session:?}: nothing was asked in this session with this key");
        Self { param: Some("session_id".to_owned()), ..Self::new(StatusCode::NOT_FOUND, message) }
            .code("session_not_found")
    }

    /// 405.
    pub(super) fn wrong_method(method: &Method, path: &str) -> Self {
        let message = format!("{method} is not allowed on {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
    }

    /// 408.
    pub(super) fn slow_body() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")
            .code("request_timeout")
    }

    /// 415.
    pub(super) fn not_json(found: &str) -> Self {
        let message = format!("content-type is {found:?}: it must be application/json");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).code("unsupported_media_type")
    }

    /// 500 that says nothing of the inside; the log does.
    pub(super) fn internal() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "something failed inside the server; its log says what",
        )
        .code("internal_error")
    }

    /// 503.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("unavailable").retry_after(1)
    }

    /// 500, the reason logged.
    fn logged(error: &dyn std::error::Error) -> Self {
        tracing::error!(error = %error, "request failed");
        Self::internal()
    }

    /// The JSON text, also for the last event of a stream that failed.
    pub(super) fn to_json(&self) -> String {
        let envelope = Envelope { error: self.as_body() };
        // Strings and nothing else cannot fail to serialise.
        serde_json::to_string(&envelope).unwrap_or_default()
    }

    fn as_body(&self) -> Body<'_> {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Body { message: &self.message, r#type: kind, param: self.param.as_deref(), code: self.code }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = Json(Envelope { error: self.as_body() });
        let mut response = (self.status, body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Overloaded { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, message)
                .code("rate_limit_exceeded")
                .retry_after(1),
            EngineError::PromptTooLong { .. } => {
                Self::field("messages", message).code("context_length_exceeded")
            }
            EngineError::Invalid(_) => Self::body(message).code("invalid_value"),
            EngineError::Preempted | EngineError::ShuttingDown => Self::unavailable(message),
            _ => Self::logged(&error),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Overloaded | StoreError::Closed => Self::unavailable(error.to_string()),
            _ => Self::logged(&error),
        }
    }
}

impl From<TrainError> for ApiError {
    fn from(error: TrainError) -> Self {
        let message = error.to_string();
        match error {
            TrainError::Disabled | TrainError::NothingReady => {
                Self::new(StatusCode::CONFLICT, message).code("conflict")
            }
            TrainError::Stopped => Self::unavailable(message),
            TrainError::Failed(_) => Self::logged(&error),
        }
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        let message = error.to_string();
        match error {
            PolicyError::Unknown(_) => {
                Self { param: Some("version".to_owned()), ..Self::not_found(message) }
            }
            PolicyError::Unservable { .. } => {
                Self::new(StatusCode::CONFLICT, message).code("conflict")
            }
            PolicyError::Engine(error) => error.into(),
            PolicyError::Store(error) => error.into(),
            PolicyError::Files(_) | PolicyError::Candidate(_) => Self::logged(&error),
        }
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> Self {
        match rejection {
            BytesRejection::FailedToBufferBody(FailedToBufferBody::LengthLimitError(_)) => {
                let message = "the body is larger than server.max_body_bytes allows";
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("body_too_large")
            }
            _ => Self::body("the body could not be read"),
        }
    }
}
