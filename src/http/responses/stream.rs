//! Streams a response as server-sent events: `response.created` and `response.in_progress`; for each item its
//! beginning, its growth and its end; then `response.completed` or `response.incomplete`. A failure after
//! the first byte ends the stream with `response.failed`.

use axum::response::Response;

use hone_core::types::PolicyVersion;

use super::events::ResponseEvent;
use super::run::ResponseRun;
use super::wire::ResponseObject;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use crate::http::generate::types::ChoiceUpdate;

struct ResponseStream {
    run: ResponseRun,
    /// The number of the next event.
    sequence: u64,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version, if the run has started.
pub(super) async fn respond(
    mut run: ResponseRun,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let (version, keep_alive) = (run.run.start_in_time().await?, run.run.keep_alive());
    run.version = version;
    let events = ResponseStream { run, sequence: 0 };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for ResponseStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run.run
    }

    fn first(&mut self) -> String {
        let response = self.run.begun();
        let created = ResponseEvent::response("response.created", response.clone());
        self.write(vec![created, ResponseEvent::response("response.in_progress", response)])
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let events = self.run.update(updates)?;
        Ok(self.write(events))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let response = self.run.failed(error);
        self.end(response)
    }

    fn last(&mut self) -> String {
        let response = self.run.ended();
        self.end(response)
    }
}

impl ResponseStream {
    fn end(&mut self, response: ResponseObject) -> String {
        self.write(vec![ResponseEvent::response(response.last_event(), response)])
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
