//! Streams a completion as server-sent events: for each choice a role event, events with the changes of
//! its message and an event with the finish reason; then usage, if requested; then `[DONE]`. A failure
//! after the first byte ends the stream with an `error` event and without `[DONE]`.

use std::sync::Arc;

use axum::response::Response;

use hone_core::types::{Interaction, PolicyVersion};

use super::answer::{Answers, MessageUpdate};
use super::conversation::AnswerRun;
use super::wire::{ChatChunk, Delta, Logprobs, StreamChoice};
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use crate::http::generate::types::{ChoiceUpdate, Usage};

struct ChatStream {
    run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    /// The version of the first choice to start, if that was before the headers.
    version: Option<PolicyVersion>,
    include_usage: bool,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version of the first choice to start, if one has started.
pub(super) async fn respond(
    begun: AnswerRun,
    include_usage: bool,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let AnswerRun { mut run, interaction, answers } = begun;
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let events = ChatStream { run, interaction, answers, version, include_usage };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for ChatStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let updates = self.answers.update(updates)?;
        let mut events = String::new();
        let mut add = |delta, logprobs, token_ids, finish_reason| {
            let choice = StreamChoice { index, delta, logprobs, finish_reason, token_ids };
            events.push_str(&self.chunk(version, vec![choice], None));
        };
        if started {
            let empty = Delta::text(String::new());
            add(Delta { role: Some("assistant"), ..empty }, None, None, None);
        }
        let codec = self.run.state.engine.codec();
        for MessageUpdate { parts, tokens, token_ids, end } in updates {
            let mut deltas: Vec<Delta> = parts.into_iter().map(Delta::from).collect();
            if deltas.is_empty() && !tokens.is_empty() {
                deltas.push(Delta::text(String::new()));
            }
            // The first change has the log-probabilities and ids of all tokens that completed the changes.
            let mut logprobs = self.run.wants_logprobs().then(|| Logprobs::new(codec, &tokens));
            let mut token_ids = self.run.wants_token_ids().then_some(token_ids);
            for delta in deltas {
                add(delta, logprobs.take(), token_ids.as_mut().map(std::mem::take), None);
            }
            if let Some(end) = end {
                add(Delta::default(), None, token_ids, Some(end.as_str()));
            }
        }
        Ok(events)
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let version = self.version.unwrap_or_else(|| self.run.version());
            let usage = self.answers.usage(self.run.usage());
            events = self.chunk(version, Vec::new(), Some(usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }
}

impl ChatStream {
    fn chunk(
        &self,
        version: PolicyVersion,
        choices: Vec<StreamChoice>,
        usage: Option<Usage>,
    ) -> String {
        let interaction = &self.interaction;
        let begins = choices.iter().any(|choice| choice.delta.role.is_some());
        let prompt_token_ids =
            (begins && self.run.wants_token_ids()).then_some(interaction.prompt_ids.as_slice());
        sse::json_event(&ChatChunk {
            id: &interaction.id.completion_id(),
            object: "chat.completion.chunk",
            created: interaction.created / 1000,
            model: &interaction.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage: self.include_usage.then_some(usage),
            prompt_token_ids,
        })
    }
}
