//! Decodes a completion token by token.

use std::sync::Arc;

use hone_core::types::TokenId;

use super::Codec;

/// Text that a token completed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// Whole UTF-8 characters; often empty.
    pub text: String,
    /// Whether a stop string was reached. `text` ends before it, or with it if the stream includes it, and
    /// all later pieces are empty.
    pub stopped: bool,
}

/// Decodes one completion token by token. Holds back incomplete UTF-8 and possible stop strings.
///
/// Invariant: all pieces concatenated, that of [`Self::finish`] included, equal [`Codec::decode`] of
/// all ids, cut before the first stop string.
pub struct TextStream {
    codec: Arc<Codec>,
    stop: Vec<String>,
    /// Whether the text contains the stop string that ended it.
    includes_stop: bool,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
    /// Text that may begin a stop string.
    held: String,
    stopped: bool,
    /// Whether no character has been decoded yet.
    is_start: bool,
}

impl TextStream {
    /// A stream that ends before the first of `stop`. Empty stop strings are ignored.
    pub fn new(codec: Arc<Codec>, stop: &[String]) -> Self {
        let stop = stop.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            codec,
            stop,
            includes_stop: false,
            bytes: Vec::new(),
            held: String::new(),
            stopped: false,
            is_start: true,
        }
    }

    /// The stream with the stop string in the text, or without.
    pub fn including_stop(self, includes_stop: bool) -> Self {
        Self { includes_stop, ..self }
    }

    /// Adds a token and returns the text that is certain now.
    pub fn push(&mut self, id: TokenId) -> TextPiece {
        if !self.stopped {
            self.bytes.extend_from_slice(&self.codec.text_bytes(id));
            self.decode();
        }
        self.release(false)
    }

    /// Ends the stream and returns the text that was held back.
    pub fn finish(&mut self) -> TextPiece {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        self.release(true)
    }

    /// Moves whole characters from `bytes` to `held`. Invalid sequences become U+FFFD, split as by
    /// `String::from_utf8_lossy`.
    fn decode(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            let (mut valid, invalid) = (chunk.valid(), chunk.invalid());
            if self.is_start && !valid.is_empty() {
                valid = self.codec.alphabet.without_prefix(valid);
            }
            self.is_start &= chunk.valid().is_empty() && invalid.is_empty();
            self.held.push_str(valid);
            let incomplete = chunks.peek().is_none()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if incomplete {
                self.bytes = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.held.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Returns the held text before the first stop string, or all of it except a possible beginning
    /// of one.
    fn release(&mut self, last: bool) -> TextPiece {
        if self.stopped {
            return TextPiece { text: String::new(), stopped: true };
        }
        let found = |stop: &String| Some((self.held.find(stop)?, stop.len()));
        if let Some((at, len)) = self.stop.iter().filter_map(found).min() {
            self.stopped = true;
            self.bytes.clear();
            self.held.truncate(if self.includes_stop { at + len } else { at });
            return TextPiece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = if last { 0 } else { longest_overlap(&self.held, &self.stop) };
        let held = self.held.split_off(self.held.len() - keep);
        TextPiece { text: std::mem::replace(&mut self.held, held), stopped: false }
    }
}

// Searches text that arrives in pieces.

/// The first of `tags` in `text`, with its place in bytes; of two at one place the longer one.
pub(crate) fn earliest<'t>(text: &str, tags: &'t [String]) -> Option<(usize, &'t str)> {
    let found = tags.iter().filter_map(|tag| Some((text.find(tag.as_str())?, tag.as_str())));
    found.min_by_key(|(at, tag)| (*at, std::cmp::Reverse(tag.len())))
}

/// Length in bytes of the longest end of `text` that is a proper beginning of one of `tags`.
pub(crate) fn longest_overlap(text: &str, tags: &[String]) -> usize {
    tags.iter().map(|tag| overlap(text, tag)).max().unwrap_or(0)
}

/// Length in bytes of the longest end of `text` that is a proper beginning of `tag`.
pub(crate) fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len().saturating_sub(1));
    let fits = |n: &usize| {
        let end = text.len() - n;
        text.is_char_boundary(end) && tag.is_char_boundary(*n) && tag.get(..*n) == text.get(end..)
    };
    (1..=longest).rev().find(fits).unwrap_or(0)
}
