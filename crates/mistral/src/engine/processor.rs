//! Samples tokens within mistral.rs.

use std::cell::OnceCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};
use mistralrs::CustomLogitsProcessor;

use hone_core::types::TokenId;
use hone_engine::EngineError;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

/// Samples a request's tokens in place of mistral.rs.
///
/// It returns logits with one finite value, which the engine's argmax selects: the sampled token, or
/// `stop` when the run is over (stop token, stop string, token limit or cancellation). So the engine
/// computes no step whose token is unused.
pub(super) struct SamplingProcessor {
    /// `None` after [`Self::take_run`].
    sampling: Mutex<Option<(GenerationRun, TokenSampler)>>,
    /// A stop token.
    stop: TokenId,
    threads: usize,
}

impl SamplingProcessor {
    /// `threads` is the size of the engine's pool, including the engine's own thread.
    pub fn new(run: GenerationRun, sampler: TokenSampler, stop: TokenId, threads: usize) -> Self {
        Self { sampling: Mutex::new(Some((run, sampler))), stop, threads }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(GenerationRun, TokenSampler)>> {
        self.sampling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the run out after the engine has dropped the sequence.
    pub fn take_run(&self) -> Option<GenerationRun> {
        self.lock().take().map(|(run, _)| run)
    }

    /// Samples the token that the engine must select.
    fn next(&self, logits: &Tensor) -> TokenId {
        let mut sampling = self.lock();
        let Some((run, sampler)) = sampling.as_mut() else { return self.stop };
        if run.is_over() {
            return self.stop;
        }
        let drawn = logits
            .to_vec1::<f32>()
            .map_err(|e| EngineError::Internal(format!("logits: {e}")))
            .and_then(|logits| Ok(sampler.draw(&logits)?));
        match drawn {
            Ok(drawn) => {
                let id = drawn.id;
                if run.push(drawn) { self.stop } else { id }
            }
            Err(error) => {
                run.fail(error);
                self.stop
            }
        }
    }
}

impl CustomLogitsProcessor for SamplingProcessor {
    /// `logits` `[vocab]` are raw, because the request asks the engine for no penalties.
    fn apply(&self, logits: &Tensor, _context: &[u32]) -> candle_core::Result<Tensor> {
        join_pool(self.threads);
        let vocab = logits.elem_count();
        let mut only = vec![f32::NEG_INFINITY; vocab];
        if let Some(choice) = only.get_mut(self.next(logits) as usize) {
            // Not 0, because the engine takes its logarithm.
            *choice = 1.0;
        }
        Tensor::from_vec(only, vocab, &Device::Cpu)
    }
}

thread_local! {
    static POOL: OnceCell<Option<rayon::ThreadPool>> = const { OnceCell::new() };
}

/// Makes the calling thread, which belongs to mistral.rs, a member of its own rayon pool.
///
/// A thread outside of all pools hands every parallel loop of candle to another thread and waits for
/// it, many times for each token. A member runs the loop itself; with the embedded model this saves a
/// quarter of a token's CPU time. With separate pools, engines do not compete with each other and the
/// trainer for the global pool, and `RAYON_NUM_THREADS` need not be set.
fn join_pool(threads: usize) {
    POOL.with(|pool| {
        pool.get_or_init(|| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("hone-engine-{index}"))
                .use_current_thread()
                .build();
            pool.inspect_err(|error| tracing::debug!(%error, "the engine uses rayon's global pool"))
                .ok()
        });
    });
}
