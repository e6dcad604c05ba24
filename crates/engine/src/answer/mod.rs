//! Divides an answer into reasoning, text and calls of functions, while it is generated.
//!
//! ```text
//! tokens -> markers -> reasoning -> calls -> AnswerPart
//! ```
//!
//! [`Codec`] removes special tokens from texts, but some formats begin a call with one. `markers` puts
//! those of the format back, each as one character that no text contains. `reasoning` splits at the
//! template's think tags, and `calls` reads the format of the model's calls.
//!
//! Invariants: the parts do not depend on how the text is split into pieces. Without reasoning and
//! calls the parts' text is exactly the answer's text. Text that might begin a tag or a call is held back
//! until that is decided.

mod call;
mod calls;
mod json;
mod markers;
mod part;
mod reasoning;
mod search;

use std::sync::Arc;

use hone_core::types::{ChatOptions, GrammarSpec, TokenId};

use crate::codec::Codec;
use crate::grammar::CallGrammar;
use crate::template::ThinkTags;
use crate::tools::{CallSyntax, ToolFormat};
use calls::CallParser;
use markers::{MarkerText, Markers};
use reasoning::{Piece, ReasoningSplitter};

pub use part::AnswerPart;

/// How the answers to one prompt are divided.
#[derive(Clone)]
pub struct AnswerForm {
    codec: Arc<Codec>,
    /// The think tags, and whether answers begin inside them.
    reasoning: Option<(ThinkTags, bool)>,
    calls: Option<CallForm>,
}

/// How calls are recognized.
#[derive(Clone)]
struct CallForm {
    syntax: CallSyntax,
    /// The functions of the request.
    names: Arc<[String]>,
    /// Whether an answer may have several calls.
    parallel: bool,
}

impl AnswerForm {
    /// The form of the answers to `prompt`, the ids of a conversation with the same options and format.
    pub fn new(
        codec: &Arc<Codec>,
        prompt: &[TokenId],
        options: &ChatOptions,
        format: ToolFormat,
    ) -> Self {
        let tools = options.callable();
        let calls = (!tools.is_empty()).then(|| CallForm {
            syntax: format.syntax(),
            names: tools.iter().map(|tool| tool.name.clone()).collect(),
            parallel: options.parallel_tool_calls,
        });
        let reasoning = codec.think_tags().map(|tags| (tags, codec.opens_reasoning(prompt)));
        Self { codec: Arc::clone(codec), reasoning, calls }
    }

    /// The form of answers that `grammar` constrains: unless it is one of calls, they have neither reasoning
    /// nor calls.
    #[must_use]
    pub fn constrained(self, grammar: Option<&GrammarSpec>) -> Self {
        if grammar.is_none_or(CallGrammar::made) {
            return self;
        }
        Self { reasoning: None, calls: None, ..self }
    }

    /// Whether answers are text alone, without reasoning and calls.
    pub fn is_plain(&self) -> bool {
        self.reasoning.is_none() && self.calls.is_none()
    }

    /// Whether answers may have reasoning.
    pub fn may_reason(&self) -> bool {
        self.reasoning.is_some()
    }

    /// Divides a whole answer: the ids of its tokens, with the text that each completed.
    pub fn parse<'t>(
        &self,
        tokens: impl IntoIterator<Item = (TokenId, &'t str)>,
        rest: &str,
    ) -> Vec<AnswerPart> {
        let mut parser = AnswerParser::new(self);
        let mut parts: Vec<AnswerPart> =
            tokens.into_iter().flat_map(|(id, text)| parser.push(id, text)).collect();
        parts.extend(parser.finish(rest));
        parts
    }
}

/// Divides one answer.
pub struct AnswerParser {
    markers: Option<MarkerText>,
    reasoning: Option<ReasoningSplitter>,
    calls: Option<CallParser>,
    /// Tokens so far.
    tokens: usize,
    reasoning_tokens: usize,
}

impl AnswerParser {
    /// A parser of one answer.
    pub fn new(form: &AnswerForm) -> Self {
        let mut texts: Vec<&'static str> = Vec::new();
        if let Some((tags, _)) = form.reasoning {
            texts.extend([tags.open, tags.close]);
        }
        if let Some(calls) = &form.calls {
            let syntax = calls.syntax;
            texts.extend(syntax.begin.iter().chain(syntax.end));
            texts.extend(syntax.named.into_iter().flat_map(|(id, arguments)| [id, arguments]));
        }
        let markers = Markers::new(&form.codec, texts);
        Self {
            reasoning: form.reasoning.map(|(tags, inside)| {
                let (open, close) = (markers.text(tags.open), markers.text(tags.close));
                ReasoningSplitter::new(open, close, inside)
            }),
            calls: form.calls.as_ref().map(|calls| {
                let names = Arc::clone(&calls.names);
                CallParser::new(calls.syntax, |text| markers.text(text), names, calls.parallel)
            }),
            markers: (!markers.is_empty()).then(|| MarkerText::new(&form.codec, markers)),
            tokens: 0,
            reasoning_tokens: 0,
        }
    }

    /// Adds a sampled token and the text that became complete with it. Returns the parts that are
    /// certain now.
    pub fn push(&mut self, id: TokenId, text: &str) -> Vec<AnswerPart> {
        self.tokens += 1;
        match &mut self.markers {
            Some(markers) => {
                let text = markers.push(id, text);
                self.divide(&text, false)
            }
            None => self.divide(text, false),
        }
    }

    /// Ends the answer with the text that was held back. Returns the remaining parts.
    pub fn finish(&mut self, rest: &str) -> Vec<AnswerPart> {
        match &mut self.markers {
            Some(markers) => {
                let text = markers.finish(rest);
                self.divide(&text, true)
            }
            None => self.divide(rest, true),
        }
    }

    /// The token limit ends the answer: what it has of a call that it cut is no text.
    pub fn end_at_limit(&mut self) {
        if let Some(calls) = &mut self.calls {
            calls.at_limit = true;
        }
    }

    /// The number of tokens up to the end of the reasoning, its tags included; 0 without reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Whether the answer called a function and no call was cut off.
    pub fn has_whole_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(CallParser::has_whole_calls)
    }

    fn divide(&mut self, text: &str, last: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let Some(reasoning) = &mut self.reasoning else {
            self.read(text, last, &mut parts);
            return self.without_markers(parts);
        };
        let was_over = reasoning.is_over();
        let pieces = reasoning.push(text, last);
        if !was_over && reasoning.has_begun() {
            self.reasoning_tokens = self.tokens;
        }
        let mut said = String::new();
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => parts.push(AnswerPart::Reasoning(text)),
                Piece::Text(text) => said.push_str(&text),
            }
        }
        self.read(&said, last, &mut parts);
        self.without_markers(parts)
    }

    /// Reads text after the reasoning.
    fn read(&mut self, text: &str, last: bool, parts: &mut Vec<AnswerPart>) {
        match &mut self.calls {
            Some(calls) => calls.push(text, last, parts),
            None if text.is_empty() => {}
            None => parts.push(AnswerPart::Text(text.to_owned())),
        }
    }

    /// Removes the characters that stand for special tokens.
    fn without_markers(&self, mut parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        if self.markers.is_none() {
            return parts;
        }
        parts.retain_mut(|part| match part {
            AnswerPart::Reasoning(text)
            | AnswerPart::Text(text)
            | AnswerPart::Arguments { json: text, .. } => {
                text.retain(|c| !markers::is_marker(c));
                !text.is_empty()
            }
            AnswerPart::Call { .. } => true,
        });
        parts
    }
}

#[cfg(test)]
mod tests;
