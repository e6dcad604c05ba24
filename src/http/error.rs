//! Maps every error to a status code and a body in OpenAI's shape:
//! `{"error": {"message", "type", "param", "code"}}`.

use std::error::Error;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{BytesRejection, FailedToBufferBody};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use hone_core::text::shortened;
use hone_engine::{EngineError, GrammarError, SampleError};
use hone_store::StoreError;
use hone_train::TrainError;
use hone_train::policy::PolicyError;

/// Most characters of a message.
const LONGEST_MESSAGE: usize = 4096;
/// Largest `Retry-After` in seconds.
const LONGEST_RETRY: u64 = 300;

/// An error response, and an extension of that response.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(rename = "Error", with = "Envelope<'static>")]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: ErrorCode,
    retry_after: Option<u64>,
    /// The limit that refused the request: a label of `hone_http_limited_requests_total`.
    limit: Option<&'static str>,
}

/// What is wrong, for programs.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum ErrorCode {
    InvalidBody,
    InvalidValue,
    UnsupportedParameter,
    ContextLengthExceeded,
    GrammarFailed,
    InvalidApiKey,
    MissingScope,
    HostNotAllowed,
    Forbidden,
    NotFound,
    ModelNotFound,
    CompletionNotFound,
    SessionNotFound,
    CompletionNotStored,
    PreviousResponseNotFound,
    MethodNotAllowed,
    RequestTimeout,
    Conflict,
    BodyTooLarge,
    UnsupportedMediaType,
    IdempotencyKeyReused,
    RateLimitExceeded,
    QueueTimeout,
    InternalError,
    Unavailable,
}

/// The body of an error's response.
#[derive(Serialize, JsonSchema)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ErrorBody")]
struct Body<'a> {
    message: &'a str,
    #[schemars(extend("enum" = ["invalid_request_error", "rate_limit_error", "server_error"]))]
    r#type: &'static str,
    /// The field that is wrong.
    param: Option<&'a str>,
    code: ErrorCode,
}

impl ApiError {
    fn new(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        // A message may show a value of any length.
        let message = shortened(&message.into(), LONGEST_MESSAGE).into_owned();
        Self { status, message, param: None, code, retry_after: None, limit: None }
    }

    fn code(self, code: ErrorCode) -> Self {
        Self { code, ..self }
    }

    fn param(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// 429 by the limit `reason`. `wait` is the time until another request may succeed.
    pub(super) fn limited(reason: &'static str, message: String, wait: Duration) -> Self {
        // Rounded up, and bounded, because it is a prediction.
        let seconds = (wait.as_secs_f64().ceil() as u64).clamp(1, LONGEST_RETRY);
        let refused =
            Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorCode::RateLimitExceeded, message);
        Self { limit: Some(reason), ..refused.retry_after(seconds) }
    }

    /// The limit that refused the request.
    pub(super) fn limit(&self) -> Option<&'static str> {
        self.limit
    }

    /// 400 for a field. The message contains the field's name and value.
    pub(super) fn field(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::InvalidValue, message).param(param)
    }

    /// 400 for a field that Hone does not know or cannot support.
    pub(super) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::field(param, message).code(ErrorCode::UnsupportedParameter)
    }

    /// 400 for a field whose prompt does not fit into the model's context.
    pub(super) fn too_long(param: &str, prompt: usize, context: usize) -> Self {
        Self::too_large(param, EngineError::PromptTooLong { prompt, context }.to_string())
    }

    /// 400 for a field that is too large to be tokenized.
    pub(super) fn too_large(param: &str, message: String) -> Self {
        Self::field(param, message).code(ErrorCode::ContextLengthExceeded)
    }

    /// The error with the status 422, for a body that is valid in itself.
    pub(super) fn unprocessable(self) -> Self {
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, ..self }
    }

    /// 400 for a body that is not a JSON object.
    pub(super) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::InvalidBody, message)
    }

    /// 401.
    pub(super) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, ErrorCode::InvalidApiKey, message)
    }

    /// 403.
    pub(super) fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, ErrorCode::Forbidden, message)
    }

    /// 403 for a key without the scope of the route.
    pub(super) fn missing_scope(message: String) -> Self {
        Self::new(StatusCode::FORBIDDEN, ErrorCode::MissingScope, message)
    }

    /// 403 for a name of the server that a request without a key must not use.
    pub(super) fn wrong_host(host: &str) -> Self {
        let message = format!(
            "the header Host is {host:?}: without a key it must be localhost, a loopback address, the \
             address of server.bind or one of server.hosts"
        );
        Self::new(StatusCode::FORBIDDEN, ErrorCode::HostNotAllowed, message)
    }

    /// 404.
    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorCode::NotFound, message)
    }

    /// 404 for a model name.
    pub(super) fn no_such_model(name: &str, known: &str) -> Self {
        let message = format!("model is {name:?}: it must be {known}");
        Self::not_found(message).param("model").code(ErrorCode::ModelNotFound)
    }

    /// 404 for a completion that the field `param` names. An unknown choice of a known completion is a
    /// 400 of `feedback`.
    pub(super) fn no_such_completion(param: &str, id: &str) -> Self {
        let message = format!("{param} is {id:?}: there is no such completion");
        Self::not_found(message).param(param).code(ErrorCode::CompletionNotFound)
    }

    /// 404 for an item of a response that the field `param` names.
    pub(super) fn no_such_item(param: &str, id: &str) -> Self {
        let message = format!("{param} is {id:?}: there is no such item");
        Self::not_found(message).param(param).code(ErrorCode::CompletionNotFound)
    }

    /// 404 for a completion that the field `param` names and that was not kept.
    pub(super) fn unstored_completion(param: &str, id: &str) -> Self {
        let message = format!(
            "{param} is {id:?}: nothing of this completion was kept (\"store\" is false for its \
             request, its route or its key)"
        );
        Self::not_found(message).param(param).code(ErrorCode::CompletionNotStored)
    }

    /// 400 for a response that cannot be continued, as in OpenAI's API.
    pub(super) fn no_previous_response(message: String) -> Self {
        Self::field("previous_response_id", message).code(ErrorCode::PreviousResponseNotFound)
    }

    /// 404 for a conversation.
    pub(super) fn no_such_session(session: &str) -> Self {
        let message =
            format!("session_id is {session:?}: this key made no request in this session");
        Self::not_found(message).param("session_id").code(ErrorCode::SessionNotFound)
    }

    /// 405.
    pub(super) fn wrong_method(method: &Method, path: &str) -> Self {
        let message = format!("{method} is not allowed on {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, ErrorCode::MethodNotAllowed, message)
    }

    /// 408.
    pub(super) fn slow_body() -> Self {
        let message = "the body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, ErrorCode::RequestTimeout, message)
    }

    /// 409.
    fn conflict(message: String) -> Self {
        Self::new(StatusCode::CONFLICT, ErrorCode::Conflict, message)
    }

    /// 413.
    pub(super) fn large_body() -> Self {
        let message =
            "the body is larger than server.max_body_bytes, or the 256 KiB of a grader, allows";
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::BodyTooLarge, message)
    }

    /// 415.
    pub(super) fn not_json(found: &str) -> Self {
        let message = format!("content-type is {found:?}: it must be application/json");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, ErrorCode::UnsupportedMediaType, message)
    }

    /// 415 for a body that is compressed.
    pub(super) fn encoded(found: &str) -> Self {
        let message = format!("content-encoding is {found:?}: a body must not be compressed");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, ErrorCode::UnsupportedMediaType, message)
    }

    /// 422 for an idempotency key that was posted before with something else.
    pub(super) fn reused_key(key: &str) -> Self {
        let message = format!(
            "idempotency_key is {key:?}: it was used for another target or another content"
        );
        Self::field("idempotency_key", message)
            .code(ErrorCode::IdempotencyKeyReused)
            .unprocessable()
    }

    /// 500. The message contains no internal detail; the log does.
    pub(super) fn internal() -> Self {
        let message = "the server failed internally; the reason is in its log";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::InternalError, message)
    }

    /// 500 with `error` logged after `context`.
    pub(super) fn logged(context: &str, error: &dyn Error) -> Self {
        tracing::error!(%error, "{context}");
        Self::internal()
    }

    /// 503.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Unavailable, message).retry_after(1)
    }

    /// The status code.
    pub(super) fn status(&self) -> u16 {
        self.status.as_u16()
    }

    /// The message, which names the field if there is one.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The body as JSON text, for the last event of a failed stream.
    pub(super) fn to_json(&self) -> String {
        // An object of strings always serializes.
        serde_json::to_string(self).unwrap_or_default()
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

/// The body of the response.
impl Serialize for ApiError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Envelope { error: self.as_body() }.serialize(serializer)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(&self)).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Overloaded { retry_after, .. } => {
                Self::limited("queue_full", message, retry_after)
            }
            EngineError::ShareExceeded { retry_after, .. } => {
                Self::limited("queue_share", message, retry_after)
            }
            EngineError::QueueTimeout { retry_after, .. } => {
                Self::limited("queue_timeout", message, retry_after).code(ErrorCode::QueueTimeout)
            }
            EngineError::PromptTooLong { prompt, context } => {
                Self::too_long("messages", prompt, context)
            }
            EngineError::Invalid(_) | EngineError::TooManyChoices { .. } => {
                Self::body(message).code(ErrorCode::InvalidValue)
            }
            EngineError::Sample(SampleError::Grammar(error)) => {
                Self::body(error.to_string()).code(ErrorCode::GrammarFailed)
            }
            EngineError::Preempted | EngineError::ShuttingDown => Self::unavailable(message),
            _ => Self::logged("request failed", &error),
        }
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> Self {
        match error {
            GrammarError::Busy { .. } => EngineError::from(error).into(),
            error => Self::logged("a grammar cannot be compiled", &error),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Overloaded | StoreError::Closed => Self::unavailable(error.to_string()),
            _ => Self::logged("request failed", &error),
        }
    }
}

impl From<TrainError> for ApiError {
    fn from(error: TrainError) -> Self {
        let message = error.to_string();
        match error {
            TrainError::Disabled | TrainError::NothingReady | TrainError::CanaryRunning(_) => {
                Self::conflict(message)
            }
            TrainError::Stopped => Self::unavailable(message),
            TrainError::Failed(_) => Self::logged("request failed", &error),
        }
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        let message = error.to_string();
        match error {
            PolicyError::Unknown(_) => Self::not_found(message).param("version"),
            PolicyError::Unservable { .. } => Self::conflict(message),
            PolicyError::Engine(error) => error.into(),
            PolicyError::Store(error) => error.into(),
            PolicyError::Files(_) | PolicyError::Candidate(_) => {
                Self::logged("request failed", &error)
            }
        }
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> Self {
        match rejection {
            BytesRejection::FailedToBufferBody(FailedToBufferBody::LengthLimitError(_)) => {
                Self::large_body()
            }
            _ => Self::body("the body could not be read"),
        }
    }
}
