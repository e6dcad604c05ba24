//! Streams a completion as server-sent events: for each choice a role event, text events and an
//! event with the finish reason; then usage, if requested; then `[DONE]`. A failure after the first
//! byte ends the stream with an `error` event and without `[DONE]`. A comment is sent where no event is due
//! for long, so that clients and proxies keep the connection.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::stream;
use tokio::time::timeout;

use hone_core::types::PolicyVersion;

use super::run::{ChatRun, ChoiceUpdate};
use super::wire::{ChatChunk, Delta, Logprobs, StreamChoice, Usage};
use crate::http::error::ApiError;

/// A comment, which clients ignore.
const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// When a stream sends what is not an event.
pub(super) struct StreamTiming {
    /// The time that a run may wait for a slot before the headers are sent.
    pub(super) headers_after: Duration,
    /// The time without an event after which a comment is sent.
    pub(super) keep_alive: Duration,
}

struct Sse {
    run: ChatRun,
    /// The version of the first choice to start; `None` before.
    version: Option<PolicyVersion>,
    include_usage: bool,
    keep_alive: Duration,
    ended: bool,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version of the first choice to start, if one has started.
pub(super) async fn respond(
    mut run: ChatRun,
    include_usage: bool,
    timing: StreamTiming,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let StreamTiming { headers_after, keep_alive } = timing;
    let version = timeout(headers_after, run.start()).await.ok().transpose()?;
    let sse = Sse { run, version, include_usage, keep_alive, ended: false };
    let body = Body::from_stream(stream::unfold(sse, |mut sse| async move {
        let bytes = sse.next().await?;
        Some((Ok::<Bytes, Infallible>(Bytes::from(bytes)), sse))
    }));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok((version, (headers, body).into_response()))
}

impl Sse {
    /// The next whole events or a comment; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        while !self.ended {
            let Ok(events) = timeout(self.keep_alive, self.advance()).await else {
                return Some(KEEP_ALIVE.to_owned());
            };
            if !events.is_empty() {
                return Some(events);
            }
        }
        None
    }

    /// Waits for the next update and returns its events, of which there may be none. Nothing is lost if the
    /// future is dropped while it waits.
    async fn advance(&mut self) -> String {
        let Some(version) = self.version else {
            return match self.run.start().await {
                Ok(version) => {
                    self.version = Some(version);
                    String::new()
                }
                Err(error) => self.fail(&error),
            };
        };
        match self.run.next().await {
            Some(Ok(update)) => self.events(update),
            Some(Err(error)) => self.fail(&error),
            None => {
                self.ended = true;
                let mut events = String::new();
                if self.include_usage {
                    events = self.chunk(version, Vec::new(), Some(self.run.usage()));
                }
                events.push_str(&event("[DONE]"));
                events
            }
        }
    }

    fn fail(&mut self, error: &ApiError) -> String {
        self.ended = true;
        self.run.count_limit(error);
        event(&error.to_json())
    }

    fn events(&self, update: ChoiceUpdate) -> String {
        let mut events = String::new();
        let mut add = |delta, logprobs, finish_reason| {
            let choice = StreamChoice { index: update.index, delta, logprobs, finish_reason };
            events.push_str(&self.chunk(update.version, vec![choice], None));
        };
        if update.started {
            add(Delta { role: Some("assistant"), content: Some(String::new()) }, None, None);
        }
        if !update.text.is_empty() || !update.logprobs.is_empty() {
            let logprobs = self.run.wants_logprobs().then(|| Logprobs::new(update.logprobs));
            add(Delta { role: None, content: Some(update.text) }, logprobs, None);
        }
        if let Some(finish) = update.finish {
            add(Delta::default(), None, Some(finish.as_str()));
        }
        events
    }

    fn chunk(
        &self,
        version: PolicyVersion,
        choices: Vec<StreamChoice>,
        usage: Option<Usage>,
    ) -> String {
        let interaction = &self.run.interaction;
        let chunk = ChatChunk {
            id: &interaction.id.completion_id(),
            object: "chat.completion.chunk",
            created: interaction.created / 1000,
            model: &interaction.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage: self.include_usage.then_some(usage),
        };
        // An object of strings and numbers always serializes.
        event(&serde_json::to_string(&chunk).unwrap_or_default())
    }
}

fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}
