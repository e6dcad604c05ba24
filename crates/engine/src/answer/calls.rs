//! Finds calls in text.
//!
//! A call that is not well formed, or that names no function of the request, stays text. Calls with up
//! to [`CHECKED`] bytes of arguments are reported when they have been checked as a whole. Those with more
//! are reported while they are read, so that clients see long arguments grow; if they then turn out to be
//! no JSON, the call has all text up to its end as its arguments.

use std::sync::Arc;

use super::call::{CallReader, Read};
use crate::codec::{earliest, longest_overlap};
use crate::tools::CallSyntax;

/// Arguments in bytes up to which a call is checked before it is reported.
pub(super) const CHECKED: usize = 1024;

/// Text that was read as the beginning of calls, and becomes text again if there is no call.
#[derive(Debug, Default)]
struct Doubtful {
    /// White space before it.
    space: String,
    /// Not empty when it is decided that there is no call.
    text: String,
    /// Length in bytes of the beginning of `text` that is certainly text then. The rest is read again.
    certain: usize,
}

enum State {
    /// In text.
    Text,
    /// Before a call: after a text that begins calls, or after a comma in a list.
    Before { doubtful: Doubtful, in_list: bool },
    /// In a call that was not reported.
    Unreported { doubtful: Doubtful, in_list: bool, reader: CallReader },
    /// In the call that was reported last.
    Reported { in_list: bool, reader: CallReader },
    /// In the arguments of a reported call, which are no JSON.
    Broken,
    /// After a whole call.
    Next { in_list: bool },
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
}

impl CallParser {
    /// A parser for the functions `names`. `shown` is how a text of the format stands in the answer.
    pub(super) fn new(
        syntax: CallSyntax,
        shown: impl Fn(&'static str) -> String,
        names: Arc<[String]>,
        parallel: bool,
    ) -> Self {
        Self {
            begin: syntax.begin.iter().copied().map(&shown).collect(),
            end: syntax.end.iter().copied().map(&shown).collect(),
            bare: syntax.bare,
            named: syntax.named.map(|(id, arguments)| [shown(id), shown(arguments)]),
            names,
            parallel,
            state: State::Text,
            buffer: String::new(),
            space: String::new(),
            has_text: false,
            after_call: false,
            calls: 0,
            is_cut: false,
            at_limit: false,
        }
    }

    /// Adds text and appends the parts that are certain now. `last` ends the answer.
    pub(super) fn push(&mut self, text: &str, last: bool, parts: &mut Vec<AnswerPart>) {
        self.buffer.push_str(text);
        while self.step(last, parts) {}
        if let State::Reported { reader, .. } = &mut self.state {
            let json = reader.take_arguments();
            self.is_cut |= last;
            self.add_arguments(json, parts);
        }
    }

    /// Whether there is a call and none was cut off.
    pub(super) fn has_whole_calls(&self) -> bool {
        self.calls > 0 && !self.is_cut
    }

    /// Reads what can be decided. Returns whether more can be.
    fn step(&mut self, last: bool, parts: &mut Vec<AnswerPart>) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.in_text(last, parts),
            State::Before { doubtful, in_list } => self.before(doubtful, in_list, last, parts),
            State::Unreported { doubtful, in_list, reader } => {
                self.in_unreported(doubtful, in_list, reader, last, parts)
            }
            State::Reported { in_list, reader } => self.in_reported(in_list, reader, parts),
            State::Broken => self.in_broken(last, parts),
            State::Next { in_list } => self.next(in_list, last),
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

    fn in_text(&mut self, last: bool, parts: &mut Vec<AnswerPart>) -> bool {
        if self.bare && !self.has_text && !self.after_call {
            let start = self.buffer.trim_start();
            if start.is_empty() && !last {
                return false;
            }
            if start.starts_with('{') {
                let space = self.take(self.buffer.len() - start.len());
                return self.go(State::Before {
                    doubtful: Doubtful { space, certain: 1, ..Doubtful::default() },
                    in_list: false,
                });
            }
        }
        if let Some((at, tag)) = earliest(&self.buffer, &self.begin) {
            let length = tag.len();
            let before = self.take(at);
            self.say(&before, parts);
            let doubtful = Doubtful {
                space: std::mem::take(&mut self.space),
                text: self.take(length),
                certain: length,
            };
            return self.go(State::Before { doubtful, in_list: false });
        }
        let held = if last { 0 } else { longest_overlap(&self.buffer, &self.begin) };
        let text = self.take(self.buffer.len() - held);
        self.say(&text, parts);
        if last && !self.after_call {
            let space = std::mem::take(&mut self.space);
            add_text(space, parts);
        }
        false
    }

    fn before(
        &mut self,
        mut doubtful: Doubtful,
        mut in_list: bool,
        last: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        self.read_space(&mut doubtful);
        match self.buffer.chars().next() {
            None if last => self.cut(doubtful, parts),
            None => self.wait(State::Before { doubtful, in_list }),
            Some('[') if !in_list && !doubtful.text.is_empty() => {
                doubtful.text.push_str(&self.take(1));
                in_list = true;
                self.go(State::Before { doubtful, in_list })
            }
            Some('{') => {
                // A call without any text before it must have arguments: other JSON is text.
                let reader = CallReader::object(!doubtful.text.is_empty());
                doubtful.text.push_str(&self.take(1));
                self.go(State::Unreported { doubtful, in_list, reader })
            }
            Some(_) if !in_list => self.named(doubtful, last, parts),
            Some(_) => self.reject(doubtful, parts),
        }
    }

    /// The name of a named call, perhaps with an id.
    fn named(&mut self, doubtful: Doubtful, last: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some([id, arguments]) = &self.named else { return self.reject(doubtful, parts) };
        let (name, mut rest) = word(&self.buffer);
        let mut may_be_id = false;
        match rest.strip_prefix(id.as_str()) {
            Some(after) => rest = word(after).1,
            None => may_be_id = id.starts_with(rest),
        }
        let found = rest.strip_prefix(arguments.as_str());
        if found.is_none() && !last && (may_be_id || arguments.starts_with(rest)) {
            return self.wait(State::Before { doubtful, in_list: false });
        }
        let found = found.or_else(|| rest.starts_with('{').then_some(rest));
        let Some(after) = found.filter(|_| self.names.iter().any(|known| known == name)) else {
            return self.reject(doubtful, parts);
        };
        let reader = CallReader::named(name.to_owned());
        let head = self.take(self.buffer.len() - after.len());
        let doubtful = Doubtful { text: doubtful.text + &head, ..doubtful };
        self.go(State::Unreported { doubtful, in_list: false, reader })
    }

    fn in_unreported(
        &mut self,
        mut doubtful: Doubtful,
        in_list: bool,
        mut reader: CallReader,
        last: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let names = Arc::clone(&self.names);
        let knows = |name: &str| names.iter().any(|known| known == name);
        let mut read = 0;
        for c in self.buffer.chars() {
            read += c.len_utf8();
            let outcome = reader.push(c, knows);
            let is_long = reader.waiting() > CHECKED && reader.is_in_arguments();
            match (outcome, reader.name()) {
                (Read::More, Some(name)) if is_long => {
                    let name = name.to_owned();
                    self.take(read);
                    self.report(name, parts);
                    return self.go(State::Reported { in_list, reader });
                }
                (Read::More, _) => {}
                (Read::Done, Some(name)) => {
                    let (name, json) = (name.to_owned(), reader.take_arguments());
                    self.take(read);
                    self.report(name, parts);
                    self.add_arguments(json, parts);
                    return self.after_whole_call(in_list);
                }
                (Read::Done, None) | (Read::Bad, _) => {
                    // The wrong character stays in the buffer.
                    self.take(read - c.len_utf8());
                    return self.reject(doubtful, parts);
                }
            }
            doubtful.text.push(c);
        }
        self.buffer.clear();
        if last {
            return self.cut(doubtful, parts);
        }
        self.wait(State::Unreported { doubtful, in_list, reader })
    }

    /// The end of the answer within a call that was not reported. If the token limit cut it, what begins with a tag
    /// is no text; a bare object may be one.
    fn cut(&mut self, doubtful: Doubtful, parts: &mut Vec<AnswerPart>) -> bool {
        let is_tagged =
            self.at_limit && self.begin.iter().any(|tag| doubtful.text.starts_with(tag.as_str()));
        if is_tagged { self.go(State::Silent) } else { self.reject(doubtful, parts) }
    }

    fn in_reported(
        &mut self,
        in_list: bool,
        mut reader: CallReader,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let mut read = 0;
        for c in self.buffer.chars() {
            let outcome = reader.push(c, |_| true);
            match outcome {
                Read::More => read += c.len_utf8(),
                Read::Done | Read::Bad => {
                    let is_broken = outcome == Read::Bad && reader.is_in_arguments();
                    let is_done = outcome == Read::Done;
                    let mut json = reader.take_arguments();
                    if is_broken {
                        // The wrong character is read again, because it may begin the end of the call.
                        json.pop();
                    }
                    self.take(read + if is_done { c.len_utf8() } else { 0 });
                    self.add_arguments(json, parts);
                    return if is_broken {
                        self.is_cut = true;
                        self.go(State::Broken)
                    } else {
                        self.after_whole_call(in_list)
                    };
                }
            }
        }
        self.buffer.clear();
        self.wait(State::Reported { in_list, reader })
    }

    fn in_broken(&mut self, last: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let end = earliest(&self.buffer, &self.end).map(|(at, tag)| (at, tag.len()));
        let json = match end {
            Some((at, _)) => self.take(at),
            None => {
                let held = if last { 0 } else { longest_overlap(&self.buffer, &self.end) };
                self.take(self.buffer.len() - held)
            }
        };
        self.add_arguments(json, parts);
        let Some((_, length)) = end else { return self.wait(State::Broken) };
        self.take(length);
        self.after_call = true;
        self.go(if self.parallel { State::Text } else { State::Silent })
    }

    /// After a call: the next one of a list, the end of what began it, or text.
    fn next(&mut self, in_list: bool, last: bool) -> bool {
        let start = self.buffer.trim_start();
        let space = self.buffer.len() - start.len();
        match start.chars().next() {
            None if !last => self.wait(State::Next { in_list }),
            Some(']') if in_list => {
                self.take(space + 1);
                self.go(State::Next { in_list: false })
            }
            Some(c) if (in_list && c == ',') || (self.bare && !in_list && c == ';') => {
                let space = self.take(space);
                let doubtful = Doubtful { space, text: self.take(1), certain: 1 };
                self.go(State::Before { doubtful, in_list })
            }
            Some('{') if self.bare && !in_list => {
                let space = self.take(space);
                let doubtful = Doubtful { space, certain: 1, ..Doubtful::default() };
                self.go(State::Before { doubtful, in_list })
            }
            _ => {
                let ended = self.end.iter().find(|tag| start.starts_with(tag.as_str()));
                if let Some(length) = ended.map(String::len) {
                    self.take(space + length);
                } else if !last && self.end.iter().any(|tag| tag.starts_with(start)) {
                    return self.wait(State::Next { in_list });
                }
                self.go(State::Text)
            }
        }
    }

    fn after_whole_call(&mut self, in_list: bool) -> bool {
        self.after_call = true;
        self.go(if self.parallel { State::Next { in_list } } else { State::Silent })
    }

    /// Makes what was read text again: as much as is certain, and the rest is read once more.
    fn reject(&mut self, doubtful: Doubtful, parts: &mut Vec<AnswerPart>) -> bool {
        let Doubtful { space, mut text, certain } = doubtful;
        let rest = text.split_off(certain);
        self.space.push_str(&space);
        self.say(&text, parts);
        self.buffer.insert_str(0, &rest);
        self.go(State::Text)
    }

    /// Reports text. White space at its end waits, because it is dropped if a call follows.
    fn say(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let said = text.trim_end();
        if !said.is_empty() {
            let mut all = std::mem::take(&mut self.space);
            all.push_str(said);
            add_text(all, parts);
            (self.has_text, self.after_call) = (true, false);
        }
        self.space.push_str(text.get(said.len()..).unwrap_or_default());
    }

    fn report(&mut self, name: String, parts: &mut Vec<AnswerPart>) {
        parts.push(AnswerPart::Call { index: self.calls, name });
        self.calls += 1;
    }

    /// Adds to the arguments of the last call.
    fn add_arguments(&self, json: String, parts: &mut Vec<AnswerPart>) {
        match parts.last_mut() {
            _ if json.is_empty() => {}
            Some(AnswerPart::Arguments { json: last, .. }) => last.push_str(&json),
            _ => parts.push(AnswerPart::Arguments { index: self.calls.saturating_sub(1), json }),
        }
    }

    /// Moves white space from the buffer to what may become text again.
    fn read_space(&mut self, doubtful: &mut Doubtful) {
        let space = self.buffer.len() - self.buffer.trim_start().len();
        doubtful.text.push_str(&self.take(space));
    }

    /// Removes the first bytes of the buffer and returns them.
    fn take(&mut self, bytes: usize) -> String {
        self.buffer.drain(..bytes).collect()
    }
}

/// The name or id at the beginning of a text, and what follows it and white space.
fn word(text: &str) -> (&str, &str) {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    (word, rest.trim_start())
}

fn add_text(text: String, parts: &mut Vec<AnswerPart>) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(AnswerPart::Text(last)) => last.push_str(&text),
        _ => parts.push(AnswerPart::Text(text)),
    }
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
