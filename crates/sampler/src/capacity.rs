//! Sizes of the KV cache and of the scratch buffers, fixed when the engine starts.

use hone_kernels::columns::COLUMN_BLOCK;
use hone_model::ModelSpec;

use crate::config::SamplerConfig;
use crate::decoder::Scratch;
use crate::error::{Result, SamplerError};
use crate::kv_cache::{PAGE, SequencePages};

/// Sizes that the scheduler allocates and that admission is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SamplerCapacity {
    pub pages: usize,
    /// Rows of the main scratch buffers: a whole batch and parts of prompts.
    pub batch_rows: usize,
    /// Other threads that can get a share of a pass with parts of prompts, unless the model is small.
    pub sharing: usize,
    /// Rows of each other thread's buffers, for its share of a pass.
    pub split_rows: usize,
    /// Those of them that have logits.
    pub split_logits: usize,
}

impl SamplerCapacity {
    pub fn new(config: &SamplerConfig) -> Result<Self> {
        let pages = config.max_batch_tokens / PAGE;
        if pages < 2 {
            return Err(SamplerError::Refused(format!(
                "rollout.max_batch_tokens is {}; at least {} was expected",
                config.max_batch_tokens,
                2 * PAGE
            )));
        }
        Ok(Self { pages, ..Self::rows(config) })
    }

    fn rows(config: &SamplerConfig) -> Self {
        let slots = config.slots.max(1);
        let chunk = config.prefill_tokens.max(config.busy_prefill_tokens).max(PAGE);
        // Parts of prompts fill the last block of columns. Sequences that decode without a part of their own,
        // because the cache holds their prompts, may join after that.
        let batch_rows = slots + chunk + COLUMN_BLOCK - 1;
        // At least two threads share a pass. Those of more threads have fewer rows, until they are too few.
        let threads = config.threads.max(2);
        let shares = threads * COLUMN_BLOCK <= batch_rows;
        let sharing = if shares { config.threads.max(1) - 1 } else { 0 };
        let split_logits = slots.div_ceil(2).next_multiple_of(PAGE);
        let split_rows = split_logits.max((5 * batch_rows).div_ceil(4 * threads));
        Self { pages: 0, batch_rows, sharing, split_rows, split_logits }
    }

    /// Refuses a request that does not fit in an empty cache.
    pub fn check(&self, prompt: usize, limit: usize) -> Result<()> {
        let pages = SequencePages::worst_case_pages(prompt, limit);
        if pages <= self.pages {
            return Ok(());
        }
        Err(SamplerError::Refused(format!(
            "rollout.max_batch_tokens is {}, which is too small: one sequence of {} tokens needs {} \
             places in the cache",
            self.pages * PAGE,
            prompt + limit,
            pages * PAGE
        )))
    }
}

impl SamplerConfig {
    /// Bytes of the scheduler's buffers, unless the model is small. Those of adapters, and the scratch of attention,
    /// which grows with sequences, are not included.
    pub fn buffer_bytes(&self, spec: &ModelSpec) -> usize {
        let capacity = SamplerCapacity::rows(self);
        let other = Scratch::bytes(spec, capacity.split_rows, capacity.split_logits);
        Scratch::bytes(spec, capacity.batch_rows, self.slots.max(1)) + capacity.sharing * other
    }
}
