//! Responses as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use serde::Serialize;
use tokio::time::timeout;

/// The data of the event that ends every complete stream.
pub const DONE: &str = "[DONE]";

/// A comment, which clients ignore.
const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// A response that sends whole events as they come, and a comment where none came for `keep_alive`, so that
/// clients and proxies keep the connection.
pub fn respond(
    events: impl Stream<Item = String> + Send + 'static,
    keep_alive: Duration,
) -> Response {
    let events = stream::unfold(Box::pin(events), move |mut events| async move {
        let bytes = match timeout(keep_alive, events.next()).await {
            Ok(text) => Bytes::from(text?),
            Err(_) => Bytes::from_static(KEEP_ALIVE.as_bytes()),
        };
        Some((Ok::<Bytes, Infallible>(bytes), events))
    });
    let body = Body::from_stream(events);
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, body).into_response()
}

/// One event with this data.
pub fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}

/// One event with a name and an object as JSON.
pub fn named_event(name: &str, object: &impl Serialize) -> String {
    format!("event: {name}\n{}", json_event(object))
}

/// One event with an object as JSON.
pub fn json_event(object: &impl Serialize) -> String {
    // An object of strings and numbers always serializes.
    event(&serde_json::to_string(object).unwrap_or_default())
}
