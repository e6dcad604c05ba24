//! Compiles grammars for one vocabulary.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory};

use hone_core::types::{GrammarSpec, TokenId};

use super::compiled::CompiledGrammar;
use super::error::GrammarError;
use super::program::program;
use super::vocabulary::GrammarVocabulary;

/// Compiled grammars that are kept for later requests.
const KEPT: usize = 32;
/// Longest error message of the library that is reported, in characters.
const MAX_MESSAGE: usize = 400;

/// The bounds of one grammar and of one of its masks. They count work, not time, so that a request has the
/// same result on every machine. The comments have the library's estimates for one core.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        // About 20 ms.
        initial_lexer_fuel: 1_000_000,
        // About 15 ms.
        step_lexer_fuel: 200_000,
        // About 3 ms.
        step_max_items: 50_000,
        // Of 1 to 2 kB each.
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        // The state of a parser contains text of the client.
        verbose_errors: false,
    }
}

/// Compiles grammars and keeps the last ones.
pub(super) struct GrammarCompiler {
    factory: ParserFactory,
    not_first: Arc<[TokenId]>,
    /// The grammars used last, newest first.
    kept: Mutex<VecDeque<Arc<CompiledGrammar>>>,
}

impl GrammarCompiler {
    /// Reads a vocabulary.
    ///
    /// # Errors
    /// [`GrammarError::Refused`] for a model whose output cannot be constrained.
    pub fn new(vocabulary: GrammarVocabulary) -> Result<Self, GrammarError> {
        let not_first = vocabulary.not_first.clone().into();
        let environment = vocabulary.environment()?;
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| GrammarError::Failed(shortened(&error.to_string())))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, not_first, kept: Mutex::default() })
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Arc<CompiledGrammar>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A grammar that was compiled before.
    pub fn find(&self, spec: &GrammarSpec) -> Option<Arc<CompiledGrammar>> {
        let mut kept = self.kept();
        let place = kept.iter().position(|grammar| grammar.spec() == spec)?;
        let grammar = kept.remove(place)?;
        kept.push_front(Arc::clone(&grammar));
        Some(grammar)
    }

    /// Compiles a grammar, unless it is known.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] or [`GrammarError::Refused`] with what is wrong.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
        if let Some(known) = self.find(spec) {
            return Ok(known);
        }
        let start = Matcher::new(self.factory.create_parser(program(spec)?));
        if let Some(message) = start.get_error() {
            return Err(GrammarError::Refused(shortened(&message)));
        }
        let compiled = CompiledGrammar::new(spec.clone(), start, Arc::clone(&self.not_first));
        // Finds a grammar that matches no text, or is too complex, before anything is sampled.
        compiled.matcher().allowed().map_err(|error| match error {
            GrammarError::DeadEnd => {
                GrammarError::Refused("the grammar matches no text".to_owned())
            }
            error => GrammarError::Refused(error.to_string()),
        })?;
        let compiled = Arc::new(compiled);
        let mut kept = self.kept();
        kept.push_front(Arc::clone(&compiled));
        kept.truncate(KEPT);
        Ok(compiled)
    }
}

/// A message of the library without its state, and not too long. That of a caught panic is replaced,
/// because it contains a trace.
fn shortened(message: &str) -> String {
    if message.starts_with("panic:") {
        tracing::warn!(message = message.lines().next(), "the grammar library panicked");
        return "the grammar cannot be compiled".to_owned();
    }
    let text = message.trim_end_matches("<non-verbose/>").trim_end();
    match text.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_without_traces() {
        assert_eq!(shortened("wrong\n<non-verbose/>"), "wrong");
        assert_eq!(shortened(&"ä".repeat(500)).chars().count(), MAX_MESSAGE + 1);
        assert!(!shortened("panic: secret\n<backtrace>").contains("secret"));
    }
}
