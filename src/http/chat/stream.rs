//! Streams a completion as server-sent events: for each choice a role event, events with the changes of
//! its message and an event with the finish reason; then usage, if requested; then `[DONE]`. A failure
//! after the first byte ends the stream with an `error` event and without `[DONE]`.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::stream;

use hone_core::types::PolicyVersion;

use super::run::{ChatRun, ChoiceUpdate};
use super::wire::{ChatChunk, Delta, Logprobs, StreamChoice, Usage};
use crate::http::error::ApiError;

struct Sse {
    run: ChatRun,
    version: PolicyVersion,
    include_usage: bool,
    ended: bool,
}

/// Starts the run before it responds, so that a refusal still has its status code. Returns the
/// version of the first choice to start.
pub(super) async fn respond(
    mut run: ChatRun,
    include_usage: bool,
) -> Result<(PolicyVersion, Response), ApiError> {
    let version = run.start().await?;
    let sse = Sse { run, version, include_usage, ended: false };
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
    /// The next whole events, at least one; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        while !self.ended {
            match self.run.next().await {
                Some(Ok(update)) => {
                    let events = self.events(update);
                    if !events.is_empty() {
                        return Some(events);
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    return Some(event(&error.to_json()));
                }
                None => {
                    self.ended = true;
                    let mut events = String::new();
                    if self.include_usage {
                        events = self.chunk(self.version, Vec::new(), Some(self.run.usage()));
                    }
                    events.push_str(&event("[DONE]"));
                    return Some(events);
                }
            }
        }
        None
    }

    fn events(&self, update: ChoiceUpdate) -> String {
        let mut events = String::new();
        let mut add = |delta, logprobs, finish_reason| {
            let choice = StreamChoice { index: update.index, delta, logprobs, finish_reason };
            events.push_str(&self.chunk(update.version, vec![choice], None));
        };
        let text = |text: String| Delta { content: Some(text), ..Delta::default() };
        if update.started {
            add(Delta { role: Some("assistant"), ..text(String::new()) }, None, None);
        }
        let mut deltas = update.deltas;
        if deltas.is_empty() && !update.logprobs.is_empty() {
            deltas.push(text(String::new()));
        }
        // The first change has the log-probabilities of all tokens that completed the changes.
        let mut logprobs = self.run.wants_logprobs().then(|| Logprobs::new(update.logprobs));
        for delta in deltas {
            add(delta, logprobs.take(), None);
        }
        if let Some(finish) = update.finish {
            add(Delta::default(), None, Some(finish));
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
