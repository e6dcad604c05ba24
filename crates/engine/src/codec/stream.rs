//! Decodes a completion token by token.

use std::sync::Arc;

use hone_core::types::TokenId;

use super::Codec;

/// Text that a token completed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Whole UTF-8; often empty.
    pub text: String,
    /// Whether a stop string was reached: the text ends before it, and the stream with it.
    pub stopped: bool,
}

/// Decodes one completion token by token, holding back unfinished UTF-8 and possible stop strings.
///
/// Invariant: the pieces joined, [`Self::finish`] included, are what [`Codec::decode`] makes of
/// all ids at once, cut before the first stop string.
pub struct TextStream {
    codec: Arc<Codec>,
    stop: Vec<String>,
    /// Bytes of a character that is not whole yet.
    bytes: Vec<u8>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before the first of `stop`; empty stop strings are ignored.
    pub fn new(codec: Arc<Codec>, stop: &[String]) -> Self {
        let stop = stop.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { codec, stop, bytes: Vec::new(), held: String::new(), stopped: false }
    }

    /// Adds a token and returns the text that is certain now. After a stop there is none.
    pub fn push(&mut self, id: TokenId) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        self.bytes.extend_from_slice(&self.codec.text_bytes(id));
        self.decode();
        self.release(false)
    }

    /// The end: returns what was held back.
    pub fn finish(&mut self) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        if !self.bytes.is_empty() {
            self.bytes.clear();
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        self.release(true)
    }

    /// Moves whole characters from `bytes` to `held`. What can never become a character becomes
    /// U+FFFD, split as `String::from_utf8_lossy` splits it.
    fn decode(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.held.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let unfinished = chunks.peek().is_none()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if unfinished {
                self.bytes = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.held.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Cuts at a stop string, or returns all but what may be the beginning of one.
    fn release(&mut self, last: bool) -> Piece {
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.stopped = true;
            self.held.truncate(at);
            return Piece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = if last { 0 } else { self.possible_stop() };
        let held = self.held.split_off(self.held.len() - keep);
        Piece { text: std::mem::replace(&mut self.held, held), stopped: false }
    }

    /// Length in bytes of the longest end of `held` that begins a stop string.
    fn possible_stop(&self) -> usize {
        let begins = |stop: &String| {
            let longest = self.held.len().min(stop.len() - 1);
            (1..=longest).rev().find(|n| {
                let end = self.held.as_bytes().get(self.held.len() - n..);
                end == stop.as_bytes().get(..*n) && stop.is_char_boundary(*n)
            })
        };
        self.stop.iter().filter_map(begins).max().unwrap_or(0)
    }
}
