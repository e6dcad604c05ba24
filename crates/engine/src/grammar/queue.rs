//! Compiles grammars outside the threads that serve requests.

use std::sync::{Arc, OnceLock};
use std::thread;

use tokio::sync::{Semaphore, oneshot};

use hone_core::types::GrammarSpec;

use super::compiled::CompiledGrammar;
use super::compiler::GrammarCompiler;
use super::error::GrammarError;
use super::vocabulary::GrammarVocabulary;

/// Grammars that are compiled at once.
const PARALLEL: usize = 2;
/// Grammars that wait meanwhile; further ones are refused. Each takes less than a second.
const WAITING: usize = 32;
/// Stack of a compiling thread, in bytes. The library descends into nested schemas and references;
/// only the pages that it uses take memory.
const STACK: usize = 64 << 20;

/// The compiler of a model, made when the first grammar is needed.
pub(crate) struct GrammarQueue {
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
    permits: Arc<Semaphore>,
    waiting: Semaphore,
}

impl Default for GrammarQueue {
    fn default() -> Self {
        Self {
            compiler: OnceLock::new(),
            permits: Arc::new(Semaphore::new(PARALLEL)),
            waiting: Semaphore::new(WAITING),
        }
    }
}

impl GrammarQueue {
    /// Compiles a grammar on a thread of its own, unless it is known. `vocabulary` runs there once.
    ///
    /// # Errors
    /// [`GrammarError`] with what is wrong, or [`GrammarError::Busy`].
    pub async fn compile(
        self: &Arc<Self>,
        spec: &GrammarSpec,
        vocabulary: impl FnOnce() -> GrammarVocabulary + Send + 'static,
    ) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let known = self.compiler.get().and_then(|compiler| compiler.as_ref().ok()?.find(spec));
        if let Some(known) = known {
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
                let compiler = queue.compiler.get_or_init(|| GrammarCompiler::new(vocabulary()));
                let compiled = match compiler {
                    Ok(compiler) => compiler.compile(&spec),
                    Err(error) => Err(error.clone()),
                };
                drop(permit);
                // Fails only if the caller is gone.
                let _ = sender.send(compiled);
            })
            .map_err(|error| failed(&error))?;
        receiver.await.map_err(|_| failed(&"the compiling thread panicked"))?
    }
}
