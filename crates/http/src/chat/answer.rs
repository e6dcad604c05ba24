//! The messages of the choices, while they are sampled.

use std::sync::Arc;

use hone_core::digest::{Digest, hex};
use hone_core::types::{
    FinishReason, Interaction, InteractionId, Sample, SamplingParams, TokenId, ToolCall,
};
use hone_engine::answer::{AnswerForm, AnswerParser, AnswerPart};
use hone_engine::{Codec, TextStream, Token, ToolFormat};

use crate::error::ApiError;
use crate::generate::{ChoiceUpdate, CompletionTokens, Usage};

/// A new part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    Reasoning(String),
    Text(String),
    /// A call begins. Its arguments follow.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of the arguments of the call `index`.
    Arguments {
        index: usize,
        json: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MessageEnd {
    /// A stop token or a stop string.
    #[default]
    Stop,
    /// The message has calls, and no call is cut off.
    Calls,
    /// The token limit.
    Length,
    /// The client disconnected.
    Cancelled,
}

impl From<FinishReason> for MessageEnd {
    fn from(finish: FinishReason) -> Self {
        match finish {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
        }
    }
}

impl MessageEnd {
    /// The value of OpenAI's `finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => FinishReason::Stop.as_str(),
            Self::Calls => "tool_calls",
            Self::Length => FinishReason::Length.as_str(),
            Self::Cancelled => FinishReason::Cancelled.as_str(),
        }
    }
}

/// Changes of a choice's message.
pub struct MessageUpdate {
    pub parts: Vec<MessagePart>,
    /// The tokens that completed the changes; empty unless log-probabilities are requested.
    pub tokens: Vec<Token>,
    /// The ids of all tokens up to the changes; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub end: Option<MessageEnd>,
}

impl MessageUpdate {
    fn is_empty(&self) -> bool {
        let Self { parts, tokens, token_ids, end } = self;
        parts.is_empty() && tokens.is_empty() && token_ids.is_empty() && end.is_none()
    }

    /// Adds a later update if both change the same part, or returns it: its log-probabilities are of another part.
    fn merge(&mut self, later: Self) -> Option<Self> {
        let merged = match (self.parts.as_mut_slice(), later.parts.as_slice()) {
            ([part], [more]) if self.end.is_none() => part.extend(more),
            _ => false,
        };
        if !merged {
            return Some(later);
        }
        self.tokens.extend(later.tokens);
        self.token_ids.extend(later.token_ids);
        self.end = later.end;
        None
    }
}

impl MessagePart {
    /// Adds what follows, if it continues this part.
    fn extend(&mut self, more: &Self) -> bool {
        match (self, more) {
            (Self::Reasoning(text), Self::Reasoning(more))
            | (Self::Text(text), Self::Text(more)) => text.push_str(more),
            (Self::Arguments { index, json }, Self::Arguments { index: own, json: more })
                if index == own =>
            {
                json.push_str(more);
            }
            _ => return false,
        }
        true
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageItem {
    Reasoning(String),
    Text(String),
    Call(ToolCall),
}

#[derive(Default)]
pub struct WholeMessage {
    /// The parts in their order. Reasoning, if there is any, is the first one.
    pub items: Vec<MessageItem>,
    /// The number of tokens up to the end of the reasoning.
    pub reasoning_tokens: usize,
    /// All tokens except the stop token; empty unless log-probabilities are requested.
    pub tokens: Vec<Token>,
    /// The sampled tokens; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub end: MessageEnd,
}

impl WholeMessage {
    /// The reasoning, the text around the calls, and the calls.
    pub fn split(items: Vec<MessageItem>) -> (String, String, Vec<ToolCall>) {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for item in items {
            match item {
                MessageItem::Reasoning(text) => reasoning.push_str(&text),
                MessageItem::Text(text) => content.push_str(&text),
                MessageItem::Call(call) => calls.push(call),
            }
        }
        (reasoning, content, calls)
    }
}

pub struct Answers {
    choices: Vec<Answer>,
    may_reason: bool,
}

impl Answers {
    pub fn new(form: &AnswerForm, interaction: InteractionId, choices: u32) -> Self {
        let choices = (0..choices).map(|choice| Answer::new(form, interaction, choice));
        Self { choices: choices.collect(), may_reason: form.may_reason() }
    }

    /// Divides what was sampled. Consecutive changes of the same part become one.
    pub fn update(&mut self, updates: Vec<ChoiceUpdate>) -> Result<Vec<MessageUpdate>, ApiError> {
        let mut merged: Vec<MessageUpdate> = Vec::new();
        for update in updates {
            let answer = self.choices.get_mut(update.index as usize);
            let update = answer.ok_or_else(ApiError::internal)?.update(update);
            let rest = match merged.last_mut() {
                Some(last) => last.merge(update),
                None => Some(update),
            };
            merged.extend(rest.filter(|update| !update.is_empty()));
        }
        Ok(merged)
    }

    /// Divides what was sampled, and keeps it for whole messages.
    pub fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError> {
        let answer = self.choices.get_mut(update.index as usize).ok_or_else(ApiError::internal)?;
        let MessageUpdate { tokens, token_ids, end, .. } = answer.update(update);
        answer.whole.tokens.extend(tokens);
        answer.whole.token_ids.extend(token_ids);
        answer.whole.end = end.unwrap_or_default();
        Ok(())
    }

    pub fn into_messages(self) -> Vec<WholeMessage> {
        self.choices.into_iter().map(Answer::into_message).collect()
    }

    /// `usage` with the tokens of the reasoning.
    pub fn usage(&self, usage: Usage) -> Usage {
        let tokens = self.choices.iter().map(|answer| answer.parser.reasoning_tokens()).sum();
        let details = self.may_reason.then_some(CompletionTokens { reasoning_tokens: tokens });
        Usage { completion_tokens_details: details, ..usage }
    }
}

struct Answer {
    parser: AnswerParser,
    /// What the ids of calls are made of.
    ids: Digest,
    /// Tokens whose changes are not certain yet.
    pending: Vec<Token>,
    pending_ids: Vec<TokenId>,
    /// The items so far, and what is kept for a whole message.
    whole: WholeMessage,
}

/// How recorded answers are divided, as for their client; `None` if another chat template was used.
pub fn recorded_form(
    codec: &Arc<Codec>,
    interaction: &Interaction,
    format: ToolFormat,
) -> Option<AnswerForm> {
    let Interaction { template_hash, prompt_ids, chat, grammar, .. } = interaction;
    let form = AnswerForm::new(codec, prompt_ids, chat, format).constrained(grammar.as_ref());
    (template_hash == codec.template_hash()).then_some(form)
}

/// The message of a recorded choice, divided as for its client, or its whole text without a form that divides.
pub fn recorded(
    codec: &Arc<Codec>,
    form: Option<&AnswerForm>,
    sample: &Sample,
    stop: &[String],
) -> WholeMessage {
    let Some(form) = form.filter(|form| !form.is_plain()) else {
        let text = Some(sample.text.clone()).filter(|text| !text.is_empty());
        let items = text.map(MessageItem::Text).into_iter().collect();
        return WholeMessage { items, end: sample.finish.into(), ..WholeMessage::default() };
    };
    let SamplingParams { stop_token_ids, include_stop, .. } = &sample.params;
    let mut answer = Answer::new(form, sample.interaction, sample.choice);
    let mut text = TextStream::new(codec.clone(), stop).including_stop(*include_stop);
    for id in &sample.ids {
        let is_stop = codec.stop_ids().contains(id) || stop_token_ids.contains(id);
        if !is_stop || *include_stop {
            answer.push(*id, &text.push(*id).text);
        }
    }
    // Empty if a stop string was reached.
    let rest = text.finish().text;
    answer.finish(&rest, sample.finish);
    answer.whole.end = answer.end_of(sample.finish);
    answer.into_message()
}

impl Answer {
    fn new(form: &AnswerForm, interaction: InteractionId, choice: u32) -> Self {
        Self {
            parser: AnswerParser::new(form),
            ids: Digest::new().bytes(interaction.0.as_bytes()).bytes(choice.to_le_bytes()),
            pending: Vec::new(),
            pending_ids: Vec::new(),
            whole: WholeMessage::default(),
        }
    }

    fn update(&mut self, update: ChoiceUpdate) -> MessageUpdate {
        let ends = update.finish.is_some();
        let parts = match (update.finish, update.id) {
            (Some(finish), _) => self.finish(&update.text, finish),
            (None, Some(id)) => self.push(id, &update.text),
            (None, None) => Vec::new(),
        };
        self.pending.extend(update.tokens);
        self.pending_ids.extend(update.token_ids);
        let (mut tokens, mut token_ids) = (Vec::new(), Vec::new());
        // A token whose text is not certain changes nothing yet: its log-probability waits.
        if ends || !parts.is_empty() {
            tokens.append(&mut self.pending);
            token_ids.append(&mut self.pending_ids);
        }
        let end = update.finish.map(|finish| self.end_of(finish));
        MessageUpdate { parts, tokens, token_ids, end }
    }

    fn push(&mut self, id: TokenId, text: &str) -> Vec<MessagePart> {
        let parts = self.parser.push(id, text);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    fn finish(&mut self, rest: &str, finish: FinishReason) -> Vec<MessagePart> {
        if finish == FinishReason::Length {
            self.parser.end_at_limit();
        }
        let parts = self.parser.finish(rest);
        parts.into_iter().map(|part| self.add(part)).collect()
    }

    fn end_of(&self, finish: FinishReason) -> MessageEnd {
        match finish {
            FinishReason::Stop if self.parser.has_whole_calls() => MessageEnd::Calls,
            other => other.into(),
        }
    }

    fn into_message(self) -> WholeMessage {
        WholeMessage { reasoning_tokens: self.parser.reasoning_tokens(), ..self.whole }
    }

    fn add(&mut self, part: AnswerPart) -> MessagePart {
        let items = &mut self.whole.items;
        match part {
            AnswerPart::Reasoning(text) => {
                match items.last_mut() {
                    Some(MessageItem::Reasoning(so_far)) => so_far.push_str(&text),
                    _ => items.push(MessageItem::Reasoning(text.clone())),
                }
                MessagePart::Reasoning(text)
            }
            AnswerPart::Text(text) => {
                match items.last_mut() {
                    Some(MessageItem::Text(so_far)) => so_far.push_str(&text),
                    _ => items.push(MessageItem::Text(text.clone())),
                }
                MessagePart::Text(text)
            }
            AnswerPart::Call { index, name } => {
                let id = call_id(&self.ids, index);
                let (own, arguments) = ((id.clone(), name.clone()), String::new());
                items.push(MessageItem::Call(ToolCall { id: own.0, name: own.1, arguments }));
                MessagePart::Call { index, id, name }
            }
            // A call's arguments follow it before anything else does.
            AnswerPart::Arguments { index, json } => {
                if let Some(MessageItem::Call(call)) = items.last_mut() {
                    call.arguments.push_str(&json);
                }
                MessagePart::Arguments { index, json }
            }
        }
    }
}

/// The id of a call. It follows from the completion's random id, so that the recorded completion has it too.
fn call_id(ids: &Digest, index: usize) -> String {
    let id: [u8; 16] = ids.clone().bytes((index as u64).to_le_bytes()).prefix();
    format!("call_{}", hex(&id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parts: Vec<MessagePart>, end: Option<MessageEnd>) -> MessageUpdate {
        MessageUpdate { parts, tokens: Vec::new(), token_ids: vec![1], end }
    }

    #[test]
    fn only_changes_of_the_same_part_are_merged() {
        let text = |text: &str| MessagePart::Text(text.to_owned());
        let reasoning = |text: &str| MessagePart::Reasoning(text.to_owned());
        let arguments = |index, json: &str| MessagePart::Arguments { index, json: json.to_owned() };
        for (first, second, whole) in [
            (text("a"), text("b"), Some(text("ab"))),
            (reasoning("a"), reasoning("b"), Some(reasoning("ab"))),
            (arguments(0, "{"), arguments(0, "}"), Some(arguments(0, "{}"))),
            (arguments(0, "{"), arguments(1, "}"), None),
            (reasoning("a"), text("b"), None),
        ] {
            let mut update = of(vec![first.clone()], None);
            let rest = update.merge(of(vec![second.clone()], Some(MessageEnd::Stop)));
            match whole {
                Some(whole) => {
                    assert!(rest.is_none());
                    assert_eq!((update.parts, update.token_ids.len()), (vec![whole], 2));
                    assert_eq!(update.end, Some(MessageEnd::Stop));
                }
                None => {
                    assert_eq!(rest.unwrap().parts, [second]);
                    assert_eq!((update.parts, update.end), (vec![first], None));
                }
            }
        }
        // The tokens of a stop string change no part.
        let mut update = of(vec![text("a")], None);
        assert!(update.merge(of(Vec::new(), Some(MessageEnd::Stop))).is_some());
    }
}
