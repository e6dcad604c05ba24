//! Splits an answer at think tags.

use crate::codec::overlap;

/// A piece of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Reasoning(String),
    Text(String),
}

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
pub(super) struct ReasoningSplitter {
    open: String,
    close: String,
    place: Place,
    has_begun: bool,
    /// Text that is not certain yet.
    held: String,
}

impl ReasoningSplitter {
    /// A splitter for these tags. `inside`: the prompt has opened the reasoning.
    pub(super) fn new(open: String, close: String, inside: bool) -> Self {
        let place = if inside { Place::Opened } else { Place::Start };
        Self { open, close, place, has_begun: inside, held: String::new() }
    }

    /// Whether the answer has reasoning, so far as is known.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether the reasoning has ended, or the answer has none.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.place, Place::Closed | Place::After)
    }

    /// Adds text and returns the pieces that are certain now. `last` ends the answer.
    pub(super) fn push(&mut self, text: &str, last: bool) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(last, &mut pieces) {}
        pieces
    }

    /// Decides what can be decided at this place. Returns whether the place has changed.
    fn step(&mut self, last: bool, pieces: &mut Vec<Piece>) -> bool {
        match self.place {
            Place::Start => self.start(last),
            Place::Opened => {
                let start = self.held.trim_start_matches('\n');
                // Some models repeat the tag that the prompt contains.
                let repeats = start.starts_with(&self.open);
                if !repeats && !last && (start.is_empty() || self.open.starts_with(start)) {
                    return false;
                }
                let skipped = self.held.len() - start.len();
                let skipped = skipped + if repeats { self.open.len() } else { 0 };
                self.held.drain(..skipped);
                // After a repeated tag, line feeds may follow again.
                self.place = if repeats { Place::Opened } else { Place::Inside };
                true
            }
            Place::Inside => self.inside(last, pieces),
            Place::Closed => {
                let start = self.held.trim_start_matches('\n');
                let skipped = self.held.len() - start.len();
                let is_empty = start.is_empty();
                self.held.drain(..skipped);
                if is_empty {
                    return false;
                }
                self.place = Place::After;
                true
            }
            Place::After => {
                if !self.held.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut self.held)));
                }
                false
            }
        }
    }

    fn start(&mut self, last: bool) -> bool {
        let start = self.held.trim_start();
        if start.starts_with(&self.open) {
            let skipped = self.held.len() - start.len() + self.open.len();
            self.held.drain(..skipped);
            (self.place, self.has_begun) = (Place::Opened, true);
            return true;
        }
        if !last && self.open.starts_with(start) {
            return false;
        }
        self.place = Place::After;
        true
    }

    fn inside(&mut self, last: bool, pieces: &mut Vec<Piece>) -> bool {
        let closed = self.held.find(&self.close);
        let certain = match closed {
            Some(at) => at,
            None if last => self.held.len(),
            None => self.held.len() - overlap(&self.held, &self.close),
        };
        // Line feeds wait for what follows them; those before the tag or the end are dropped.
        let thought = self.held.get(..certain).unwrap_or_default().trim_end_matches('\n').len();
        if thought > 0 {
            let text: String = self.held.drain(..thought).collect();
            pieces.push(Piece::Reasoning(text));
        }
        let Some(at) = closed else {
            if last {
                self.held.clear();
            }
            return false;
        };
        self.held.drain(..at - thought + self.close.len());
        self.place = Place::Closed;
        true
    }
}
