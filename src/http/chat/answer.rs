//! The messages of the choices, while they are sampled.

use std::sync::Arc;

use hone_core::digest::{Digest, hex};
use hone_core::types::{FinishReason, InteractionId, Sample, SamplingParams, TokenId, ToolCall};
use hone_engine::answer::{AnswerForm, AnswerParser, AnswerPart};
use hone_engine::{Codec, TextStream, Token};

use super::wire::{AssistantMessage, Choice, Delta, Logprobs};
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::types::{ChoiceUpdate, CompletionTokens, Usage};

/// Changes of a choice's message.
pub(super) struct MessageUpdate {
    pub(super) deltas: Vec<Delta>,
    /// The tokens that completed the changes; empty unless log-probabilities are requested.
    pub(super) tokens: Vec<Token>,
    /// The ids of all tokens up to the changes; empty unless requested.
    pub(super) token_ids: Vec<TokenId>,
    /// OpenAI's `finish_reason`.
    pub(super) finish: Option<&'static str>,
}

/// The messages of all choices.
pub(super) struct Answers {
    choices: Vec<Answer>,
    may_reason: bool,
}

impl Answers {
    pub(super) fn new(form: &AnswerForm, interaction: InteractionId, choices: u32) -> Self {
        let choices = (0..choices).map(|choice| Answer::new(form, interaction, choice));
        Self { choices: choices.collect(), may_reason: form.may_reason() }
    }

    /// Divides what was sampled.
    pub(super) fn update(&mut self, update: ChoiceUpdate) -> Result<MessageUpdate, ApiError> {
        let answer = self.choices.get_mut(update.index as usize);
        Ok(answer.ok_or_else(ApiError::internal)?.update(update))
    }

    /// Runs to the end and returns the whole choices.
    pub(super) async fn collect(
        mut self,
        run: &mut RequestRun,
    ) -> Result<(Vec<Choice>, Usage), ApiError> {
        let ended = |_| MessageUpdate {
            deltas: Vec::new(),
            tokens: Vec::new(),
            token_ids: Vec::new(),
            finish: None,
        };
        let mut ended: Vec<MessageUpdate> = self.choices.iter().map(ended).collect();
        while let Some(update) = run.next().await {
            let update = update?;
            let index = update.index as usize;
            let update = self.update(update)?;
            if let Some(whole) = ended.get_mut(index) {
                whole.tokens.extend(update.tokens);
                whole.token_ids.extend(update.token_ids);
                whole.finish = update.finish;
            }
        }
        let usage = self.usage(run.usage());
        let codec = run.state.engine.codec();
        let choices = self.choices.into_iter().zip(ended).zip(0..);
        let choices = choices.map(|((answer, whole), index)| Choice {
            index,
            message: answer.into_message(),
            logprobs: run.wants_logprobs().then(|| Logprobs::new(codec, &whole.tokens)),
            finish_reason: whole.finish.unwrap_or(FinishReason::Stop.as_str()),
            token_ids: run.wants_token_ids().then_some(whole.token_ids),
        });
        Ok((choices.collect(), usage))
    }

    /// `usage` with the tokens of the reasoning.
    pub(super) fn usage(&self, usage: Usage) -> Usage {
        let tokens = self.choices.iter().map(|answer| answer.parser.reasoning_tokens()).sum();
        let details = self.may_reason.then_some(CompletionTokens { reasoning_tokens: tokens });
        Usage { completion_tokens_details: details, ..usage }
    }
}

/// The message of one choice.
pub(super) struct Answer {
    parser: AnswerParser,
    /// What the ids of calls are made of.
    ids: Digest,
    reasoning: String,
    content: String,
    calls: Vec<ToolCall>,
    /// Tokens whose changes are not certain yet.
    pending: Vec<Token>,
    pending_ids: Vec<TokenId>,
}

impl Answer {
    fn new(form: &AnswerForm, interaction: InteractionId, choice: u32) -> Self {
        Self {
            parser: AnswerParser::new(form),
            ids: Digest::new().bytes(interaction.0.as_bytes()).bytes(choice.to_le_bytes()),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
            pending: Vec::new(),
            pending_ids: Vec::new(),
        }
    }

    /// The message of a recorded choice with its `finish_reason`, as its client got them.
    pub(super) fn recorded(
        codec: &Arc<Codec>,
        form: &AnswerForm,
        sample: &Sample,
        stop: &[String],
    ) -> (AssistantMessage, &'static str) {
        let SamplingParams { stop_token_ids, include_stop, .. } = &sample.params;
        let mut answer = Self::new(form, sample.interaction, sample.choice);
        let mut text = TextStream::new(codec.clone(), stop).including_stop(*include_stop);
        for id in &sample.ids {
            let is_stop = codec.stop_ids().contains(id) || stop_token_ids.contains(id);
            if !is_stop || *include_stop {
                answer.push(*id, &text.push(*id).text);
            }
        }
        // Empty if a stop string was reached.
        let rest = text.finish().text;
        answer.finish(&rest);
        let finish = answer.finish_reason(sample.finish);
        (answer.into_message(), finish)
    }

    fn update(&mut self, update: ChoiceUpdate) -> MessageUpdate {
        let ends = update.finish.is_some();
        let deltas = match update.id {
            _ if ends => self.finish(&update.text),
            Some(id) => self.push(id, &update.text),
            None => Vec::new(),
        };
        self.pending.extend(update.tokens);
        self.pending_ids.extend(update.token_ids);
        let (mut tokens, mut token_ids) = (Vec::new(), Vec::new());
        // A token whose text is not certain changes nothing yet: its log-probability waits.
        if ends || !deltas.is_empty() {
            std::mem::swap(&mut tokens, &mut self.pending);
            std::mem::swap(&mut token_ids, &mut self.pending_ids);
        }
        let finish = update.finish.map(|finish| self.finish_reason(finish));
        MessageUpdate { deltas, tokens, token_ids, finish }
    }

    fn push(&mut self, id: TokenId, text: &str) -> Vec<Delta> {
        let parts = self.parser.push(id, text);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    fn finish(&mut self, rest: &str) -> Vec<Delta> {
        let parts = self.parser.finish(rest);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    fn finish_reason(&self, finish: FinishReason) -> &'static str {
        match finish {
            FinishReason::Stop if self.parser.has_whole_calls() => "tool_calls",
            other => other.as_str(),
        }
    }

    /// The whole message. Its content is null if it only calls functions.
    fn into_message(self) -> AssistantMessage {
        let Self { reasoning, content, calls, .. } = self;
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
                let id = self.call_id(index);
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

    /// The id of a call. It is derived from the completion's id, which is random, so that the recorded
    /// completion has the same.
    fn call_id(&self, index: usize) -> String {
        let id: [u8; 16] = self.ids.clone().bytes((index as u64).to_le_bytes()).prefix();
        format!("call_{}", hex(&id))
    }
}
