//! Streams a response as server-sent events: `response.created` and `response.in_progress`; for each item its
//! beginning, its growth and its end; then `response.completed` or `response.incomplete`. A failure after
//! the first byte ends the stream with `response.failed`.

use axum::response::Response;
use futures::stream;

use hone_core::types::PolicyVersion;

use super::events::ResponseEvent;
use super::run::ResponseRun;
use crate::http::error::ApiError;
use crate::http::generate::sse;

struct ResponseStream {
    run: ResponseRun,
    /// The number of the next event.
    sequence: u64,
    ended: bool,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version, if the run has started.
pub(super) async fn respond(
    mut run: ResponseRun,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let (version, keep_alive) = (run.run.start_in_time().await?, run.run.keep_alive());
    run.version = version;
    let events = ResponseStream { run, sequence: 0, ended: false };
    let events = stream::unfold(events, |mut events| async move {
        let text = events.next().await?;
        Some((text, events))
    });
    Ok((version, sse::respond(events, keep_alive)))
}

impl ResponseStream {
    /// The next whole events, at least one; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        if self.sequence == 0 {
            let response = self.run.begun();
            let created = ResponseEvent::response("response.created", response.clone());
            let begun = ResponseEvent::response("response.in_progress", response);
            return Some(self.write(vec![created, begun]));
        }
        while !self.ended {
            let response = match self.run.next().await {
                Some(Ok(events)) if events.is_empty() => continue,
                Some(Ok(events)) => return Some(self.write(events)),
                Some(Err(error)) => self.run.failed(&error),
                None => self.run.ended(),
            };
            self.ended = true;
            let last = ResponseEvent::response(response.last_event(), response);
            return Some(self.write(vec![last]));
        }
        None
    }

    fn write(&mut self, events: Vec<ResponseEvent>) -> String {
        let mut text = String::new();
        for mut event in events {
            event.sequence_number = self.sequence;
            self.sequence += 1;
            text.push_str(&sse::named_event(event.r#type, &event));
        }
        text
    }
}
