//! Text to ids and back: tokenizer, chat template, stop tokens.

mod stream;

use std::borrow::Cow;
use std::collections::HashSet;

use tokenizers::{DecoderWrapper, Tokenizer};

use hone_core::types::{Message, TokenId};

use super::template::ChatTemplate;
use super::{EngineError, ModelDir};

pub use stream::{Piece, TextStream};

/// Tokenizer, chat template and stop tokens of one model. Needs no engine.
pub struct Codec {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stop_ids: Vec<TokenId>,
    /// The byte behind each character of a byte-level token, by code point.
    byte_of_char: Vec<Option<u8>>,
    /// Special tokens, which leave no text.
    special: HashSet<TokenId>,
    /// What the tokens add to the text, one behind the other, and where each ends: the tokenizer looks
    /// a token up by two maps and copies it.
    texts: (Vec<u8>, Vec<usize>),
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Codec").field("stop_ids", &self.stop_ids).finish_non_exhaustive()
    }
}

impl Codec {
    /// Reads them from a model directory.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the tokenizer or the template cannot be read, or if the tokenizer
    /// is not byte-level.
    pub fn load(dir: &ModelDir) -> Result<Self, EngineError> {
        let path = dir.path.join("tokenizer.json");
        let fail = |reason: String| EngineError::Model(format!("{}: {reason}", path.display()));
        let mut tokenizer = Tokenizer::from_file(&path).map_err(|e| fail(e.to_string()))?;
        // Files written after training a model may cut or pad; a prompt must be whole.
        tokenizer.with_truncation(None).map_err(|e| fail(e.to_string()))?;
        tokenizer.with_padding(None);
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(fail("the decoder's type must be \"ByteLevel\"".to_owned()));
        }
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, t)| t.special).map(|(id, _)| id).collect();
        let mut codec = Self {
            tokenizer,
            template: ChatTemplate::new(&dir.chat_template, &dir.special_tokens)?,
            stop_ids: dir.stop_ids.clone(),
            byte_of_char: byte_of_char(),
            special,
            texts: (Vec::new(), Vec::new()),
        };
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(codec.vocab()));
        for id in 0..codec.vocab() {
            bytes.extend_from_slice(&codec.text_bytes(id as TokenId));
            ends.push(bytes.len());
        }
        codec.texts = (bytes, ends);
        Ok(codec)
    }

    /// The conversation as the model sees it, ready for its answer: no special token is added
    /// beyond those in the template.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the template refuses the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<TokenId>, EngineError> {
        self.encode(&self.template.render(messages)?)
    }

    /// Ids of a text, special tokens in it recognised, none added.
    ///
    /// # Errors
    /// [`EngineError::Internal`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        encoding
            .map(|e| e.get_ids().to_vec())
            .map_err(|e| EngineError::Internal(format!("tokenizer: {e}")))
    }

    /// Text of ids, special tokens left out; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`EngineError::Internal`] if the tokenizer fails.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, EngineError> {
        self.tokenizer
            .decode(ids, true)
            .map_err(|e| EngineError::Internal(format!("tokenizer: {e}")))
    }

    /// The bytes one token stands for, for the `bytes` of OpenAI's logprobs. Empty for ids that
    /// the tokenizer does not know (padding rows of the embedding).
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        let Some(token) = self.tokenizer.id_to_token(id) else { return Vec::new() };
        let byte = |c: char| self.byte_of_char.get(c as usize).copied().flatten();
        // An added token may hold characters that stand for no byte; then it stands for itself.
        token.chars().map(byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into_bytes())
    }

    /// What a token adds to the text: nothing if it is special.
    fn text_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        let (bytes, ends) = &self.texts;
        let at = id as usize;
        if let Some(end) = ends.get(at) {
            let start = at.checked_sub(1).and_then(|before| ends.get(before)).copied();
            return Cow::Borrowed(bytes.get(start.unwrap_or(0)..*end).unwrap_or_default());
        }
        Cow::Owned(if self.special.contains(&id) { Vec::new() } else { self.token_bytes(id) })
    }

    /// Tokens that end a completion.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    /// First 16 hex digits of the SHA-256 of the chat template.
    pub fn template_hash(&self) -> &str {
        self.template.hash()
    }

    /// Ids that the tokenizer knows, from 0.
    pub fn vocab(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }
}

/// GPT-2's alphabet: printable Latin-1 characters stand for their own byte, the other bytes for
/// the characters from U+0100 on, in order.
fn byte_of_char() -> Vec<Option<u8>> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut table = vec![None; 512];
    let mut next = 256;
    for byte in 0..=u8::MAX {
        let at = if printable(byte) {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        if let Some(slot) = table.get_mut(at) {
            *slot = Some(byte);
        }
    }
    table
}

#[cfg(test)]
mod tests;
