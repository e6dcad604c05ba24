//! Our sampler inside mistral.rs.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};
use mistralrs::CustomLogitsProcessor;

use crate::engine::EngineError;
use crate::engine::run::Run;
use crate::engine::sampler::Sampler;
use crate::types::TokenId;

/// Draws a request's tokens where mistral.rs would let logits be changed.
///
/// It returns logits that leave one choice to the engine's own argmax: the drawn token, or `end`,
/// a stop token, once the run is over for whatever reason (a stop string, the limit, a client
/// that hung up). So ids, log-probabilities and the end are all ours, and no step is wasted.
pub(super) struct Processor {
    turn: Mutex<Option<Turn>>,
    end: TokenId,
}

/// What belongs to the running request; taken out when it has ended.
pub(super) struct Turn {
    pub(super) run: Run,
    pub(super) sampler: Sampler,
}

impl Processor {
    pub(super) fn new(run: Run, sampler: Sampler, end: TokenId) -> Self {
        Self { turn: Mutex::new(Some(Turn { run, sampler })), end }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Turn>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run, once the engine is through with it.
    pub(super) fn take(&self) -> Option<Run> {
        self.lock().take().map(|turn| turn.run)
    }

    /// The token that the engine shall take.
    fn next(&self, logits: &Tensor) -> TokenId {
        let mut turn = self.lock();
        let Some(Turn { run, sampler }) = turn.as_mut() else { return self.end };
        if run.is_over() {
            return self.end;
        }
        let drawn = logits
            .to_vec1::<f32>()
            .map_err(|e| EngineError::Internal(format!("logits: {e}")))
            .and_then(|logits| {
                sampler.draw(&logits).map_err(|e| EngineError::Internal(e.to_string()))
            });
        match drawn {
            Ok(drawn) => {
                let id = drawn.id;
                if run.push(drawn) { self.end } else { id }
            }
            Err(error) => {
                run.fail(error);
                self.end
            }
        }
    }
}

impl CustomLogitsProcessor for Processor {
    /// `logits`: `[vocabulary]`, raw, since the engine is asked for no penalties of its own.
    fn apply(&self, logits: &Tensor, _context: &[u32]) -> candle_core::Result<Tensor> {
        POOL.with(|pool| {
            pool.get_or_init(|| {
                let n: usize = std::env::var("HONE_EXP").ok()?.parse().ok()?;
                rayon::ThreadPoolBuilder::new().num_threads(n).use_current_thread().build().ok()
            });
        });
        let vocab = logits.elem_count();
        let mut only = vec![f32::NEG_INFINITY; vocab];
        if let Some(choice) = only.get_mut(self.next(logits) as usize) {
            // Not 0: the engine takes its logarithm.
            *choice = 1.0;
        }
        Tensor::from_vec(only, vocab, &Device::Cpu)
    }
}

thread_local! {
    static POOL: std::cell::OnceCell<Option<rayon::ThreadPool>> = const { std::cell::OnceCell::new() };
}
