//! Responses as server-sent events.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::Serialize;

/// The data of the event that ends every complete stream.
pub const DONE: &str = "[DONE]";

/// A response that sends whole events as they come.
pub fn respond(events: impl Stream<Item = String> + Send + 'static) -> Response {
    let body = Body::from_stream(events.map(|text| Ok::<Bytes, Infallible>(Bytes::from(text))));
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

/// One event with an object as JSON.
pub fn json_event(object: &impl Serialize) -> String {
    // An object of strings and numbers always serializes.
    event(&serde_json::to_string(object).unwrap_or_default())
}
