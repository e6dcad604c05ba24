//! Our sampler inside mistral.rs.

use std::cell::OnceCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};
use mistralrs::CustomLogitsProcessor;

use hone_core::types::TokenId;
use hone_engine::EngineError;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

/// Draws a request's tokens where mistral.rs would let logits be changed.
///
/// It returns logits that leave one choice to the engine's own argmax: the drawn token, or `end`,
/// a stop token, once the run is over for whatever reason (a stop string, the limit, a client
/// that hung up). So ids, log-probabilities and the end are all ours, and no step is wasted.
pub(super) struct Processor {
    turn: Mutex<Option<SamplingTurn>>,
    end: TokenId,
    threads: usize,
}

/// What belongs to the running request; taken out when it has ended.
pub(super) struct SamplingTurn {
    pub(super) run: GenerationRun,
    pub(super) sampler: TokenSampler,
}

impl Processor {
    /// `threads` is the size of the engine's own pool, the engine's thread included.
    pub(super) fn new(
        run: GenerationRun,
        sampler: TokenSampler,
        end: TokenId,
        threads: usize,
    ) -> Self {
        Self { turn: Mutex::new(Some(SamplingTurn { run, sampler })), end, threads }
    }

    fn lock(&self) -> MutexGuard<'_, Option<SamplingTurn>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run, once the engine is through with it.
    pub(super) fn take(&self) -> Option<GenerationRun> {
        self.lock().take().map(|turn| turn.run)
    }

    /// The token that the engine shall take.
    fn next(&self, logits: &Tensor) -> TokenId {
        let mut turn = self.lock();
        let Some(SamplingTurn { run, sampler }) = turn.as_mut() else { return self.end };
        if run.is_over() {
            return self.end;
        }
        let drawn = logits
            .to_vec1::<f32>()
            .map_err(|e| EngineError::Internal(format!("logits: {e}")))
            .and_then(|logits| Ok(sampler.draw(&logits)?));
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
        join_pool(self.threads);
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
    static POOL: OnceCell<Option<rayon::ThreadPool>> = const { OnceCell::new() };
}

/// Makes the calling thread, which is an engine's own, a member of a rayon pool of its own.
///
/// From outside of any pool every parallel loop of candle, even one over a single row, is handed
/// to another thread and waited for, many times a token. A member runs it itself; measured with the
/// embedded model that saves a quarter of the CPU time of a token. And engines no longer share the
/// global pool with each other or with the trainer, so `RAYON_NUM_THREADS` need not be set.
fn join_pool(threads: usize) {
    POOL.with(|pool| {
        pool.get_or_init(|| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("hone-engine-{index}"))
                .use_current_thread()
                .build();
            pool.inspect_err(|error| tracing::debug!(%error, "the engine has no pool of its own"))
                .ok()
        });
    });
}
