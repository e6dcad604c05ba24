//! Text to token ids and back: tokenizer, chat template and stop tokens.

mod alphabet;
mod stream;

use std::borrow::Cow;
use std::collections::HashSet;

use tokenizers::Tokenizer;

use hone_core::types::{ChatOptions, Message, Role, TokenId};

use crate::error::EngineError;
use crate::model_dir::ModelDir;
use crate::template::{ChatTemplate, ThinkTags};
use crate::tools::ToolFormat;
use alphabet::Alphabet;

pub use stream::{TextPiece, TextStream};

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The ids, with the generation prompt.
    pub ids: Vec<TokenId>,
    /// Whether the generation prompt opens the reasoning, so that the answer begins inside it.
    pub opens_reasoning: bool,
}

/// Tokenizer, chat template and stop tokens of one model.
pub struct Codec {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stop_ids: Vec<TokenId>,
    /// How tokens spell bytes.
    alphabet: Alphabet,
    /// Special tokens, which add no text.
    special: HashSet<TokenId>,
    /// The text of all tokens, concatenated. The tokenizer needs two map look-ups and a copy.
    token_text: Vec<u8>,
    /// The text of token `id` is `token_text[bounds[id]..bounds[id + 1]]`.
    bounds: Vec<usize>,
}

impl Codec {
    /// Reads the tokenizer and the template of a model directory.
    ///
    /// # Errors
    /// [`EngineError::Component`] if one of them cannot be read, or [`EngineError::Model`] if the
    /// tokenizer is neither byte-level nor of SentencePiece's kind.
    pub fn load(dir: &ModelDir) -> Result<Self, EngineError> {
        let path = dir.tokenizer_file();
        let fail = |error| EngineError::component(path.display(), error);
        let mut tokenizer = Tokenizer::from_bytes(dir.tokenizer_json()?).map_err(fail)?;
        // Tokenizers that were saved after training may truncate or pad. A prompt must stay whole.
        tokenizer.with_truncation(None).map_err(fail)?;
        tokenizer.with_padding(None);
        let alphabet = Alphabet::of(tokenizer.get_decoder()).ok_or_else(|| {
            EngineError::Model(format!(
                "{}: the decoder's type must be \"ByteLevel\", or a \"Sequence\" of \"Replace\" (of \
                 \u{2581}), \"ByteFallback\", \"Fuse\" and perhaps \"Strip\"",
                path.display()
            ))
        })?;
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, t)| t.special).map(|(id, _)| id).collect();
        let mut codec = Self {
            tokenizer,
            template: ChatTemplate::new(&dir.chat_template, &dir.special_tokens)?,
            stop_ids: dir.stop_ids.clone(),
            alphabet,
            special,
            token_text: Vec::new(),
            bounds: Vec::new(),
        };
        let (mut text, mut bounds) = (Vec::new(), vec![0]);
        for id in 0..codec.vocab() {
            text.extend_from_slice(&codec.text_bytes(id as TokenId));
            bounds.push(text.len());
        }
        (codec.token_text, codec.bounds) = (text, bounds);
        Ok(codec)
    }

    /// The ids of a conversation, with the generation prompt. No special token is added beyond
    /// those of the template.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the template refuses the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<TokenId>, EngineError> {
        self.encode(&self.template.render(messages)?)
    }

    /// [`Self::prompt`] with functions and variables of the template. `format` is how the model writes
    /// calls, see [`ChatTemplate::render_with`].
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the template refuses the conversation.
    pub fn chat_prompt(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        format: ToolFormat,
    ) -> Result<ChatPrompt, EngineError> {
        let text = self.template.render_with(messages, options, format)?;
        let opens = |tags: ThinkTags| text.trim_end().ends_with(tags.open);
        let opens_reasoning = self.think_tags().is_some_and(opens);
        Ok(ChatPrompt { ids: self.encode(&text)?, opens_reasoning })
    }

    /// The ids of a text. Special tokens in it are recognized; none are added.
    ///
    /// # Errors
    /// [`EngineError::Component`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        encoding
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| EngineError::component("tokenizer", error))
    }

    /// The ids of a text as a whole answer: its tokens, then [`Self::turn_end`]. `None` if the text
    /// contains a special token, which no answer contains before its end.
    ///
    /// # Errors
    /// [`EngineError::Component`] if the tokenizer fails.
    pub fn answer(&self, text: &str) -> Result<Option<Vec<TokenId>>, EngineError> {
        let mut ids = self.encode(text)?;
        if ids.iter().any(|id| self.special.contains(id) || self.stop_ids.contains(id)) {
            return Ok(None);
        }
        ids.extend(self.turn_end());
        Ok(Some(ids))
    }

    /// The token that ends an answer: the stop token that the template writes after one, or the first
    /// stop token if it writes none.
    pub fn turn_end(&self) -> Option<TokenId> {
        let message = |role, content: &str| Message::new(role, content);
        let question = message(Role::User, "a");
        let asked = self.template.render(std::slice::from_ref(&question)).ok();
        let answered = self.template.render(&[question, message(Role::Assistant, "b")]).ok();
        let rest = asked.zip(answered).and_then(|(asked, answered)| {
            let (_, rest) = answered.strip_prefix(&asked)?.split_once('b')?;
            self.encode(rest).ok()
        });
        let written = rest.into_iter().flatten().find(|id| self.stop_ids.contains(id));
        written.or_else(|| self.stop_ids.first().copied())
    }

    /// The text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`EngineError::Component`] if the tokenizer fails.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, EngineError> {
        if self.alphabet == Alphabet::Bytes {
            let text = self.tokenizer.decode(ids, true);
            return text.map_err(|error| EngineError::component("tokenizer", error));
        }
        // The library replaces every byte of an invalid sequence, not the sequence as a whole.
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.text_bytes(*id).into_owned()).collect();
        let text = String::from_utf8_lossy(&bytes);
        Ok(self.alphabet.without_prefix(&text).to_owned())
    }

    /// The bytes of one token, for the `bytes` of OpenAI's logprobs. Empty for ids that the
    /// tokenizer does not know (padding rows of the embedding).
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.tokenizer.id_to_token(id).map_or_else(Vec::new, |token| self.alphabet.bytes(token))
    }

    /// The bytes that a token adds to the text; none for a special token.
    fn text_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        let at = id as usize;
        match self.bounds.get(at..at + 2) {
            Some(&[start, end]) => Cow::Borrowed(&self.token_text[start..end]),
            _ if self.special.contains(&id) => Cow::Borrowed(&[]),
            _ => Cow::Owned(self.token_bytes(id)),
        }
    }

    /// The special token with this text, if there is one. It adds no text to an answer.
    pub fn special_id(&self, text: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(text).filter(|id| self.special.contains(id))
    }

    /// The format of calls that the chat template shows.
    pub fn tool_format(&self) -> ToolFormat {
        self.template.tool_format()
    }

    /// The texts around reasoning, if the chat template mentions them.
    pub fn think_tags(&self) -> Option<ThinkTags> {
        self.template.think_tags()
    }

    /// Tokens that end a completion.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    /// First 16 hexadecimal digits of the SHA-256 of the chat template.
    pub fn template_hash(&self) -> &str {
        self.template.hash()
    }

    /// Number of ids that the tokenizer knows, from 0.
    pub fn vocab(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }
}

#[cfg(test)]
mod tests;
