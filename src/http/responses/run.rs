//! A response while it is sampled.

use std::sync::Arc;

use hone_core::types::{Interaction, PolicyVersion, now_ms};

use super::events::ResponseEvent;
use super::output::ResponseOutput;
use super::wire::ResponseObject;
use crate::http::chat::answer::{Answers, MessageEnd, MessagePart, MessageUpdate};
use crate::http::chat::conversation::AnswerRun;
use crate::http::chat::wire::TokenLogprob;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::types::ChoiceUpdate;

/// A running response.
pub(super) struct ResponseRun {
    pub(super) run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    output: ResponseOutput,
    /// The version that samples it, when that is known.
    pub(super) version: Option<PolicyVersion>,
    end: MessageEnd,
}

impl ResponseRun {
    pub(super) fn new(begun: AnswerRun) -> Self {
        let AnswerRun { run, interaction, answers } = begun;
        let output = ResponseOutput::new(interaction.id);
        Self { run, interaction, answers, output, version: None, end: MessageEnd::Cancelled }
    }

    /// The events of the next progress, perhaps none; `None` when the response has ended.
    pub(super) async fn next(&mut self) -> Option<Result<Vec<ResponseEvent>, ApiError>> {
        let update = self.run.next().await?;
        Some(update.and_then(|update| self.update(vec![update])))
    }

    /// The events of updates, perhaps none.
    pub(super) fn update(
        &mut self,
        updates: Vec<ChoiceUpdate>,
    ) -> Result<Vec<ResponseEvent>, ApiError> {
        self.version = updates.last().map(|update| update.version).or(self.version);
        let updates = self.answers.update(updates)?;
        Ok(updates.into_iter().flat_map(|update| self.add(update)).collect())
    }

    fn add(&mut self, update: MessageUpdate) -> Vec<ResponseEvent> {
        let MessageUpdate { parts, tokens, end, .. } = update;
        let codec = self.run.state.engine.codec();
        let mut logprobs: Vec<TokenLogprob> =
            tokens.iter().map(|token| TokenLogprob::new(codec, token)).collect();
        let mut events = Vec::new();
        for part in parts {
            let is_text = matches!(part, MessagePart::Text(_));
            let own = if is_text { std::mem::take(&mut logprobs) } else { Vec::new() };
            events.extend(self.output.add(part, own));
        }
        // Tokens of a stop string, which is no text.
        if !logprobs.is_empty() && self.output.is_in_text() {
            events.extend(self.output.add(MessagePart::Text(String::new()), logprobs));
        }
        if let Some(end) = end {
            self.end = end;
            events.extend(self.output.finish(end));
        }
        events
    }

    /// The response before its output.
    pub(super) fn begun(&self) -> ResponseObject {
        ResponseObject::new(&self.interaction, self.version)
    }

    /// The response after its end.
    pub(super) fn ended(&self) -> ResponseObject {
        let usage = self.answers.usage(self.run.usage()).into();
        self.begun().ended(self.end, self.output.items().to_vec(), usage, now_ms())
    }

    /// The response after an error.
    pub(super) fn failed(&mut self, error: &ApiError) -> ResponseObject {
        let mut output = Vec::new();
        if !self.output.items().is_empty() {
            self.output.finish(MessageEnd::Cancelled);
            output.extend_from_slice(self.output.items());
        }
        self.begun().failed(error, output)
    }
}
