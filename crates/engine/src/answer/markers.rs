//! Puts special tokens back into the text from which the codec removed them.

use std::collections::VecDeque;
use std::sync::Arc;

use hone_core::types::TokenId;

use crate::codec::{Codec, TextStream};

/// The first of 32 code points that Unicode reserves for use within a program.
const FIRST: u32 = 0xfdd0;
const COUNT: u32 = 32;

/// Whether a character stands for a special token.
pub(super) fn is_marker(c: char) -> bool {
    (FIRST..FIRST + COUNT).contains(&u32::from(c))
}

/// The texts of a format that are special tokens of the model, each with a character that stands for it.
pub(super) struct Markers(Vec<(&'static str, TokenId, char)>);

impl Markers {
    /// Those of `texts` that are special tokens.
    pub(super) fn new(codec: &Codec, texts: Vec<&'static str>) -> Self {
        let tokens = texts.into_iter().filter_map(|text| Some((text, codec.special_id(text)?)));
        let characters = (FIRST..FIRST + COUNT).filter_map(char::from_u32);
        Self(tokens.zip(characters).map(|((text, id), c)| (text, id, c)).collect())
    }

    /// What stands for `text` in the answer: a character, or the text itself.
    pub(super) fn text(&self, text: &'static str) -> String {
        let own = self.0.iter().find(|(known, ..)| *known == text);
        own.map_or_else(|| text.to_owned(), |(_, _, c)| c.to_string())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Inserts the markers of one answer.
///
/// Text arrives late: it waits for the rest of a character, and for text that decides whether a stop
/// string begins. So the marker of a token is inserted at the place of the token in the decoded text,
/// when all text before it has arrived.
pub(super) struct MarkerText {
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
    pub(super) fn new(codec: &Arc<Codec>, markers: Markers) -> Self {
        Self {
            codec: Arc::clone(codec),
            markers,
            decoded: TextStream::new(Arc::clone(codec), &[]),
            decoded_bytes: 0,
            arrived_bytes: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Adds a token and the text that arrived with it.
    pub(super) fn push(&mut self, id: TokenId, text: &str) -> String {
        // A stop token ends the answer and adds no text, even if it is an ordinary token.
        if !self.codec.stop_ids().contains(&id) {
            self.decoded_bytes += self.decoded.push(id).text.len();
            if let Some((_, _, c)) = self.markers.0.iter().find(|(_, own, _)| *own == id) {
                self.waiting.push_back((self.decoded_bytes, *c));
            }
        }
        self.insert(text)
    }

    /// The end of the text, with the markers before it. Markers after a stop string are lost, as the
    /// text there is.
    pub(super) fn finish(&mut self, rest: &str) -> String {
        self.insert(rest)
    }

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
