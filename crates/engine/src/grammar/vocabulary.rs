//! The tokens of a model as the grammar library sees them.

use std::sync::Arc;

use tokenizers::Tokenizer;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use hone_core::types::TokenId;

use super::error::GrammarError;

/// The tokens of a model.
pub(crate) struct GrammarVocabulary {
    /// The bytes that each token adds to a text, by id; none for a padding row.
    pub words: Vec<Vec<u8>>,
    /// Tokens that add no text, each with its name.
    pub special: Vec<(TokenId, String)>,
    /// Tokens that end a text.
    pub stop_ids: Vec<TokenId>,
    /// Tokens that cannot begin a text, because decoding would remove a part of them.
    pub not_first: Vec<TokenId>,
    /// The tokenizer, if it spells any part of a text as it would spell it within a longer one.
    pub tokenizer: Option<Arc<Tokenizer>>,
}

impl GrammarVocabulary {
    /// The prefix tree of the tokens. It and its slices take some hundred milliseconds for a large
    /// vocabulary.
    ///
    /// # Errors
    /// [`GrammarError::Refused`] for a model without stop token.
    pub(super) fn environment(self) -> Result<TokEnv, GrammarError> {
        let Self { mut words, special, stop_ids, tokenizer, not_first: _ } = self;
        let Some(first) = stop_ids.first().copied() else {
            return Err(GrammarError::Refused("the model has no stop token".to_owned()));
        };
        let names = special.iter().map(|(id, _)| *id);
        let longest = names.chain(stop_ids.iter().copied()).max().unwrap_or_default() as usize;
        if longest >= words.len() {
            words.resize(longest + 1, Vec::new());
        }
        for (id, name) in special {
            if let Some(word) = words.get_mut(id as usize) {
                // No text contains this byte.
                *word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                word.extend_from_slice(name.as_bytes());
            }
        }
        let size = u32::try_from(words.len())
            .map_err(|_| GrammarError::Refused("the vocabulary is too large".to_owned()))?;
        let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&stop_ids);
        Ok(Arc::new(VocabularyEnv { trie, tokenizer }))
    }
}

/// The prefix tree, with the tokenizer that spells forced text.
struct VocabularyEnv {
    trie: TokTrie,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl VocabularyEnv {
    /// The ids of a text; `None` if they do not spell exactly this text, for example because it contains
    /// the name of a special token.
    fn encode(&self, text: &str) -> Option<Vec<TokenId>> {
        let encoding = self.tokenizer.as_ref()?.encode_fast(text, false).ok()?;
        let ids = encoding.get_ids();
        (self.trie.decode_raw(ids) == text.as_bytes()).then(|| ids.to_vec())
    }
}

impl TokenizerEnv for VocabularyEnv {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.encode(text).unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }

    /// Whether text that the grammar forces is spelled as the tokenizer spells it.
    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.is_some()
    }
}
