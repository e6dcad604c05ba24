//! Streams a message as server-sent events: `message_start`; for each content block `content_block_start`,
//! `content_block_delta` and `content_block_stop`; `message_delta` with the reason of the end and the usage; and
//! `message_stop`. A `ping` follows the beginning of the first block. A failure after the first byte ends the
//! stream with an `error` event.

use std::sync::Arc;

use axum::response::Response;

use hone_core::types::{Interaction, PolicyVersion, TokenId};

use super::error::MessageError;
use super::wire::{BlockDelta, ContentBlock, MessageEvent, MessageObject, StopInfo};
use crate::http::chat::answer::{Answers, MessageEnd, MessagePart, MessageUpdate};
use crate::http::chat::conversation::AnswerRun;
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use crate::http::generate::types::{ChoiceUpdate, Usage};
use crate::http::observe::RequestId;

struct MessageStream {
    run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    request_id: RequestId,
    /// The kind of the block that has not ended.
    open: Option<BlockKind>,
    /// Number of blocks that have ended.
    closed: usize,
    /// The tokens, if the request has stop sequences.
    ids: Vec<TokenId>,
}

/// What distinguishes consecutive blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    /// The call with this number.
    Call(usize),
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version, if the run has started.
pub async fn respond(
    begun: AnswerRun,
    request_id: RequestId,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let AnswerRun { mut run, interaction, answers } = begun;
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let events = MessageStream {
        run,
        interaction,
        answers,
        request_id,
        open: None,
        closed: 0,
        ids: Vec::new(),
    };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for MessageStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let started = updates.iter().any(|update| update.started);
        let updates = self.answers.update(updates)?;
        let mut events = String::new();
        if started {
            let prompt = self.interaction.prompt_ids.len();
            let message = MessageObject::new(&self.interaction, Usage::new(prompt, 0));
            add(&mut events, &MessageEvent::MessageStart { message });
        }
        for MessageUpdate { parts, token_ids, end, .. } in updates {
            self.ids.extend(token_ids);
            for part in parts {
                self.add_part(&mut events, part);
            }
            if let Some(end) = end {
                self.finish(&mut events, end);
            }
        }
        Ok(events)
    }

    fn failed(&mut self, error: &ApiError) -> String {
        sse::named_event("error", &MessageError::new(error, Some(&self.request_id.0)))
    }

    /// The update that ends the message has them.
    fn last(&mut self) -> String {
        String::new()
    }
}

impl MessageStream {
    fn add_part(&mut self, events: &mut String, part: MessagePart) {
        let (kind, begun, delta) = match part {
            MessagePart::Reasoning(thinking) => (
                BlockKind::Thinking,
                ContentBlock::Thinking { thinking: String::new(), signature: "" },
                Some(BlockDelta::Thinking { thinking }),
            ),
            MessagePart::Text(text) => (
                BlockKind::Text,
                ContentBlock::Text { text: String::new() },
                Some(BlockDelta::Text { text }),
            ),
            MessagePart::Call { index, id, name } => {
                (BlockKind::Call(index), ContentBlock::call(id, name), None)
            }
            MessagePart::Arguments { index, json } => (
                BlockKind::Call(index),
                ContentBlock::call(String::new(), String::new()),
                Some(BlockDelta::InputJson { partial_json: json }),
            ),
        };
        if self.open != Some(kind) {
            self.close_block(events);
            let index = self.closed;
            add(events, &MessageEvent::ContentBlockStart { index, content_block: begun });
            if index == 0 {
                add(events, &MessageEvent::Ping);
            }
            self.open = Some(kind);
        }
        if let Some(delta) = delta {
            add(events, &MessageEvent::ContentBlockDelta { index: self.closed, delta });
        }
    }

    fn close_block(&mut self, events: &mut String) {
        if self.open.take().is_some() {
            add(events, &MessageEvent::ContentBlockStop { index: self.closed });
            self.closed += 1;
        }
    }

    fn finish(&mut self, events: &mut String, end: MessageEnd) {
        self.close_block(events);
        let codec = self.run.state.engine.codec();
        let delta = StopInfo::new(end, codec, &self.interaction.stop, &self.ids);
        let usage = self.answers.usage(self.run.usage()).into();
        add(events, &MessageEvent::MessageDelta { delta, usage });
        add(events, &MessageEvent::MessageStop);
    }
}

fn add(events: &mut String, event: &MessageEvent) {
    events.push_str(&sse::named_event(event.name(), event));
}
