//! Divides an answer into reasoning, text and calls of functions, while it is generated.
//!
//! ```text
//! tokens -> markers -> reasoning -> calls -> AnswerPart
//! ```
//!
//! [`Codec`] removes special tokens from texts, but some formats begin a call with one. `Markers` puts
//! those of the format back, each as one character that no text contains. `reasoning` splits at the
//! template's think tags, and `calls` reads the format of the model's calls.
//!
//! Invariants: the parts do not depend on how the text is split into pieces. Without reasoning and
//! calls the parts' text is exactly the answer's text. Text that might begin a tag or a call is held back
//! until that is decided.

mod calls;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use hone_core::types::{ChatOptions, GrammarSpec, TokenId};

use crate::codec::{Codec, TextStream, overlap};
use crate::grammar::CallGrammar;
use crate::template::ThinkTags;
use crate::tools::{CallFormat, ToolFormat};
use calls::CallParser;

pub use calls::AnswerPart;

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
    format: &'static CallFormat,
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
            format: format.calls(),
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
            let CallFormat { begin, end, named, .. } = calls.format;
            texts.extend(begin.iter().chain(*end));
            texts.extend(named.iter().flat_map(|(id, arguments)| [id, arguments]));
        }
        let tokens =
            texts.into_iter().filter_map(|text| Some((text, form.codec.special_id(text)?)));
        let characters = MARKERS.filter_map(char::from_u32);
        let markers: Markers =
            tokens.zip(characters).map(|((text, id), c)| (text, id, c)).collect();
        // What stands for a text in the answer.
        let shown = |text: &'static str| {
            let own = markers.iter().find(|(known, ..)| *known == text);
            own.map_or_else(|| text.to_owned(), |(_, _, c)| c.to_string())
        };
        Self {
            reasoning: form.reasoning.map(|(tags, inside)| {
                ReasoningSplitter::new(shown(tags.open), shown(tags.close), inside)
            }),
            calls: form.calls.as_ref().map(|calls| {
                CallParser::new(calls.format, shown, Arc::clone(&calls.names), calls.parallel)
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
        if let Some(markers) = &mut self.markers {
            markers.add(id);
        }
        self.divide(text, false)
    }

    /// Ends the answer with the text that was held back. Returns the remaining parts.
    pub fn finish(&mut self, rest: &str) -> Vec<AnswerPart> {
        self.divide(rest, true)
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
        let mut said = match &mut self.markers {
            Some(markers) => Cow::Owned(markers.insert(text)),
            None => Cow::Borrowed(text),
        };
        let mut parts = Vec::new();
        if let Some(reasoning) = &mut self.reasoning {
            let was_over = reasoning.is_over();
            let (thought, text) = reasoning.push(&said, last);
            if !was_over && reasoning.has_begun {
                self.reasoning_tokens = self.tokens;
            }
            if !thought.is_empty() {
                parts.push(AnswerPart::Reasoning(thought));
            }
            said = Cow::Owned(text);
        }
        match &mut self.calls {
            Some(calls) => parts.extend(calls.push(&said, last)),
            None if said.is_empty() => {}
            None => parts.push(AnswerPart::Text(said.into_owned())),
        }
        if self.markers.is_none() {
            return parts;
        }
        // No character that stands for a special token leaves the parser.
        parts.retain_mut(|part| match part {
            AnswerPart::Reasoning(text)
            | AnswerPart::Text(text)
            | AnswerPart::Arguments { json: text, .. } => {
                text.retain(|c| !MARKERS.contains(&u32::from(c)));
                !text.is_empty()
            }
            AnswerPart::Call { .. } => true,
        });
        parts
    }
}

// Puts special tokens back into the text from which the codec removed them.

/// 32 code points that Unicode reserves for use within a program, each of which stands for a special token.
const MARKERS: Range<u32> = 0xfdd0..0xfdf0;

/// The texts of a format that are special tokens of the model, each with a character that stands for it.
type Markers = Vec<(&'static str, TokenId, char)>;

/// Inserts the markers of one answer.
///
/// Text arrives late: it waits for the rest of a character, and for text that decides whether a stop
/// string begins. So the marker of a token is inserted at the place of the token in the decoded text,
/// when all text before it has arrived.
struct MarkerText {
    codec: Arc<Codec>,
    markers: Markers,
    /// The answer without stop strings, which delays nothing but the rest of a character.
    decoded: TextStream,
    /// Bytes that were decoded.
    decoded_bytes: usize,
    /// Bytes of the text that has arrived.
    arrived_bytes: usize,
    /// Markers whose place has not arrived, with their places in bytes.
    waiting: VecDeque<(usize, char)>,
}

impl MarkerText {
    fn new(codec: &Arc<Codec>, markers: Markers) -> Self {
        Self {
            codec: Arc::clone(codec),
            markers,
            decoded: TextStream::new(Arc::clone(codec), &[]),
            decoded_bytes: 0,
            arrived_bytes: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Adds a token.
    fn add(&mut self, id: TokenId) {
        // A stop token ends the answer and adds no text, even if it is an ordinary token.
        if !self.codec.stop_ids().contains(&id) {
            self.decoded_bytes += self.decoded.push(id).text.len();
            if let Some((_, _, c)) = self.markers.iter().find(|(_, own, _)| *own == id) {
                self.waiting.push_back((self.decoded_bytes, *c));
            }
        }
    }

    /// The text that has arrived, with the markers before its end. Markers after a stop string are lost, as the
    /// text there is.
    fn insert(&mut self, text: &str) -> String {
        let (mut all, mut rest) = (String::with_capacity(text.len()), text);
        while let Some((place, marker)) = self.waiting.front().copied() {
            let before = place.saturating_sub(self.arrived_bytes);
            let Some((head, tail)) = rest.split_at_checked(before) else { break };
            all.push_str(head);
            all.push(marker);
            rest = tail;
            self.arrived_bytes += head.len();
            self.waiting.pop_front();
        }
        all.push_str(rest);
        self.arrived_bytes += rest.len();
        all
    }
}

// Splits an answer at think tags.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the first character that is not white space.
    Start,
    /// After the opening tag, before the first character that is not a line feed.
    Opened,
    /// In the reasoning.
    Inside,
    /// After the closing tag, before the first character that is not a line feed.
    Closed,
    /// In the text after the reasoning, or of an answer without it.
    After,
}

/// Splits one answer. Reasoning is only recognized at the beginning. Line feeds next to the tags belong
/// to neither side, as in the templates that write them.
struct ReasoningSplitter {
    open: String,
    close: String,
    place: Place,
    /// Whether the answer has reasoning, so far as is known.
    has_begun: bool,
    /// Text that is not certain yet.
    held: String,
}

impl ReasoningSplitter {
    /// A splitter for these tags. `inside`: the prompt has opened the reasoning.
    fn new(open: String, close: String, inside: bool) -> Self {
        let place = if inside { Place::Opened } else { Place::Start };
        Self { open, close, place, has_begun: inside, held: String::new() }
    }

    /// Whether the reasoning has ended, or the answer has none.
    fn is_over(&self) -> bool {
        matches!(self.place, Place::Closed | Place::After)
    }

    /// Adds text and returns the reasoning, and the text after it, that are certain now. `last` ends the answer.
    fn push(&mut self, text: &str, last: bool) -> (String, String) {
        self.held.push_str(text);
        let mut thought = String::new();
        while let Some(place) = self.next_place(last, &mut thought) {
            self.place = place;
        }
        let said =
            if self.place == Place::After { std::mem::take(&mut self.held) } else { String::new() };
        (thought, said)
    }

    /// The place after this one, if it has been reached.
    fn next_place(&mut self, last: bool, thought: &mut String) -> Option<Place> {
        let start = match self.place {
            Place::Start => self.held.trim_start(),
            _ => self.held.trim_start_matches('\n'),
        };
        let skipped = self.held.len() - start.len();
        match self.place {
            // Some models repeat the tag that the prompt contains.
            Place::Start | Place::Opened if start.starts_with(&self.open) => {
                self.held.drain(..skipped + self.open.len());
                self.has_begun = true;
                Some(Place::Opened)
            }
            Place::Start | Place::Opened if !last && self.open.starts_with(start) => None,
            Place::Start => Some(Place::After),
            Place::Opened => {
                self.held.drain(..skipped);
                Some(Place::Inside)
            }
            Place::Inside => self.inside(last, thought),
            Place::Closed => {
                self.held.drain(..skipped);
                (!self.held.is_empty()).then_some(Place::After)
            }
            Place::After => None,
        }
    }

    fn inside(&mut self, last: bool, thought: &mut String) -> Option<Place> {
        let closed = self.held.find(&self.close);
        let certain = match closed {
            Some(at) => at,
            None if last => self.held.len(),
            None => self.held.len() - overlap(&self.held, &self.close),
        };
        // Line feeds wait for what follows them; those before the tag or the end are dropped.
        let length = self.held.get(..certain).unwrap_or_default().trim_end_matches('\n').len();
        thought.extend(self.held.drain(..length));
        match closed {
            Some(at) => {
                self.held.drain(..at - length + self.close.len());
                Some(Place::Closed)
            }
            None => {
                if last {
                    self.held.clear();
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
