//! What the sampler needs of memory, besides the weights that it shares with the trainer.

use hone_model::ModelSpec;

use super::{SamplerConfig, SamplerError, Scratch};
use crate::kv_cache::{CacheShape, PAGE, PagePool, pages};

/// Tokens of a prompt that are computed at once.
pub(super) const PREFILL: usize = 128;

/// Bytes, planned at start and kept to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerMemory {
    /// Pages of the cache, all together; they come into being as they are first used.
    pub pages: usize,
    /// Bytes of a page, which holds 16 tokens.
    pub page_bytes: usize,
    /// Rows of the first buffer, and of those that threads have for themselves.
    pub rows: [usize; 2],
    /// Bytes of activations and logits.
    pub scratch_bytes: usize,
}

impl SamplerMemory {
    /// What a configuration means for a model.
    ///
    /// # Errors
    /// If the cache could not hold a single token behind a single prompt.
    pub fn new(spec: &ModelSpec, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let shape =
            CacheShape { layers: spec.num_layers, heads: spec.num_kv_heads, dim: spec.head_dim };
        let pages = config.max_batch_tokens / PAGE;
        if pages < 2 {
            return Err(SamplerError::Setting(format!(
                "rollout.max_batch_tokens is {}; at least {} was expected",
                config.max_batch_tokens,
                2 * PAGE
            )));
        }
        let (slots, threads) = (config.slots.max(1), config.threads.max(1));
        let rows = [slots.max(PREFILL), slots.div_ceil(2).next_multiple_of(PAGE)];
        let scratch_bytes = Scratch::bytes(spec, rows[0], slots)
            + (threads - 1) * Scratch::bytes(spec, rows[1], rows[1]);
        Ok(Self { pages, page_bytes: shape.page_bytes(), rows, scratch_bytes })
    }

    /// Bytes of the whole cache.
    pub fn cache_bytes(&self) -> usize {
        self.pages * self.page_bytes
    }

    /// Pages that a request needs at most.
    pub(super) fn wanted(prompt: usize, limit: usize) -> usize {
        pages(prompt.saturating_sub(1)) + pages(limit)
    }

    /// Refuses what can never fit.
    ///
    /// # Errors
    /// [`SamplerError::Cache`] with the numbers.
    pub(super) fn check(&self, prompt: usize, limit: usize) -> Result<(), SamplerError> {
        let wanted = Self::wanted(prompt, limit);
        if wanted <= self.pages {
            return Ok(());
        }
        Err(SamplerError::Cache {
            tokens: self.pages * PAGE,
            wanted: prompt + limit,
            wanted_tokens: wanted * PAGE,
        })
    }

    pub(super) fn pool(&self, shape: CacheShape) -> PagePool {
        PagePool::new(shape, self.pages)
    }
}
