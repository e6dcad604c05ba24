//! CORS: web pages of the origins in `server.cors_origins` may use the server from a browser.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Seconds that a browser may keep the answer to a preflight request.
const PREFLIGHT_AGE: HeaderValue = HeaderValue::from_static("600");

/// The origins whose pages may use the server.
pub(in crate::http) struct CorsRule(Vec<String>);

impl CorsRule {
    pub(in crate::http) fn new(origins: &[String]) -> Arc<Self> {
        Arc::new(Self(origins.to_vec()))
    }

    /// The origin of a request, if its pages may use the server.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let allows = |listed: &String| listed == "*" || origin.as_bytes() == listed.as_bytes();
        self.0.iter().any(allows).then(|| origin.clone())
    }
}

/// Answers preflight requests, which have no key, and permits pages of a listed origin to read responses.
pub(in crate::http) async fn share(
    State(rule): State<Arc<CorsRule>>,
    request: Request,
    next: Next,
) -> Response {
    let allowed = rule.allowed(request.headers());
    let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &allowed {
        Some(_) if asks && request.method() == Method::OPTIONS => preflight(request.headers()),
        _ => next.run(request).await,
    };
    if rule.0.is_empty() {
        return response;
    }
    let headers = response.headers_mut();
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    }
    response
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, DELETE");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE);
    if let Some(wanted) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    response
}
