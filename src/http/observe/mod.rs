//! Counts, times, names and logs every request.

mod names;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use futures::Stream;
use tracing::{Instrument as _, Span};

use hone_core::metrics::Metrics;

use super::auth::ApiKey;
use super::error::ApiError;

pub(super) use names::{REQUEST_ID, RequestId};

use names::RequestNames;

/// Route label of requests that match no route; raw paths as labels would be unbounded.
const UNMATCHED: &str = "unmatched";
/// `code` label of a request whose client disconnected before the response; nginx's number for it.
const CLIENT_GONE: u16 = 499;

/// Measures from the arrival of the request to the last byte of the response. The request has its
/// [`RequestId`] as an extension.
pub(super) async fn observe(
    State(metrics): State<Arc<Metrics>>,
    mut request: Request,
    next: Next,
) -> Response {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| UNMATCHED.to_owned(), |p| p.as_str().to_owned());
    let names = RequestNames::of(request.headers());
    let span = names.span();
    request.extensions_mut().insert(names.request_id());
    let mut in_flight = InFlight::new(metrics, request.method().clone(), route, span.clone());
    let mut response = next.run(request).instrument(span).await;
    names.add_to(response.headers_mut());
    in_flight.status = response.status().as_u16();
    if let Some(reason) = response.extensions().get().and_then(ApiError::limit) {
        in_flight.metrics.http_limited.with_label_values(&[reason]).inc();
    }
    in_flight.key = response.extensions().get::<Arc<ApiKey>>().cloned();
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    let (parts, body) = response.into_parts();
    let body = MeasuredBody { inner: body.into_data_stream(), in_flight: Some(in_flight) };
    Response::from_parts(parts, Body::from_stream(body))
}

/// A request in flight. Dropping it records the request's end.
struct InFlight {
    metrics: Arc<Metrics>,
    method: Method,
    route: String,
    started: Instant,
    status: u16,
    /// The caller's key, once it is known.
    key: Option<Arc<ApiKey>>,
    span: Span,
}

impl InFlight {
    fn new(metrics: Arc<Metrics>, method: Method, route: String, span: Span) -> Self {
        metrics.http_in_flight.inc();
        let (started, status) = (Instant::now(), CLIENT_GONE);
        Self { metrics, method, route, started, status, key: None, span }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let seconds = self.started.elapsed().as_secs_f64();
        let (route, status) = (self.route.as_str(), self.status);
        self.metrics.http_in_flight.dec();
        self.metrics.http_requests.with_label_values(&[route, &status.to_string()]).inc();
        self.metrics.http_request_duration.with_label_values(&[route]).observe(seconds);
        let (method, ms) = (&self.method, (seconds * 1e5).round() / 100.0);
        let key = self.key.as_ref().map(|key| key.name.as_str());
        let _entered = self.span.enter();
        if route.starts_with("/v1/") || route.starts_with("/admin/") {
            tracing::info!(%method, route, status, ms, key, "request");
        } else {
            tracing::debug!(%method, route, status, ms, key, "request");
        }
    }
}

/// A streamed body whose request is in flight until the body ends.
struct MeasuredBody {
    inner: axum::body::BodyDataStream,
    in_flight: Option<InFlight>,
}

impl Stream for MeasuredBody {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let _entered = self.in_flight.as_ref().map(|in_flight| in_flight.span.clone().entered());
        let next = Pin::new(&mut self.inner).poll_next(cx);
        if let Poll::Ready(None) = next {
            self.in_flight = None;
        }
        next
    }
}

impl Drop for MeasuredBody {
    fn drop(&mut self) {
        // What the body logs at its end belongs to the request too.
        let _entered = self.in_flight.as_ref().map(|in_flight| in_flight.span.clone().entered());
        self.inner = Body::empty().into_data_stream();
    }
}
