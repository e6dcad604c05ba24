//! The shapes of OpenAI's older completions.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::TokenId;
use hone_engine::{Codec, Token};

use crate::http::generate::{Usage, shown_logprob};

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
    /// vLLM's form of the prompt's log-probabilities, by token id; only if the request wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Vec<Option<BTreeMap<TokenId, PromptLogprob>>>>,
    #[schemars(extend("enum" = ["stop", "length", null]))]
    pub(super) finish_reason: Option<&'static str>,
    /// Only if the request has several prompts: the id of this prompt's completion, for feedback.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_id: Option<String>,
}

/// A token at a place of a prompt.
#[derive(Serialize, JsonSchema)]
pub(super) struct PromptLogprob {
    logprob: f32,
    /// 1 for the most probable token; null if it is not among the alternatives.
    rank: Option<usize>,
    decoded_token: String,
}

/// The tokens of a prompt, after the first, which has no log-probability, with `most` alternatives each.
pub(super) fn prompt_logprobs(
    codec: &Codec,
    scored: &[Token],
    most: usize,
) -> Vec<Option<BTreeMap<TokenId, PromptLogprob>>> {
    let own = |token: &Token| {
        let entry = |id: TokenId, logprob: f32, rank: Option<usize>| {
            let logprob = shown_logprob(logprob);
            (id, PromptLogprob { logprob, rank, decoded_token: shown(codec, id) })
        };
        let ranked = token.top.iter().take(most).zip(1..);
        let rank = token.top.iter().position(|(id, _)| *id == token.id).map(|place| place + 1);
        let mut entries: BTreeMap<_, _> =
            ranked.map(|((id, logprob), rank)| entry(*id, *logprob, Some(rank))).collect();
        entries.extend([entry(token.id, token.logprob, rank)]);
        entries
    };
    [None].into_iter().chain(scored.iter().map(|token| Some(own(token)))).collect()
}

/// Natural-log probabilities of the tokens of a choice: those of its prompt, if it is echoed, and the sampled ones.
/// The stop token is left out, as in the text, unless the prompt is echoed, because clients that echo a prompt drop
/// the last token.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens, and the sampled one.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins in the choice's text, in characters.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// The first token of a prompt alone. `offset` is its place in the choice's text; the place after it replaces
    /// that.
    pub(super) fn first(codec: &Codec, id: TokenId, offset: &mut usize) -> Self {
        let mut all = Self::default();
        all.place(codec, id, offset);
        all.token_logprobs.push(None);
        all.top_logprobs.push(None);
        all
    }

    /// Adds a token's text, which it returns, and its place.
    fn place(&mut self, codec: &Codec, id: TokenId, offset: &mut usize) -> String {
        let text = shown(codec, id);
        self.tokens.push(text.clone());
        self.text_offset.push(*offset);
        let begins = |byte: &&u8| (**byte & 0xC0) != 0x80;
        *offset += codec.token_bytes(id).iter().filter(begins).count();
        text
    }

    /// Adds tokens with at most `most` alternatives each, as [`Self::first`].
    pub(super) fn with(
        mut self,
        codec: &Codec,
        tokens: &[Token],
        most: usize,
        offset: &mut usize,
    ) -> Self {
        for token in tokens {
            let text = self.place(codec, token.id, offset);
            let mut top: BTreeMap<String, f32> = token
                .top
                .iter()
                .take(most)
                .map(|(id, logprob)| (shown(codec, *id), shown_logprob(*logprob)))
                .collect();
            top.insert(text, shown_logprob(token.logprob));
            self.token_logprobs.push(Some(shown_logprob(token.logprob)));
            self.top_logprobs.push(Some(top));
        }
        self
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
