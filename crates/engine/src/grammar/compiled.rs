//! A compiled grammar, and its state within one sequence.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;
use toktrie::SimpleVob;

use hone_core::types::{GrammarSpec, TokenId};

use super::error::GrammarError;

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
    pub(super) fn new(spec: GrammarSpec, start: Matcher, not_first: Arc<[TokenId]>) -> Self {
        Self { spec, start: Mutex::new(start), not_first }
    }

    /// What was compiled.
    pub fn spec(&self) -> &GrammarSpec {
        &self.spec
    }

    /// The state of a new sequence. It is independent of all others.
    pub fn matcher(&self) -> GrammarMatcher {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarMatcher {
            matcher: start.deep_clone(),
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

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarMatcher").field("is_start", &self.is_start).finish_non_exhaustive()
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
mod tests {
    use super::*;

    #[test]
    fn masks_leave_the_logits_of_the_set_alone() {
        let mut allowed = AllowedTokens(SimpleVob::alloc(70));
        for id in [0, 31, 32, 63, 69, 70, 1000] {
            allowed.set(id, true);
        }
        assert_eq!(allowed.count(), 5);
        assert!(allowed.contains(69) && !allowed.contains(70) && !allowed.contains(1));
        for len in [1, 33, 70, 100] {
            let mut logits = vec![1.0; len];
            allowed.mask(&mut logits);
            let left: Vec<usize> = (0..len).filter(|id| logits[*id] == 1.0).collect();
            let wanted: Vec<usize> =
                [0, 31, 32, 63, 69].into_iter().filter(|id| *id < len).collect();
            assert_eq!(left, wanted);
        }
    }

    #[test]
    fn messages_of_the_library_become_one_line() {
        assert_eq!(failure("NoExtensionBias\n<non-verbose/>"), GrammarError::DeadEnd);
        let failed = failure("lexer too complex\n<non-verbose/>");
        assert_eq!(failed, GrammarError::Failed("lexer too complex".to_owned()));
    }
}
