//! Answers with what a dialect makes of a run, whole or as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, Stream, StreamExt, stream};
use serde::Serialize;
use tokio::time::timeout;

use hone_core::types::PolicyVersion;

use super::ChoiceUpdate;
use super::run::RequestRun;
use crate::error::ApiError;

/// The data of the event that ends every complete stream.
pub const DONE: &str = "[DONE]";

/// A comment, which clients ignore.
const KEEP_ALIVE: &str = ": keep-alive\n\n";
/// What is ready is sent when its parts reach this number, see [`parts_of`]: otherwise all of an answer that was
/// sampled before its client reads would be held as text, and no write would show that it is too slow.
const SENT_AT_ONCE: usize = 256;

/// Response header with the policy version.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-hone-policy-version");

/// What a dialect makes of a run.
pub trait ToWire: Send + 'static {
    fn run(&mut self) -> &mut RequestRun;

    /// The events before any update, if there are any.
    fn first(&mut self) -> String {
        String::new()
    }

    /// The events of consecutive updates of a choice, if there are any.
    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError>;

    /// The last events of a run that failed.
    fn failed(&mut self, error: &ApiError) -> String {
        event(&error.to_json())
    }

    /// The last events of a whole run, if there are any.
    fn last(&mut self) -> String;

    /// Keeps an update for the whole response, in which its text takes a fraction of its memory.
    fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError>;

    /// The whole response, of what was kept.
    fn whole(self) -> Result<Response, ApiError>;
}

/// Answers with a run's response, streamed or whole. A stream sends its headers after a choice has started, so that a
/// refusal still has its status code, unless the run waits too long.
pub async fn respond(mut wire: impl ToWire, stream: bool) -> Result<Response, ApiError> {
    if stream {
        let version = wire.run().start_in_time().await?;
        let keep_alive = Duration::from_secs(wire.run().state.config.stream_keep_alive_seconds);
        return Ok(with_version(streamed(events_of(wire), keep_alive), version));
    }
    wire.run().pace.read_whole();
    while let Some(update) = wire.run().next().await {
        wire.keep(update?)?;
    }
    let version = wire.run().version();
    Ok(with_version(wire.whole()?, version))
}

/// Adds the policy version to a response, if it is known.
pub fn with_version(mut response: Response, version: Option<PolicyVersion>) -> Response {
    if let Some(version) = version {
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version.0));
    }
    response
}

/// A response that sends events as they come, and a comment after `keep_alive`, which keeps connections open.
fn streamed(events: impl Stream<Item = String> + Send + 'static, keep_alive: Duration) -> Response {
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

/// The events of a run as they come. Unless each token has its own, what is ready for a choice becomes as few events
/// as possible: each costs as much time as a small model needs to sample a token.
fn events_of(mut events: impl ToWire) -> impl Stream<Item = String> + Send + 'static {
    let first = events.first();
    let following = stream::unfold(Some(events), |events| async move {
        let mut events = events?;
        let (text, is_last) = next_events(&mut events).await;
        Some((text, Some(events).filter(|_| !is_last)))
    });
    let all = stream::iter([first]).chain(following);
    all.filter(|text| std::future::ready(!text.is_empty()))
}

/// The next events, and whether they are the last ones, which may be none.
async fn next_events(events: &mut impl ToWire) -> (String, bool) {
    let mut text = String::new();
    loop {
        let merges = !events.run().pace.is_each_token();
        // Updates that are sent together: those of a choice become its events together, if `merges`.
        let mut choices: Vec<Vec<ChoiceUpdate>> = Vec::new();
        let mut parts = 0;
        let mut next = Some(events.run().next().await);
        let mut end = None;
        while let Some(update) = next.take() {
            match update {
                Some(Ok(update)) => {
                    parts += parts_of(&update);
                    let is_own = |own: &&mut Vec<ChoiceUpdate>| {
                        merges && own.first().is_some_and(|first| first.index == update.index)
                    };
                    match choices.iter_mut().find(is_own) {
                        Some(own) => own.push(update),
                        None => choices.push(vec![update]),
                    }
                }
                Some(Err(error)) => end = Some(Err(error)),
                None => end = Some(Ok(())),
            }
            if end.is_none() && parts < SENT_AT_ONCE {
                next = events.run().next().now_or_never();
            }
        }
        for updates in choices {
            match events.of(updates) {
                Ok(more) => text.push_str(&more),
                Err(error) => {
                    end = Some(Err(error));
                    break;
                }
            }
        }
        match end {
            Some(Ok(())) => {
                text.push_str(&events.last());
                return (text, true);
            }
            Some(Err(error)) => {
                events.run().count_limit(&error);
                text.push_str(&events.failed(&error));
                return (text, true);
            }
            None if text.is_empty() => {}
            None => return (text, false),
        }
    }
}

/// The update itself and each log-probability, whose JSON takes up to about a hundred bytes each.
fn parts_of(update: &ChoiceUpdate) -> usize {
    let logprobs = update.tokens.iter().map(|token| 1 + token.top.len());
    1 + logprobs.sum::<usize>()
}

pub fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}

/// One event with an object as JSON, whose first member, its type, is the event's name.
pub fn named_event(object: &impl Serialize) -> String {
    let data = json_event(object);
    let name = data.split('"').nth(3).unwrap_or_default();
    format!("event: {name}\n{data}")
}

pub fn json_event(object: &impl Serialize) -> String {
    // An object of strings and numbers always serializes.
    event(&serde_json::to_string(object).unwrap_or_default())
}
