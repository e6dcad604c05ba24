//! Streams text completions as server-sent events: for each choice its prompt, if requested, then
//! events with text and an event with the finish reason; then usage, if requested; then `[DONE]`. A
//! failure after the first byte ends the stream with an `error` event and without `[DONE]`.

use axum::response::Response;

use hone_core::types::PolicyVersion;
use hone_engine::Token;

use super::head::TextHead;
use super::wire::TextChoice;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse;
use crate::http::generate::sse::RunEvents;
use crate::http::generate::types::ChoiceUpdate;

struct TextEvents {
    run: RequestRun,
    head: TextHead,
    /// The version of the first choice to start, if that was before the headers.
    version: Option<PolicyVersion>,
    include_usage: bool,
    /// The length of each choice's text so far, in characters.
    offsets: Vec<usize>,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version of the first choice to start, if one has started.
pub(super) async fn respond(
    mut run: RequestRun,
    head: TextHead,
    include_usage: bool,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let offsets = vec![0; head.choices()];
    let events = TextEvents { run, head, version, include_usage, offsets };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for TextEvents {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, finish, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let text: String = updates.iter().map(|update| update.text.as_str()).collect();
        let tokens: Vec<Token> = updates.into_iter().flat_map(|update| update.tokens).collect();
        let mut choices = Vec::new();
        let part = |text, logprobs, finish_reason| {
            let completion_id = self.head.own_id(index);
            TextChoice {
                index,
                text,
                logprobs,
                prompt_logprobs: None,
                finish_reason,
                completion_id,
            }
        };
        let codec = self.run.state.engine.codec();
        let mut elsewhere = 0;
        let offset = self.offsets.get_mut(index as usize).unwrap_or(&mut elsewhere);
        if started {
            let prompt_logprobs = self.head.prompt_logprobs(codec, index);
            let echoed = self.head.echoed(index);
            if echoed.is_some() || prompt_logprobs.is_some() {
                let logprobs =
                    echoed.and_then(|_| self.head.logprobs(codec, index, (true, &[]), offset));
                let prompt = part(echoed.unwrap_or_default().to_owned(), logprobs, None);
                choices.push(TextChoice { prompt_logprobs, ..prompt });
            }
        }
        if !text.is_empty() || !tokens.is_empty() {
            let logprobs = self.head.logprobs(codec, index, (false, &tokens), offset);
            choices.push(part(text, logprobs, None));
        }
        if let Some(finish) = finish {
            choices.push(part(String::new(), None, Some(finish.as_str())));
        }
        let usage = self.include_usage.then_some(None);
        let event = |choice| sse::json_event(&self.head.completion(version, vec![choice], usage));
        Ok(choices.into_iter().map(event).collect())
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let usage = Some(Some(self.run.usage()));
            let version = self.version.unwrap_or_else(|| self.run.version());
            events = sse::json_event(&self.head.completion(version, Vec::new(), usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }
}
