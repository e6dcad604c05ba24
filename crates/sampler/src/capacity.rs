//! Sizes of the KV cache and of the scratch buffers, fixed when the engine starts.

use hone_model::ModelSpec;

use crate::config::SamplerConfig;
use crate::decoder::Scratch;
use crate::error::{Result, SamplerError};
use crate::kv_cache::{PAGE, SequencePages};
use crate::matmul::COLUMN_BLOCK;

/// Sizes that the scheduler allocates and that admission is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SamplerCapacity {
    /// Pages of the KV cache. Memory is allocated when a page is first used.
    pub pages: usize,
    /// Rows of the main scratch buffers: a whole batch and parts of prompts.
    pub batch_rows: usize,
    /// Rows of each other thread's buffers. A step is split only between threads that each take at
    /// most half of the batch.
    pub split_rows: usize,
}

impl SamplerCapacity {
    /// Computes the sizes for a configuration.
    ///
    /// # Errors
    /// If the cache cannot hold one prompt token and one completion token.
    pub fn new(config: &SamplerConfig) -> Result<Self> {
        let pages = config.max_batch_tokens / PAGE;
        if pages < 2 {
            return Err(SamplerError::Setting(format!(
                "rollout.max_batch_tokens is {}; at least {} was expected",
                config.max_batch_tokens,
                2 * PAGE
            )));
        }
        Ok(Self { pages, ..Self::rows(config) })
    }

    /// The rows alone, with no page.
    fn rows(config: &SamplerConfig) -> Self {
        let slots = config.slots.max(1);
        let split_rows = slots.div_ceil(2).next_multiple_of(PAGE);
        let chunk = config.prefill_tokens.max(config.busy_prefill_tokens).max(PAGE);
        // Parts of prompts fill the last block of columns. Sequences that decode without a part of their own,
        // because the cache holds their prompts, may join after that.
        let batch_rows = slots + chunk + COLUMN_BLOCK - 1;
        Self { pages: 0, batch_rows, split_rows }
    }

    /// Refuses a request that does not fit in an empty cache.
    ///
    /// # Errors
    /// [`SamplerError::CacheTooSmall`].
    pub fn check(&self, prompt: usize, limit: usize) -> Result<()> {
        let pages = SequencePages::worst_case_pages(prompt, limit);
        if pages <= self.pages {
            return Ok(());
        }
        Err(SamplerError::CacheTooSmall {
            configured: self.pages * PAGE,
            tokens: prompt + limit,
            needed: pages * PAGE,
        })
    }
}

impl SamplerConfig {
    /// Bytes of the scheduler's main buffers. Those of a small model's other threads, those of adapters, and
    /// the scratch of attention, which grows with sequences, are not included.
    pub fn buffer_bytes(&self, spec: &ModelSpec) -> usize {
        let capacity = SamplerCapacity::rows(self);
        Scratch::bytes(spec, capacity.batch_rows, self.slots.max(1))
    }
}
