//! Splits an answer at think tags.

use crate::codec::overlap;

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
    /// Whether the answer has reasoning, so far as is known.
    pub(super) has_begun: bool,
    /// Text that is not certain yet.
    held: String,
}

impl ReasoningSplitter {
    /// A splitter for these tags. `inside`: the prompt has opened the reasoning.
    pub(super) fn new(open: String, close: String, inside: bool) -> Self {
        let place = if inside { Place::Opened } else { Place::Start };
        Self { open, close, place, has_begun: inside, held: String::new() }
    }

    /// Whether the reasoning has ended, or the answer has none.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.place, Place::Closed | Place::After)
    }

    /// Adds text and returns the reasoning, and the text after it, that are certain now. `last` ends the answer.
    pub(super) fn push(&mut self, text: &str, last: bool) -> (String, String) {
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
