//! Maps every error to a status code and a body in OpenAI's shape:
//! `{"error": {"message", "type", "param", "code"}}`.

use std::error::Error;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{BytesRejection, FailedToBufferBody};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use hone_core::text::shortened;
use hone_engine::{EngineError, GrammarError, SampleError};
use hone_store::StoreError;
use hone_train::TrainError;
use hone_train::policy::PolicyError;

/// A response in JSON, or an error.
pub type JsonResult<T> = Result<Json<T>, ApiError>;

const LONGEST_MESSAGE: usize = 4096;
/// Largest `Retry-After` in seconds.
const LONGEST_RETRY: u64 = 300;

/// An error response, and an extension of that response.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(rename = "Error", with = "Envelope<'static>")]
pub struct ApiError {
    status: StatusCode,
    /// It names the field if there is one.
    pub message: String,
    param: Option<String>,
    code: ErrorCode,
    retry_after: Option<u64>,
    /// The limit that refused the request: a label of `hone_http_limited_requests_total`.
    pub limit: Option<&'static str>,
    is_unknown: bool,
}

/// What is wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
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

impl ErrorCode {
    /// The status; 400 for what is wrong in a body.
    fn status(self) -> StatusCode {
        match self {
            Self::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Self::MissingScope | Self::HostNotAllowed | Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound
            | Self::ModelNotFound
            | Self::CompletionNotFound
            | Self::SessionNotFound
            | Self::CompletionNotStored => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Conflict => StatusCode::CONFLICT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::IdempotencyKeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::RateLimitExceeded | Self::QueueTimeout => StatusCode::TOO_MANY_REQUESTS,
            Self::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

impl ApiError {
    /// An error with the status of its code.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        // A message may show a value of any length.
        let message = shortened(&message.into(), LONGEST_MESSAGE).into_owned();
        let (status, retry_after) = (code.status(), (code == ErrorCode::Unavailable).then_some(1));
        Self { status, message, param: None, code, retry_after, limit: None, is_unknown: false }
    }

    /// The error with the field that is wrong.
    pub fn param(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// 429 by the limit `reason`. `wait` is the time until another request may succeed.
    pub fn limited(reason: &'static str, message: String, wait: Duration) -> Self {
        // Rounded up, and bounded, because it is a prediction.
        let seconds = (wait.as_secs_f64().ceil() as u64).clamp(1, LONGEST_RETRY);
        let code = match reason {
            "queue_timeout" => ErrorCode::QueueTimeout,
            _ => ErrorCode::RateLimitExceeded,
        };
        Self { limit: Some(reason), retry_after: Some(seconds), ..Self::new(code, message) }
    }

    /// 400 for a field. The message contains the field's name and value.
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidValue, message).param(param)
    }

    /// 400 for a field that Hone does not know or cannot support.
    pub fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::UnsupportedParameter, message).param(param)
    }

    pub fn too_long(param: &str, prompt: usize, context: usize) -> Self {
        Self::too_large(param, EngineError::PromptTooLong { prompt, context }.to_string())
    }

    /// 400 for a field that is too large to be tokenized.
    pub fn too_large(param: &str, message: String) -> Self {
        Self::new(ErrorCode::ContextLengthExceeded, message).param(param)
    }

    /// The error with the status 422, for a body that is valid in itself.
    pub fn unprocessable(self) -> Self {
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, ..self }
    }

    pub fn unknown(self) -> Self {
        Self { is_unknown: true, ..self }
    }

    /// 400 for a body that is not a JSON object.
    pub fn body(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidBody, message)
    }

    /// 404 for a completion that the field `param` names.
    pub fn no_such_completion(param: &str, id: &str) -> Self {
        let message = format!("{param} is {id:?}: there is no such completion");
        Self::new(ErrorCode::CompletionNotFound, message).param(param).unknown()
    }

    /// 404 for a completion that the field `param` names and that was not kept.
    pub fn unstored_completion(param: &str, id: &str) -> Self {
        let message = format!(
            "{param} is {id:?}: nothing of this completion was kept (\"store\" is false for its \
             request, its route or its key)"
        );
        Self::new(ErrorCode::CompletionNotStored, message).param(param).unknown()
    }

    /// 500. The message contains no internal detail; the log does.
    pub fn internal() -> Self {
        let message = "the server failed internally; the reason is in its log";
        Self::new(ErrorCode::InternalError, message)
    }

    /// 500 with `error` logged after `context`.
    pub fn logged(context: &str, error: &dyn Error) -> Self {
        tracing::error!(%error, "{context}");
        Self::internal()
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, message)
    }

    /// The outcome of feedback that this error refused, as the metric counts it.
    pub fn outcome(&self) -> &'static str {
        match self.is_unknown {
            true => "unknown",
            false if self.status.is_server_error() => "failed",
            false => "invalid",
        }
    }

    pub fn status(&self) -> u16 {
        self.status.as_u16()
    }

    /// The body as JSON text, for the last event of a failed stream.
    pub fn to_json(&self) -> String {
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
                Self::limited("queue_timeout", message, retry_after)
            }
            EngineError::PromptTooLong { prompt, context } => {
                Self::too_long("messages", prompt, context)
            }
            EngineError::Invalid(_) | EngineError::TooManyChoices { .. } => {
                Self::new(ErrorCode::InvalidValue, message)
            }
            EngineError::Sample(SampleError::Grammar(error)) => {
                Self::new(ErrorCode::GrammarFailed, error.to_string())
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
            StoreError::Overloaded
            | StoreError::Closed
            | StoreError::Unavailable(_)
            | StoreError::TimedOut => Self::unavailable(error.to_string()),
            _ => Self::logged("request failed", &error),
        }
    }
}

impl From<TrainError> for ApiError {
    fn from(error: TrainError) -> Self {
        let message = error.to_string();
        match error {
            TrainError::Disabled | TrainError::NothingReady | TrainError::CanaryRunning(_) => {
                Self::new(ErrorCode::Conflict, message)
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
            PolicyError::Unknown(_) => Self::new(ErrorCode::NotFound, message).param("version"),
            PolicyError::Unservable { .. } => Self::new(ErrorCode::Conflict, message),
            PolicyError::Authority(_) => Self::unavailable(message),
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
                large_body()
            }
            _ => Self::body("the body could not be read"),
        }
    }
}

pub fn large_body() -> ApiError {
    let message =
        "the body is larger than server.max_body_bytes, or the 256 KiB of a grader, allows";
    ApiError::new(ErrorCode::BodyTooLarge, message)
}
