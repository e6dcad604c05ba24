//! Finds calls in text.
//!
//! A call that is not well formed, or that names no function of the request, stays text. Calls with up
//! to [`CHECKED`] bytes of arguments are reported when they have been checked as a whole. Those with more
//! are reported while they are read, so that clients see long arguments grow; if they then turn out to be
//! no JSON, the call has all text up to its end as its arguments.

use std::sync::Arc;

use actson::feeder::PushJsonFeeder;
use actson::{JsonEvent, JsonParser};
use serde_json::Value;

use crate::codec::{earliest, longest_overlap};
use crate::tools::CallFormat;

/// Arguments in bytes up to which a call is checked before it is reported.
pub(super) const CHECKED: usize = 1024;

/// Text that was read as the beginning of calls, and becomes text again if there is no call.
#[derive(Default)]
struct Doubtful {
    /// White space before it.
    space: String,
    text: String,
    /// Length in bytes of the beginning of `text` that is certainly text then. The rest is read again.
    certain: usize,
}

enum State {
    Text,
    /// Before a call: after a text that begins calls, or after a comma in a list.
    Before,
    /// In a call that was not reported.
    Unreported(CallReader),
    /// In the call that was reported last.
    Reported(CallReader),
    /// In the arguments of a reported call, which are no JSON.
    Broken,
    /// After a whole call.
    Next,
    /// After the only call that is permitted.
    Silent,
}

/// Finds the calls of one answer.
pub(super) struct CallParser {
    begin: Vec<String>,
    end: Vec<String>,
    bare: bool,
    /// The texts before the id and before the arguments of a named call.
    named: Option<[String; 2]>,
    names: Arc<[String]>,
    parallel: bool,
    state: State,
    /// Text that was not read.
    buffer: String,
    /// Whether no text follows that of the buffer.
    last: bool,
    /// What was read of calls that are not certain.
    doubtful: Doubtful,
    /// Whether the call is in a list.
    in_list: bool,
    /// White space that is dropped if a call follows.
    space: String,
    /// Whether there was text other than white space.
    has_text: bool,
    /// Whether only white space followed the last call.
    after_call: bool,
    /// Calls that were reported.
    calls: usize,
    /// Whether a reported call was cut off or is no JSON.
    is_cut: bool,
    /// Whether the token limit ends the answer.
    pub(super) at_limit: bool,
    /// Parts that are certain.
    parts: Vec<AnswerPart>,
}

impl CallParser {
    /// A parser for the functions `names`. `shown` is how a text of the format stands in the answer.
    pub(super) fn new(
        format: &CallFormat,
        shown: impl Fn(&'static str) -> String,
        names: Arc<[String]>,
        parallel: bool,
    ) -> Self {
        Self {
            begin: format.begin.iter().copied().map(&shown).collect(),
            end: format.end.iter().copied().map(&shown).collect(),
            bare: format.bare,
            named: format.named.map(|(id, arguments)| [shown(id), shown(arguments)]),
            names,
            parallel,
            state: State::Text,
            buffer: String::new(),
            last: false,
            doubtful: Doubtful::default(),
            in_list: false,
            space: String::new(),
            has_text: false,
            after_call: false,
            calls: 0,
            is_cut: false,
            at_limit: false,
            parts: Vec::new(),
        }
    }

    /// Adds text and returns the parts that are certain now. `last` ends the answer.
    pub(super) fn push(&mut self, text: &str, last: bool) -> Vec<AnswerPart> {
        self.buffer.push_str(text);
        self.last = last;
        while self.step() {}
        if let State::Reported(reader) = &mut self.state {
            let json = reader.take_arguments();
            self.is_cut |= last;
            self.add_arguments(json);
        }
        std::mem::take(&mut self.parts)
    }

    /// Whether there is a call and none was cut off.
    pub(super) fn has_whole_calls(&self) -> bool {
        self.calls > 0 && !self.is_cut
    }

    /// Reads what can be decided. Returns whether more can be.
    fn step(&mut self) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.in_text(),
            State::Before => self.before(),
            State::Unreported(reader) => self.in_unreported(reader),
            State::Reported(reader) => self.in_reported(reader),
            State::Broken => self.in_broken(),
            State::Next => self.next(),
            State::Silent => {
                self.buffer.clear();
                self.wait(State::Silent)
            }
        }
    }

    fn wait(&mut self, state: State) -> bool {
        self.state = state;
        false
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// Goes on before a call that follows `space` and the next `bytes` of the buffer.
    fn await_call(&mut self, space: String, bytes: usize) -> bool {
        self.doubtful = Doubtful { space, text: self.take(bytes), certain: bytes.max(1) };
        self.go(State::Before)
    }

    fn in_text(&mut self) -> bool {
        self.in_list = false;
        if self.bare && !self.has_text && !self.after_call {
            let start = self.buffer.trim_start();
            if start.is_empty() && !self.last {
                return false;
            }
            if start.starts_with('{') {
                let space = self.take(self.buffer.len() - start.len());
                return self.await_call(space, 0);
            }
        }
        if let Some((at, tag)) = earliest(&self.buffer, &self.begin) {
            let length = tag.len();
            let before = self.take(at);
            self.say(&before);
            let space = std::mem::take(&mut self.space);
            return self.await_call(space, length);
        }
        let text = self.take(self.before_any(&self.begin));
        self.say(&text);
        if self.last && !self.after_call {
            let space = std::mem::take(&mut self.space);
            self.add_text(space);
        }
        false
    }

    fn before(&mut self) -> bool {
        self.doubt(self.buffer.len() - self.buffer.trim_start().len());
        match self.buffer.chars().next() {
            None if self.last => self.cut(),
            None => self.wait(State::Before),
            Some('[') if !self.in_list && !self.doubtful.text.is_empty() => {
                self.doubt(1);
                self.in_list = true;
                self.go(State::Before)
            }
            Some('{') => {
                // A call without any text before it must have arguments: other JSON is text.
                let reader = CallReader::object(!self.doubtful.text.is_empty());
                self.doubt(1);
                self.go(State::Unreported(reader))
            }
            Some(_) if !self.in_list => self.named(),
            Some(_) => self.reject(),
        }
    }

    /// The name of a named call, perhaps with an id.
    fn named(&mut self) -> bool {
        let Some([id, arguments]) = &self.named else { return self.reject() };
        let (name, mut rest) = word(&self.buffer);
        let mut may_be_id = false;
        match rest.strip_prefix(id.as_str()) {
            Some(after) => rest = word(after).1,
            None => may_be_id = id.starts_with(rest),
        }
        let found = rest.strip_prefix(arguments.as_str());
        if found.is_none() && !self.last && (may_be_id || arguments.starts_with(rest)) {
            return self.wait(State::Before);
        }
        let found = found.or_else(|| rest.starts_with('{').then_some(rest));
        let Some(after) = found.filter(|_| self.names.iter().any(|known| known == name)) else {
            return self.reject();
        };
        let reader = CallReader::new(Some(name.to_owned()), 1);
        self.doubt(self.buffer.len() - after.len());
        self.go(State::Unreported(reader))
    }

    fn in_unreported(&mut self, mut reader: CallReader) -> bool {
        let names = Arc::clone(&self.names);
        let mut read = 0;
        for c in self.buffer.chars() {
            let outcome = reader.push(c, |name| names.iter().any(|known| known == name));
            if outcome == Read::Bad {
                // The wrong character stays in the buffer.
                self.doubt(read);
                return self.reject();
            }
            read += c.len_utf8();
            let is_long = reader.arguments.len() > CHECKED && reader.is_in_arguments;
            if let Some(name) = reader.name.as_ref().filter(|_| outcome == Read::Done || is_long) {
                self.parts.push(AnswerPart::Call { index: self.calls, name: name.clone() });
                self.calls += 1;
                self.take(read);
                self.add_arguments(reader.take_arguments());
                return match outcome {
                    Read::Done => self.after_whole_call(),
                    _ => self.go(State::Reported(reader)),
                };
            }
        }
        self.doubt(read);
        if self.last { self.cut() } else { self.wait(State::Unreported(reader)) }
    }

    /// The end of the answer within a call that was not reported. If the token limit cut it, what begins with a tag
    /// is no text; a bare object may be one.
    fn cut(&mut self) -> bool {
        let is_tagged = self.begin.iter().any(|tag| self.doubtful.text.starts_with(tag.as_str()));
        if self.at_limit && is_tagged { self.go(State::Silent) } else { self.reject() }
    }

    fn in_reported(&mut self, mut reader: CallReader) -> bool {
        let mut read = 0;
        for c in self.buffer.chars() {
            let outcome = reader.push(c, |_| true);
            // A wrong character is read again, because it may begin the end of the call.
            read += if outcome == Read::Bad { 0 } else { c.len_utf8() };
            if outcome != Read::More {
                let is_broken = outcome == Read::Bad && reader.is_in_arguments;
                let mut json = reader.take_arguments();
                if is_broken {
                    json.pop();
                }
                self.take(read);
                self.add_arguments(json);
                self.is_cut |= is_broken;
                return if is_broken { self.go(State::Broken) } else { self.after_whole_call() };
            }
        }
        self.buffer.clear();
        self.wait(State::Reported(reader))
    }

    fn in_broken(&mut self) -> bool {
        let end = earliest(&self.buffer, &self.end).map(|(at, tag)| (at, tag.len()));
        let json = match end {
            Some((at, _)) => self.take(at),
            None => self.take(self.before_any(&self.end)),
        };
        self.add_arguments(json);
        let Some((_, length)) = end else { return self.wait(State::Broken) };
        self.take(length);
        self.after_call = true;
        self.go(if self.parallel { State::Text } else { State::Silent })
    }

    /// After a call: the next one of a list, the end of what began it, or text.
    fn next(&mut self) -> bool {
        let start = self.buffer.trim_start();
        let space = self.buffer.len() - start.len();
        match start.chars().next() {
            None if !self.last => self.wait(State::Next),
            Some(']') if self.in_list => {
                self.take(space + 1);
                self.in_list = false;
                self.go(State::Next)
            }
            Some(c) if (self.in_list && c == ',') || (self.is_bare() && c == ';') => {
                let space = self.take(space);
                self.await_call(space, 1)
            }
            Some('{') if self.is_bare() => {
                let space = self.take(space);
                self.await_call(space, 0)
            }
            _ => {
                let ended = self.end.iter().find(|tag| start.starts_with(tag.as_str()));
                if let Some(length) = ended.map(String::len) {
                    self.take(space + length);
                } else if !self.last && self.end.iter().any(|tag| tag.starts_with(start)) {
                    return self.wait(State::Next);
                }
                self.go(State::Text)
            }
        }
    }

    /// Whether a call may follow without any text before it.
    fn is_bare(&self) -> bool {
        self.bare && !self.in_list
    }

    fn after_whole_call(&mut self) -> bool {
        self.after_call = true;
        self.go(if self.parallel { State::Next } else { State::Silent })
    }

    /// Makes what was read text again: as much as is certain, and the rest is read once more.
    fn reject(&mut self) -> bool {
        let Doubtful { space, mut text, certain } = std::mem::take(&mut self.doubtful);
        let rest = text.split_off(certain);
        self.space.push_str(&space);
        self.say(&text);
        self.buffer.insert_str(0, &rest);
        self.go(State::Text)
    }

    /// Reports text. White space at its end waits, because it is dropped if a call follows.
    fn say(&mut self, text: &str) {
        let said = text.trim_end();
        if !said.is_empty() {
            let space = std::mem::take(&mut self.space);
            self.add_text(space + said);
            (self.has_text, self.after_call) = (true, false);
        }
        self.space.push_str(text.get(said.len()..).unwrap_or_default());
    }

    fn add_text(&mut self, text: String) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Text(last)) => last.push_str(&text),
            _ => self.parts.push(AnswerPart::Text(text)),
        }
    }

    /// Adds to the arguments of the last call.
    fn add_arguments(&mut self, json: String) {
        match self.parts.last_mut() {
            _ if json.is_empty() => {}
            Some(AnswerPart::Arguments { json: last, .. }) => last.push_str(&json),
            _ => {
                let index = self.calls.saturating_sub(1);
                self.parts.push(AnswerPart::Arguments { index, json });
            }
        }
    }

    /// Moves the first bytes of the buffer to what may become text again.
    fn doubt(&mut self, bytes: usize) {
        let text = self.take(bytes);
        self.doubtful.text.push_str(&text);
    }

    /// Removes the first bytes of the buffer and returns them.
    fn take(&mut self, bytes: usize) -> String {
        self.buffer.drain(..bytes).collect()
    }

    /// The bytes of the buffer at whose end no text of `tags` may begin.
    fn before_any(&self, tags: &[String]) -> usize {
        self.buffer.len() - if self.last { 0 } else { longest_overlap(&self.buffer, tags) }
    }
}

/// The name or id at the beginning of a text, and what follows it and white space.
fn word(text: &str) -> (&str, &str) {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    (word, rest.trim_start())
}

// Reads one call.

/// The keys of the arguments in all formats.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Nested objects and lists beyond this depth are refused, as serde_json does.
const DEEPEST: usize = 127;

/// What a character means for the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// The call goes on.
    More,
    /// The call ends with this character.
    Done,
    /// This is no call.
    Bad,
}

/// One call while it is read: an object of name and arguments, or arguments after a name.
struct CallReader {
    parser: JsonParser<PushJsonFeeder>,
    /// Objects and lists that are open.
    depth: usize,
    /// The depth of the arguments: 2 within an object, 1 after a name.
    arguments_depth: usize,
    /// The last key of the object.
    key: String,
    name: Option<String>,
    /// The arguments' text that was read and not taken. It is certain while the arguments are being read.
    arguments: String,
    has_arguments: bool,
    is_in_arguments: bool,
    /// Whether a call without arguments is one.
    may_lack_arguments: bool,
}

impl CallReader {
    /// A reader after the `{` of an object.
    fn object(may_lack_arguments: bool) -> Self {
        let mut reader = Self { may_lack_arguments, ..Self::new(None, 2) };
        // Begins the object.
        reader.push('{', |_| false);
        reader
    }

    /// A reader of an object, or with `name` of the arguments of this function.
    fn new(name: Option<String>, arguments_depth: usize) -> Self {
        Self {
            parser: JsonParser::new(PushJsonFeeder::new()),
            depth: 0,
            arguments_depth,
            key: String::new(),
            name,
            arguments: String::new(),
            has_arguments: false,
            is_in_arguments: false,
            may_lack_arguments: false,
        }
    }

    fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    /// Adds a character. `knows` is whether a function exists.
    fn push(&mut self, c: char, knows: impl Fn(&str) -> bool) -> Read {
        if self.depth == 0 && !matches!(c, '{' | ' ' | '\n' | '\r' | '\t') {
            return Read::Bad;
        }
        if self.is_in_arguments {
            self.arguments.push(c);
        }
        self.parser.feeder.push_bytes(c.encode_utf8(&mut [0; 4]).as_bytes());
        loop {
            let read = match self.parser.next_event() {
                Ok(Some(JsonEvent::NeedMoreInput)) => return Read::More,
                Ok(Some(event)) => self.event(event, &knows),
                Ok(None) | Err(_) => Read::Bad,
            };
            if read != Read::More {
                return read;
            }
        }
    }

    fn event(&mut self, event: JsonEvent, knows: impl Fn(&str) -> bool) -> Read {
        let at_key = self.depth == 1 && self.arguments_depth == 2;
        let is_arguments = !at_key || ARGUMENTS.contains(&self.key.as_str());
        match event {
            JsonEvent::StartObject | JsonEvent::StartArray => {
                self.depth += 1;
                if self.depth > DEEPEST {
                    return Read::Bad;
                }
                if at_key && self.key == "name" {
                    return Read::Bad;
                }
                if self.depth == self.arguments_depth && is_arguments {
                    if event == JsonEvent::StartArray {
                        return Read::Bad;
                    }
                    (self.has_arguments, self.is_in_arguments) = (true, true);
                    "{".clone_into(&mut self.arguments);
                }
                Read::More
            }
            JsonEvent::EndObject | JsonEvent::EndArray => {
                self.depth -= 1;
                self.is_in_arguments &= self.depth >= self.arguments_depth;
                if self.depth == 0 { self.end() } else { Read::More }
            }
            _ if self.depth == 0 => Read::Bad,
            _ if !at_key => Read::More,
            JsonEvent::FieldName => match self.parser.current_str() {
                Ok(key) => {
                    key.clone_into(&mut self.key);
                    if self.is_repeated() { Read::Bad } else { Read::More }
                }
                Err(_) => Read::Bad,
            },
            _ if self.key != "name" && !is_arguments => Read::More,
            JsonEvent::ValueNull if is_arguments => self.set_arguments("{}".to_owned()),
            JsonEvent::ValueString => match self.parser.current_str().map(str::to_owned) {
                Ok(text) if is_arguments && is_object(&text) => self.set_arguments(text),
                Ok(name) if !is_arguments && knows(&name) => {
                    self.name = Some(name);
                    Read::More
                }
                _ => Read::Bad,
            },
            _ => Read::Bad,
        }
    }

    /// Whether the key says again what the call has already. The first arguments may have been sent, so
    /// others cannot replace them.
    fn is_repeated(&self) -> bool {
        let is_arguments = ARGUMENTS.contains(&self.key.as_str());
        self.key == "name" && self.name.is_some() || is_arguments && self.has_arguments
    }

    /// Some models write the arguments as a text, or null for a function without any.
    fn set_arguments(&mut self, json: String) -> Read {
        (self.arguments, self.has_arguments) = (json, true);
        Read::More
    }

    /// The end of the call.
    fn end(&mut self) -> Read {
        if !self.has_arguments && self.may_lack_arguments {
            self.set_arguments("{}".to_owned());
        }
        if self.name.is_some() && self.has_arguments { Read::Done } else { Read::Bad }
    }
}

fn is_object(json: &str) -> bool {
    matches!(serde_json::from_str(json), Ok(Value::Object(_)))
}

// The parts of an answer.

/// A part of an answer, in the answer's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the text.
    Text(String),
    /// A call begins. Its arguments follow.
    Call {
        /// The number of the call within the answer, from 0.
        index: usize,
        /// The function.
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The number of the call.
        index: usize,
        /// The next part of the JSON text.
        json: String,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    /// The length in bytes of the object at the beginning of `text`; `None` if there is none.
    fn object_length(text: &str) -> Option<usize> {
        let mut reader = CallReader::new(Some("f".to_owned()), 1);
        for (at, c) in text.char_indices() {
            match reader.push(c, |_| false) {
                Read::More => {}
                Read::Done => return Some(at + c.len_utf8()),
                Read::Bad => return None,
            }
        }
        None
    }

    #[test]
    fn arguments_end_where_they_end() {
        let cases = [
            (r#"{"a": [1, -0.5e+3, "x\"\u00e9}", {}, []]} rest"#, Some(41)),
            ("{} x", Some(2)),
            ("{\"a\":true},", Some(10)),
            ("{\"a\":-12.5}, 3", Some(11)),
            ("{\"a\":0}]", Some(7)),
            ("{\"a\" 1}", None),
            ("{a: 1}", None),
            ("{'a': 1}", None),
            ("{\"a\":[1,]}", None),
            ("{\"a\": 1,}", None),
            ("{\"a\":[1}", None),
            ("{\"a\":01}", None),
            ("{\"a\":\"a\nb\"}", None),
            ("{\"a\":\"\\x\"}", None),
            ("{\"a\":1.}", None),
            ("{\"a\":nul }", None),
            ("[]", None),
            ("1 ", None),
        ];
        for (text, length) in cases {
            assert_eq!(object_length(text), length, "{text}");
        }
        let nested = |depth| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(object_length(&nested(200)), None);
        assert_eq!(object_length(&nested(126)), Some(258));
    }

    proptest! {
        #[test]
        fn accepts_exactly_what_serde_json_accepts(
            text in r#"\{(?:[{}\[\]",:a0-2.eE+ tru\\u]|true|null|"k": ?){0,14}\}"#,
        ) {
            let is_whole = object_length(&text) == Some(text.len());
            prop_assert_eq!(is_whole, serde_json::from_str::<IgnoredAny>(&text).is_ok());
        }
    }
}
