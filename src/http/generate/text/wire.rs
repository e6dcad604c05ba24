//! The shapes of OpenAI's older completions.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::TokenId;
use hone_engine::{Codec, Token};

use crate::http::generate::types::{Usage, shown_logprob};

/// The response, and each event of a stream.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct TextCompletion<'a> {
    pub(super) id: &'a str,
    #[schemars(extend("const" = "text_completion"))]
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: String,
    pub(super) choices: Vec<TextChoice>,
    /// Absent in a stream unless requested; then null in every event except the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

/// A choice, or its new part.
#[derive(Serialize, JsonSchema)]
pub(super) struct TextChoice {
    pub(super) index: u32,
    pub(super) text: String,
    pub(super) logprobs: Option<TextLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", null]))]
    pub(super) finish_reason: Option<&'static str>,
    /// Only if the request has several prompts: the id of this prompt's completion, for feedback.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_id: Option<String>,
}

/// Natural-log probabilities of the sampled tokens. The stop token is left out, as in the text.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The most probable tokens, and the sampled one.
    top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Where each token begins in the choice's text, in characters.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// `offset` is the place of the first token in the choice's text; the place after the last token
    /// replaces it.
    pub(super) fn new(codec: &Codec, tokens: &[Token], offset: &mut usize) -> Self {
        let mut all = Self::default();
        for token in tokens {
            let text = shown(codec, token.id);
            let mut top: BTreeMap<String, f32> = token
                .top
                .iter()
                .map(|(id, logprob)| (shown(codec, *id), shown_logprob(*logprob)))
                .collect();
            top.insert(text.clone(), shown_logprob(token.logprob));
            all.tokens.push(text);
            all.token_logprobs.push(shown_logprob(token.logprob));
            all.top_logprobs.push(top);
            all.text_offset.push(*offset);
            let begins = |byte: &&u8| (**byte & 0xC0) != 0x80;
            *offset += codec.token_bytes(token.id).iter().filter(begins).count();
        }
        all
    }
}

/// A token's text, or its bytes as OpenAI writes them if they are no whole characters.
fn shown(codec: &Codec, id: TokenId) -> String {
    String::from_utf8(codec.token_bytes(id)).unwrap_or_else(|error| {
        let mut text = "bytes:".to_owned();
        for byte in error.as_bytes() {
            // Writing to a string cannot fail.
            let _written = write!(text, "\\x{byte:02x}");
        }
        text
    })
}
