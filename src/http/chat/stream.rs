//! A completion as server-sent events: for each choice a role event, text events and an event with
//! the finish reason; at the end, if asked for, usage; then `[DONE]`. A failure after the first
//! byte is an event with an `error`, and no `[DONE]` follows.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::stream;

use hone_core::types::PolicyVersion;

use super::run::{ChatRun, News};
use super::wire::{ChatChunk, ChunkChoice, Delta, Logprobs, Usage};
use super::with_version;
use crate::http::error::ApiError;

/// Where a stream is.
enum Phase {
    Running,
    Usage,
    Done,
    Over,
}

struct Sse {
    run: ChatRun,
    version: PolicyVersion,
    include_usage: bool,
    phase: Phase,
}

/// Starts the run, so that a refusal still has its status code, and streams the rest.
pub(super) async fn respond(mut run: ChatRun, include_usage: bool) -> Result<Response, ApiError> {
    let version = run.start().await?;
    let sse = Sse { run, version, include_usage, phase: Phase::Running };
    let body = Body::from_stream(stream::unfold(sse, |mut sse| async move {
        let bytes = sse.next().await?;
        Some((Ok::<Bytes, Infallible>(Bytes::from(bytes)), sse))
    }));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok(with_version(version, (headers, body).into_response()))
}

impl Sse {
    /// The next bytes, one or more whole events; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            match self.phase {
                Phase::Running => match self.run.next().await {
                    Some(Ok(news)) => {
                        let events = self.events(news);
                        if !events.is_empty() {
                            return Some(events);
                        }
                    }
                    Some(Err(error)) => {
                        self.phase = Phase::Over;
                        return Some(event(&error.to_json()));
                    }
                    None => self.phase = Phase::Usage,
                },
                Phase::Usage => {
                    self.phase = Phase::Done;
                    if self.include_usage {
                        let usage = self.run.usage();
                        return Some(self.chunk(self.version, Vec::new(), Some(usage)));
                    }
                }
                Phase::Done => {
                    self.phase = Phase::Over;
                    return Some(event("[DONE]"));
                }
                Phase::Over => return None,
            }
        }
    }

    fn events(&self, news: News) -> String {
        let mut events = String::new();
        let mut add = |delta, logprobs, finish_reason| {
            let choice = ChunkChoice { index: news.index, delta, logprobs, finish_reason };
            events.push_str(&self.chunk(news.version, vec![choice], None));
        };
        if news.started {
            add(Delta { role: Some("assistant"), content: Some(String::new()) }, None, None);
        }
        if !news.text.is_empty() || !news.logprobs.is_empty() {
            let logprobs = self.run.wants_logprobs().then(|| Logprobs::new(news.logprobs));
            add(Delta { role: None, content: Some(news.text) }, logprobs, None);
        }
        if let Some(finish) = news.finish {
            add(Delta::default(), None, Some(finish.as_str()));
        }
        events
    }

    fn chunk(
        &self,
        version: PolicyVersion,
        choices: Vec<ChunkChoice>,
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
        // Strings and numbers cannot fail to serialise.
        event(&serde_json::to_string(&chunk).unwrap_or_default())
    }
}

fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}
