//! The message of one choice, while it is sampled.

use hone_core::types::{FinishReason, ToolCall};
use hone_engine::Token;
use hone_engine::answer::{AnswerForm, AnswerParser, AnswerPart};

use super::wire::{AssistantMessage, Delta};

/// Divides an answer, keeps the whole message, and gives calls their ids.
pub(super) struct Answer {
    parser: AnswerParser,
    reasoning: String,
    content: String,
    calls: Vec<ToolCall>,
}

impl Answer {
    pub(super) fn new(form: &AnswerForm) -> Self {
        Self {
            parser: AnswerParser::new(form),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
        }
    }

    /// Adds a token and returns the changes of the message that are certain now.
    pub(super) fn push(&mut self, token: &Token) -> Vec<Delta> {
        let parts = self.parser.push(token.id, &token.text);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    /// Ends the answer with the text that was held back.
    pub(super) fn finish(&mut self, rest: &str) -> Vec<Delta> {
        let parts = self.parser.finish(rest);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    /// OpenAI's `finish_reason`.
    pub(super) fn finish_reason(&self, finish: FinishReason) -> &'static str {
        match finish {
            FinishReason::Stop if self.parser.has_whole_calls() => "tool_calls",
            other => other.as_str(),
        }
    }

    pub(super) fn reasoning_tokens(&self) -> usize {
        self.parser.reasoning_tokens()
    }

    /// Takes the whole message. Its content is null if it only calls functions.
    pub(super) fn take_message(&mut self) -> AssistantMessage {
        let (content, calls) = (std::mem::take(&mut self.content), std::mem::take(&mut self.calls));
        let reasoning = std::mem::take(&mut self.reasoning);
        AssistantMessage {
            role: "assistant",
            content: (!content.is_empty() || calls.is_empty()).then_some(content),
            refusal: None,
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            tool_calls: calls,
        }
    }

    fn add(&mut self, part: AnswerPart) -> Delta {
        match part {
            AnswerPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                Delta { reasoning_content: Some(text), ..Delta::default() }
            }
            AnswerPart::Text(text) => {
                self.content.push_str(&text);
                Delta { content: Some(text), ..Delta::default() }
            }
            AnswerPart::Call { index, name } => {
                let id = format!("call_{:032x}", rand::random::<u128>());
                let delta = Delta::call(index, &id, &name);
                self.calls.push(ToolCall { id, name, arguments: String::new() });
                delta
            }
            AnswerPart::Arguments { index, json } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&json);
                }
                Delta::arguments(index, json)
            }
        }
    }
}
