//! Compiles grammars outside the threads that serve requests.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::thread;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use hone_core::types::{GrammarSpec, TokenId};

use super::CompiledGrammar;
use super::{GrammarError, GrammarVocabulary, lark, schema};

/// Grammars that are compiled at once.
const PARALLEL: usize = 2;
/// Grammars that wait meanwhile; further ones are refused. Each takes less than a second.
const WAITING: usize = 32;
/// Stack of a compiling thread, in bytes. The library descends into nested schemas and references;
/// only the pages that it uses take memory.
const STACK: usize = 64 << 20;

/// Compiles the grammars of a model and keeps the last ones.
pub(crate) struct GrammarQueue {
    /// Made when the first grammar is needed.
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
    /// The grammars used last, newest first.
    kept: Mutex<VecDeque<Arc<CompiledGrammar>>>,
    permits: Arc<Semaphore>,
    waiting: Semaphore,
}

struct GrammarCompiler {
    factory: ParserFactory,
    /// Tokens that cannot begin a text.
    not_first: Arc<[TokenId]>,
}

impl Default for GrammarQueue {
    fn default() -> Self {
        Self {
            compiler: OnceLock::new(),
            kept: Mutex::default(),
            permits: Arc::new(Semaphore::new(PARALLEL)),
            waiting: Semaphore::new(WAITING),
        }
    }
}

impl GrammarQueue {
    /// Compiles a grammar on a thread of its own, unless it is known. `vocabulary` runs there once.
    pub async fn compile(
        self: &Arc<Self>,
        spec: &GrammarSpec,
        vocabulary: impl FnOnce() -> Result<GrammarVocabulary, GrammarError> + Send + 'static,
    ) -> Result<Arc<CompiledGrammar>, GrammarError> {
        if let Some(known) = self.find(spec) {
            return Ok(known);
        }
        let failed = |error: &dyn std::fmt::Display| GrammarError::Failed(error.to_string());
        let waiting = self
            .waiting
            .try_acquire()
            .map_err(|_| GrammarError::Busy { places: PARALLEL, waiting: WAITING })?;
        // The thread holds the permit, because the caller may be gone before it ends.
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|e| failed(&e))?;
        drop(waiting);
        let (sender, receiver) = oneshot::channel();
        let (queue, spec) = (Arc::clone(self), spec.clone());
        thread::Builder::new()
            .name("hone-grammar".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                let compiler =
                    queue.compiler.get_or_init(|| vocabulary().and_then(GrammarCompiler::new));
                let compiled = match (queue.find(&spec), compiler) {
                    (Some(known), _) => Ok(known),
                    (None, Ok(compiler)) => compiler.compile(&spec).map(|new| queue.keep(new)),
                    (None, Err(error)) => Err(error.clone()),
                };
                drop(permit);
                // Fails only if the caller is gone.
                let _ = sender.send(compiled);
            })
            .map_err(|error| failed(&error))?;
        receiver.await.map_err(|_| failed(&"the compiling thread panicked"))?
    }

    /// A grammar that was compiled before.
    fn find(&self, spec: &GrammarSpec) -> Option<Arc<CompiledGrammar>> {
        let mut kept = self.kept.lock();
        let place = kept.iter().position(|grammar| grammar.spec() == spec)?;
        let grammar = kept.remove(place)?;
        kept.push_front(Arc::clone(&grammar));
        Some(grammar)
    }

    fn keep(&self, grammar: CompiledGrammar) -> Arc<CompiledGrammar> {
        let grammar = Arc::new(grammar);
        let mut kept = self.kept.lock();
        kept.push_front(Arc::clone(&grammar));
        kept.truncate(KEPT);
        grammar
    }
}

// Compiles grammars for one vocabulary.

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

impl GrammarCompiler {
    fn new(vocabulary: GrammarVocabulary) -> Result<Self, GrammarError> {
        let mut factory = ParserFactory::new_simple(&vocabulary.environment)
            .map_err(|error| GrammarError::Failed(shortened(&error.to_string())))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, not_first: vocabulary.not_first.into() })
    }

    fn compile(&self, spec: &GrammarSpec) -> Result<CompiledGrammar, GrammarError> {
        let start = Matcher::new(self.factory.create_parser(program(spec)?));
        if let Some(message) = start.get_error() {
            return Err(GrammarError::Refused(shortened(&message)));
        }
        let compiled = CompiledGrammar {
            spec: spec.clone(),
            start: Mutex::new(start),
            not_first: Arc::clone(&self.not_first),
        };
        // Finds a grammar that matches no text, or is too complex, before anything is sampled.
        compiled.matcher().allowed().map_err(|error| match error {
            GrammarError::DeadEnd => {
                GrammarError::Refused("the grammar matches no text".to_owned())
            }
            error => GrammarError::Refused(error.to_string()),
        })?;
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
    hone_core::text::shortened(text, MAX_MESSAGE).into_owned()
}

// Translates a grammar for the library, within bounds.

/// Longest regular expression, in bytes.
const MAX_REGEX: usize = 16 << 10;
/// Most texts of a choice, and most bytes of all of them.
const MAX_CHOICES: (usize, usize) = (1000, 64 << 10);
/// Longest Lark grammar, in bytes.
const MAX_LARK: usize = 256 << 10;

/// The grammar for the library.
pub(super) fn program(spec: &GrammarSpec) -> Result<TopLevelGrammar, GrammarError> {
    let refuse = |reason: String| Err(GrammarError::Refused(reason));
    match spec {
        GrammarSpec::JsonObject => Ok(TopLevelGrammar::from_json_schema(schema::any_object()?)),
        GrammarSpec::JsonSchema(text) => {
            Ok(TopLevelGrammar::from_json_schema(schema::prepared_text(text)?))
        }
        GrammarSpec::Regex(regex) => {
            if regex.is_empty() || regex.len() > MAX_REGEX {
                let length = regex.len();
                return refuse(format!(
                    "the regular expression has {length} bytes: it must have 1 to {MAX_REGEX}"
                ));
            }
            // The library would hide what this group matches.
            if regex.contains("(?P<stop>") || regex.contains("(?<stop>") {
                return refuse("a group must not be named stop".to_owned());
            }
            Ok(TopLevelGrammar::from_regex(regex))
        }
        GrammarSpec::Choice(texts) => {
            let (most, bytes) = MAX_CHOICES;
            let total: usize = texts.iter().map(String::len).sum();
            let fits = !texts.is_empty() && texts.len() <= most && total <= bytes;
            if !fits || texts.iter().any(String::is_empty) {
                return refuse(format!(
                    "a choice has 1 to {most} texts of {bytes} bytes together, of which no text is empty"
                ));
            }
            Ok(TopLevelGrammar::from_lark(lark::choice(texts)))
        }
        GrammarSpec::Lark(text) => {
            if text.trim().is_empty() || text.len() > MAX_LARK {
                let length = text.len();
                return refuse(format!(
                    "the grammar has {length} bytes: it must have 1 to {MAX_LARK}"
                ));
            }
            Ok(TopLevelGrammar::from_lark(lark::bounded(text)?))
        }
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
