//! Responses as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, Stream, StreamExt, stream};
use serde::Serialize;
use tokio::time::timeout;

use super::run::RequestRun;
use super::types::ChoiceUpdate;
use crate::http::error::ApiError;

/// The data of the event that ends every complete stream.
pub const DONE: &str = "[DONE]";

/// A comment, which clients ignore.
const KEEP_ALIVE: &str = ": keep-alive\n\n";
/// Bytes of events that are sent together at least, if so many are ready. Without a bound, all of an answer
/// that was sampled before its client reads would be held as text, and no write would show that it is too slow.
const SENT_AT_ONCE: usize = 16 << 10;

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

/// What an endpoint sends of a run.
pub trait RunEvents: Send + 'static {
    fn run(&mut self) -> &mut RequestRun;

    /// The events before any update, if there are any.
    fn first(&mut self) -> String {
        String::new()
    }

    /// The events of an update, if there are any.
    fn of(&mut self, update: ChoiceUpdate) -> Result<String, ApiError>;

    /// The last events of a run that failed.
    fn failed(&mut self, error: &ApiError) -> String {
        event(&error.to_json())
    }

    /// The last events of a whole run, if there are any.
    fn last(&mut self) -> String;
}

/// The events of a run as they come, at least one at once; those that are ready, together.
pub fn events_of(mut events: impl RunEvents) -> impl Stream<Item = String> + Send + 'static {
    let first = some_events(events.first());
    let following = stream::unfold(Some(events), |events| async move {
        let (mut events, mut text) = (events?, String::new());
        loop {
            let next = events.run().next();
            let update = match text.is_empty() {
                true => next.await,
                false => match next.now_or_never() {
                    Some(update) => update,
                    None => return Some((text, Some(events))),
                },
            };
            match update.map(|update| update.and_then(|update| events.of(update))) {
                Some(Ok(more)) => {
                    text.push_str(&more);
                    if text.len() >= SENT_AT_ONCE {
                        return Some((text, Some(events)));
                    }
                }
                Some(Err(error)) => {
                    events.run().count_limit(&error);
                    text.push_str(&events.failed(&error));
                    return Some((text, None));
                }
                None => {
                    text.push_str(&events.last());
                    return some_events(text).map(|text| (text, None));
                }
            }
        }
    });
    stream::iter(first).chain(following)
}

fn some_events(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
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
