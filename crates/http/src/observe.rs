//! Counts, times, names and logs every request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use futures::Stream;
use opentelemetry::Context as TraceContext;
use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState,
};
use tracing::field::Empty;
use tracing::{Instrument as _, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use hone_core::metrics::{Metrics, SPANS};
use hone_core::types::new_uuid;

use super::auth::ApiKey;
use super::error::ApiError;

/// Route label of requests that match no route; raw paths as labels would be unbounded.
const UNMATCHED: &str = "unmatched";
/// `code` label of a request whose client disconnected before the response; nginx's number for it.
const CLIENT_GONE: u16 = 499;

/// Measures from the arrival of the request, which gets a [`RequestId`], to the last byte of the response.
pub async fn observe(
    State(metrics): State<Arc<Metrics>>,
    mut request: Request,
    next: Next,
) -> Response {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| UNMATCHED.to_owned(), |p| p.as_str().to_owned());
    let names = RequestNames::of(request.headers());
    let span = names.span(request.method(), &route);
    request.extensions_mut().insert(RequestId(names.id.to_str().unwrap_or_default().to_owned()));
    metrics.http_in_flight.inc();
    let mut in_flight = InFlight {
        metrics,
        method: request.method().clone(),
        route,
        started: Instant::now(),
        status: CLIENT_GONE,
        key: None,
        span: span.clone(),
    };
    let mut response = next.run(request).instrument(span).await;
    names.add_to(response.headers_mut());
    in_flight.status = response.status().as_u16();
    if let Some(reason) = response.extensions().get::<ApiError>().and_then(|error| error.limit) {
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

/// Whether a route is not one of the probes and metrics, which are requested all the time.
fn is_of_api(route: &str) -> bool {
    route.starts_with("/v1/") || route.starts_with("/admin/")
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

impl Drop for InFlight {
    fn drop(&mut self) {
        let seconds = self.started.elapsed().as_secs_f64();
        let (route, status) = (self.route.as_str(), self.status);
        self.metrics.http_in_flight.dec();
        self.metrics.http_requests.with_label_values(&[route, &status.to_string()]).inc();
        self.metrics.http_request_duration.with_label_values(&[route]).observe(seconds);
        let (method, ms) = (&self.method, (seconds * 1e5).round() / 100.0);
        let key = self.key.as_ref().map(|key| key.entry.name.as_str());
        let _entered = self.span.enter();
        self.span.record("http.response.status_code", status).record("hone.key", key);
        if status >= 500 {
            self.span.record("otel.status_code", "ERROR");
        }
        if is_of_api(route) {
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

// What identifies a request in the logs of clients, proxies and the server: its id and its trace.

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Longest id that a client may choose, in characters.
const LONGEST_ID: usize = 128;

/// The id of a request.
#[derive(Clone, Debug)]
pub struct RequestId(pub(crate) String);

#[derive(Clone, Debug, PartialEq)]
struct RequestNames {
    id: HeaderValue,
    /// W3C's `traceparent`.
    trace: Option<HeaderValue>,
}

impl RequestNames {
    /// The client's names, if they are well-formed; otherwise a new id, and no trace.
    fn of(headers: &HeaderMap) -> Self {
        let found = |name: HeaderName, is_valid: fn(&str) -> bool| {
            headers.get(name).filter(|value| value.to_str().is_ok_and(is_valid)).cloned()
        };
        let id = found(REQUEST_ID, is_id).unwrap_or_else(|| {
            // Letters and digits are a valid value.
            let id = format!("req-{}", new_uuid().simple());
            HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("req"))
        });
        Self { id, trace: found(TRACEPARENT, is_trace) }
    }

    /// The span of the request. Each log line has the fields of the outer one, and traces have the inner one, which
    /// continues the client's trace and ends when the ledger has the record.
    fn span(&self, method: &Method, route: &str) -> Span {
        let id = self.id.to_str().unwrap_or_default();
        // At the highest level, so that no filter removes it from an error.
        let logged = tracing::error_span!("http", id, trace = Empty);
        let client = self.trace.as_ref().and_then(remote);
        let traced = if is_of_api(route) {
            logged.in_scope(|| {
                info_span!(
                    target: SPANS, "request",
                    otel.name = format!("{method} {route}"), otel.kind = "server", otel.status_code = Empty,
                    http.request.method = %method, http.route = route, http.response.status_code = Empty,
                    hone.request_id = id, hone.key = Empty, hone.policy_version = Empty,
                    gen_ai.usage.input_tokens = Empty, gen_ai.usage.output_tokens = Empty,
                )
            })
        } else {
            Span::none()
        };
        let mut trace = client.as_ref().map(|client| client.trace_id());
        if !traced.is_disabled() {
            if let Some(client) = client {
                // Fails only without an exporter.
                let _set = traced.set_parent(TraceContext::new().with_remote_span_context(client));
            }
            trace = Some(traced.context().span().span_context().trace_id());
        }
        if let Some(trace) = trace.filter(|trace| *trace != TraceId::INVALID) {
            logged.record("trace", tracing::field::display(trace));
        }
        if traced.is_disabled() { logged } else { traced }
    }

    /// Adds the names to a response.
    fn add_to(self, headers: &mut HeaderMap) {
        headers.insert(REQUEST_ID, self.id);
        if let Some(trace) = self.trace {
            headers.insert(TRACEPARENT, trace);
        }
    }
}

/// The client's span of a well-formed `traceparent`.
fn remote(header: &HeaderValue) -> Option<SpanContext> {
    let text = header.to_str().ok()?;
    let mut parts = text.split('-').skip(1);
    let trace = TraceId::from_hex(parts.next()?).ok()?;
    let span = SpanId::from_hex(parts.next()?).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(parts.next()?, 16).ok()?);
    Some(SpanContext::new(trace, span, flags, true, TraceState::default()))
}

/// Whether a client may use this id: it must not disturb a log line.
fn is_id(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&b);
    (1..=LONGEST_ID).contains(&text.len()) && text.bytes().all(plain)
}

/// Whether a text is a `traceparent`: version, trace, span and flags.
fn is_trace(text: &str) -> bool {
    let hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let named = |part: &str| part.bytes().any(|b| b != b'0');
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace, span, flags] = parts[..] else { return false };
    hex(version, 2)
        && version != "ff"
        && hex(trace, 32)
        && named(trace)
        && hex(span, 16)
        && named(span)
        && hex(flags, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn names(pairs: &[(&'static str, &str)]) -> RequestNames {
        let pairs = pairs.iter().map(|&(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        });
        RequestNames::of(&HeaderMap::from_iter(pairs))
    }

    #[test]
    fn well_formed_names_are_kept_and_others_replaced() {
        let kept = names(&[("x-request-id", "a-1.b:2"), ("traceparent", TRACE)]);
        assert_eq!(
            (kept.id, kept.trace.unwrap()),
            (HeaderValue::from_static("a-1.b:2"), HeaderValue::from_static(TRACE))
        );
        for id in ["", "a b", "a\"b", "{x}", &"x".repeat(129)] {
            let new = names(&[("x-request-id", id)]);
            assert!(new.id.to_str().unwrap().starts_with("req-"), "{id}");
            assert_ne!(new, names(&[]));
        }
        for trace in [
            "",
            "x",
            &TRACE.to_uppercase(),
            &TRACE.replace("00-0af", "ff-0af"),
            &TRACE.replace("b7ad6b7169203331", "0000000000000000"),
            &format!("{TRACE}-x"),
        ] {
            assert_eq!(names(&[("traceparent", trace)]).trace, None, "{trace}");
        }
    }
}
