//! Text to ids and back: tokenizer, chat template, stop tokens.
// STUB: signatures only; the engine's author replaces every body.

use super::EngineError;
use super::ModelDir;
use crate::types::{Message, TokenId};

/// Tokenizer, chat template and stop tokens of one model.
pub struct Codec {}

#[expect(unused_variables, reason = "stub")]
impl Codec {
    /// Reads them from a model directory.
    pub fn load(dir: &ModelDir) -> Result<Self, EngineError> {
        Ok(Self {})
    }
    /// The conversation as the model sees it, ready for its answer: no special token is added
    /// beyond those in the template.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<TokenId>, EngineError> {
        Ok(Vec::new())
    }
    /// Ids of a text, special tokens in it recognised, none added.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        Ok(Vec::new())
    }
    /// Text of ids, special tokens left out.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, EngineError> {
        Ok(String::new())
    }
    /// The bytes one token stands for, for the `bytes` of OpenAI's logprobs.
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        Vec::new()
    }
    /// Tokens that end a completion.
    pub fn stop_ids(&self) -> &[TokenId] {
        &[]
    }
    /// First 16 hex digits of the SHA-256 of the chat template.
    pub fn template_hash(&self) -> &str {
        ""
    }
}

/// Decodes one completion token by token, holding back unfinished UTF-8 and possible stop strings.
pub struct TextStream {}
