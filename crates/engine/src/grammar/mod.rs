//! Constrained completions: which token may come next so that the text follows a grammar.
//!
//! A [`GrammarSpec`] is compiled once per request by
//! [`Codec::compile_grammar`](crate::Codec::compile_grammar), on a thread `hone-grammar` of its own, and
//! the last grammars are kept. Each sequence has a [`GrammarMatcher`], which the token sampler asks for the
//! permitted tokens and gives every drawn token. The grammars are those of llguidance.
//!
//! # Guarantees
//!
//! - A completion that ended with a stop token follows its grammar, character for character.
//! - Every keyword of a JSON schema is enforced, is an annotation, or is refused with its place.
//! - A stop token is permitted only where the text may end.
//! - The permitted tokens depend only on the grammar, the vocabulary and the tokens before.
//! - Text that the grammar forces has the tokens that a byte-level tokenizer makes of it.

mod calls;
mod lark;
mod queue;
mod schema;

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use parking_lot::Mutex;
use tokenizers::Tokenizer;
use toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use hone_core::types::{GrammarSpec, TokenId};

pub use calls::{CallGrammar, CallPiece, Thought};
pub(crate) use queue::GrammarQueue;

// Why a grammar is refused, and why a sequence cannot follow one.

/// An error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A JSON schema cannot be enforced exactly. `path` is the JSON pointer of the place.
    #[error("{path}: {reason}")]
    Schema {
        /// The place in the schema, as `#` and a JSON pointer.
        path: String,
        /// The keyword, its value and what is supported.
        reason: String,
    },
    /// Another grammar is malformed, too large, or matches no text.
    #[error("{0}")]
    Refused(String),
    /// Too many grammars wait for their compilation.
    #[error("{waiting} grammars are already waiting for their compilation")]
    Busy {
        /// Grammars that are compiled at once.
        places: usize,
        /// Grammars that wait.
        waiting: usize,
    },
    /// No token continues the text. The grammar never ends it, or the tokenizer cannot spell the rest.
    #[error("the grammar permits no further token")]
    DeadEnd,
    /// The computation failed or exceeded its limits.
    #[error("the grammar cannot be followed: {0}")]
    Failed(String),
}

impl GrammarError {
    /// An [`Self::Schema`] error.
    fn schema(path: &str, reason: impl Into<String>) -> Self {
        Self::Schema { path: path.to_owned(), reason: reason.into() }
    }

    /// Whether a client caused it with its grammar before anything was sampled.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Schema { .. } | Self::Refused(_))
    }
}

// The tokens of a model as the grammar library sees them.

/// The tokens of a model.
pub(crate) struct GrammarVocabulary {
    environment: TokEnv,
    /// Tokens that cannot begin a text, because decoding would remove a part of them.
    not_first: Vec<TokenId>,
}

impl GrammarVocabulary {
    /// `words` are the bytes that each token adds to a text, by id, or for one that adds none its name after
    /// [`TokTrie::SPECIAL_TOKEN_MARKER`]. `tokenizer` is set if it spells any part of a text as it would spell it
    /// within a longer one. The prefix tree of the tokens and its slices take some hundred milliseconds for a large
    /// vocabulary.
    pub fn new(
        words: &[Vec<u8>],
        stop_ids: &[TokenId],
        not_first: Vec<TokenId>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Self, GrammarError> {
        let refused = |reason: &str| GrammarError::Refused(reason.to_owned());
        let first = stop_ids.first().ok_or_else(|| refused("the model has no stop token"))?;
        let size = u32::try_from(words.len());
        let size = size.map_err(|_| refused("the vocabulary is too large"))?;
        let trie = TokTrie::from(&TokRxInfo::new(size, *first), words).with_eos_tokens(stop_ids);
        Ok(Self { environment: Arc::new(VocabularyEnv { trie, tokenizer }), not_first })
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

// A compiled grammar, and its state within one sequence.

/// Tokens in one word of a set.
const WORD: usize = 32;

/// A grammar that sequences can follow. Several requests may share it.
pub struct CompiledGrammar {
    spec: GrammarSpec,
    /// The state at the beginning of a text.
    start: Mutex<Matcher>,
    /// Tokens that cannot begin a text.
    not_first: Arc<[TokenId]>,
}

impl CompiledGrammar {
    /// What was compiled.
    pub fn spec(&self) -> &GrammarSpec {
        &self.spec
    }

    /// The state of a new sequence. It is independent of all others.
    pub fn matcher(&self) -> GrammarMatcher {
        GrammarMatcher {
            matcher: self.start.lock().deep_clone(),
            not_first: Arc::clone(&self.not_first),
            is_start: true,
        }
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompiledGrammar").field(&self.spec).finish()
    }
}

/// How far one sequence has followed a grammar.
pub struct GrammarMatcher {
    matcher: Matcher,
    not_first: Arc<[TokenId]>,
    is_start: bool,
}

impl GrammarMatcher {
    /// The tokens that may come next. Stop tokens are among them where the text may end, and alone where
    /// it must.
    ///
    /// # Errors
    /// [`GrammarError::DeadEnd`] if no token may, or [`GrammarError::Failed`] if the computation exceeds
    /// its limits.
    pub fn allowed(&mut self) -> Result<AllowedTokens, GrammarError> {
        let mask = self.matcher.compute_mask_or_eos();
        let mut allowed = AllowedTokens(mask.map_err(|error| failure(&error.to_string()))?);
        if self.is_start {
            self.not_first.iter().for_each(|id| allowed.set(*id, false));
        }
        if allowed.count() == 0 { Err(GrammarError::DeadEnd) } else { Ok(allowed) }
    }

    /// Adds a token to the sequence, which must be one of [`Self::allowed`].
    ///
    /// # Errors
    /// [`GrammarError::Failed`] if it is not, or if the computation exceeds its limits.
    pub fn push(&mut self, id: TokenId) -> Result<(), GrammarError> {
        self.is_start = false;
        self.matcher.consume_token(id).map_err(|error| failure(&error.to_string()))
    }
}

/// The library's error message. It adds a state after the first line, or the trace of a caught panic.
fn failure(message: &str) -> GrammarError {
    let line = message.lines().next().unwrap_or_default();
    if line.starts_with("NoExtension") {
        return GrammarError::DeadEnd;
    }
    GrammarError::Failed(line.to_owned())
}

/// A set of tokens.
#[derive(Clone, Debug)]
pub struct AllowedTokens(SimpleVob);

impl AllowedTokens {
    /// All of `vocab` tokens.
    pub fn all(vocab: usize) -> Self {
        Self(SimpleVob::alloc_ones(vocab))
    }

    /// Whether a token is in the set. Ids outside the vocabulary are not.
    pub fn contains(&self, id: TokenId) -> bool {
        (id as usize) < self.0.len() && self.0.get(id as usize)
    }

    /// Adds or removes a token. Ids outside the vocabulary are ignored.
    pub fn set(&mut self, id: TokenId, allowed: bool) {
        if (id as usize) < self.0.len() {
            self.0.set(id as usize, allowed);
        }
    }

    /// The number of tokens.
    pub fn count(&self) -> usize {
        self.0.num_set()
    }

    /// Sets the logits of all other tokens to minus infinity.
    pub fn mask(&self, logits: &mut [f32]) {
        let words = self.0.as_slice().iter().chain(std::iter::repeat(&0));
        for (logits, word) in logits.chunks_mut(WORD).zip(words) {
            if *word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if (*word >> bit) & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
