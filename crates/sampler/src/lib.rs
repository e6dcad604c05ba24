//! Batched rollout sampling: decodes many sequences at once, on the trainer's weights and a LoRA
//! adapter that is not merged (CPU, f32 arithmetic, paged KV cache).
//!
//! [`BatchedEngine`] implements [`hone_engine::Engine`], and [`BatchedPublisher`] implements
//! [`hone_engine::Publisher`] on it. [`Decoder`] is the forward pass alone, for benchmarks.
//!
//! ```text
//! generate -> queue -> scheduler: admit, prefill the prompt, then step until all sequences end
//!                         |  one row for each running sequence
//!                         v
//!                      decoder: embedding, norms, matmul, RoPE, attention over the KV cache
//!                         |  logits
//!                         v
//!                      TokenSampler and GenerationRun -> events
//! ```
//!
//! # Threads
//!
//! An engine owns one thread, `hone-native`, which runs the scheduler. It sleeps on a condition
//! variable while no sequence runs; a request, a publication and [`BatchedEngine::close`] wake it. It
//! is also a member of a private rayon pool of [`SamplerConfig::threads`] threads, which share the
//! work of a step. Between steps it pauses while clients are served ([`SamplerConfig::busy_share`]).
//! Dropping the engine cancels all sequences and joins the thread.
//!
//! # Invariants
//!
//! - A sequence runs on one policy version from its first token to its last. A publication affects
//!   only requests that are admitted later.
//! - Activations are matrices `[feature, column]` with one column for each token. Every sum runs over
//!   features or positions in an order that depends on its own sequence alone. Tokens and
//!   log-probabilities are therefore bit-identical for every batch composition and thread count.
//! - The worst-case number of cache pages is reserved at admission, so no running sequence is evicted.
//!   The cache never holds more than [`SamplerConfig::max_batch_tokens`] positions.
//! - A decoding step allocates nothing once the buffers have grown to their final size.

mod attention;
mod capacity;
mod config;
mod decoder;
mod engine;
mod error;
mod keep_pool_hot;
mod kv_cache;
mod matmul;
mod simd_ops;
#[cfg(test)]
mod testing;
mod weights;

pub use config::{LiveTraffic, SamplerConfig};
pub use decoder::{Decoder, Scratch};
pub use engine::{BatchedEngine, BatchedPublisher, BridgedEngine};
pub use error::SamplerError;
pub use kv_cache::{BatchMember, BatchRow, CacheShape, PagePool, PromptPages, SequencePages};
pub use weights::AdapterWeights;
