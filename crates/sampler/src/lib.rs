//! The trainer's own sampler: batched decoding with a cache of keys and values, over the trainer's
//! weights and its adapter unmerged (CPU, f32).
//!
//! ```text
//! generate -> queue -> scheduler (a thread): admit, prefill, then step by step
//!                        |  one row a running sequence
//!                        v
//!                      decoder: products, norms, rotary positions, attention over the cache
//!                        |  logits
//!                        v
//!                      engine's sampler and run loop -> events
//! ```
//!
//! Sequences lie in the lanes of vectors: an activation is a matrix `[feature, lane]`, and every sum
//! goes over features or positions in one order that depends on the sequence alone. So what a
//! sequence gets is the same bits whatever else is in its batch, and whatever the threads.
//!
//! Invariants: a sequence runs on the factors of one version from its first token to its last; no
//! more pages of the cache exist than planned; nothing is allocated for a token once the buffers have
//! their size.

mod attention;
mod decoder;
mod engine;
mod keep_pool_hot;
mod kv_cache;
mod matmul;
mod memory_plan;
mod scheduler;
mod simd_ops;
#[cfg(test)]
mod testing;
mod weights;

pub use decoder::{Decoder, Scratch};
pub use engine::{BatchedEngine, BatchedPublisher, LiveTraffic, SamplerConfig};
pub use kv_cache::{BatchMember, CacheShape, Page, PagePool, PromptPages, SequencePages};
pub use memory_plan::SamplerMemory;
pub use weights::{AdapterWeights, BaseWeights};

/// Why the sampler cannot work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The model's weights cannot be read as they are.
    #[error("the sampler needs f32 weights in main memory: {0}")]
    Weights(String),
    /// A setting.
    #[error("{0}")]
    Setting(String),
    /// The cache is too small for a single sequence.
    #[error(
        "rollout.max_batch_tokens is {tokens}, which is too small: one sequence of {wanted} tokens \
         needs {wanted_tokens} places in the cache"
    )]
    Cache {
        /// What is configured.
        tokens: usize,
        /// Prompt and completion.
        wanted: usize,
        /// The same in whole pages.
        wanted_tokens: usize,
    },
    /// Something failed that should not.
    #[error("{0}")]
    Internal(String),
}

impl From<candle_core::Error> for SamplerError {
    fn from(error: candle_core::Error) -> Self {
        Self::Internal(error.to_string())
    }
}
