//! The native engine: decodes many sequences at once, on the trainer's weights and LoRA adapters that are
//! not merged (CPU, f32 arithmetic, but integers for products with quantized weights and bf16 on request, paged
//! KV cache), for rollouts and for clients.
//!
//! [`BatchedEngine::start_on_device`] runs the same scheduler and cache over a GPU, whose arithmetic is hone-cuda's:
//! activations in bf16, and keys and values that depend a little on which pass computed them.
//!
//! [`BatchedEngine`] implements [`hone_engine::Engine`], and [`BatchedPublisher`] implements
//! [`hone_engine::Publisher`] on it. Further policies share its batches: a [`PolicyEngine`] implements both traits for
//! one of them. [`Decoder`] is the forward pass alone, for benchmarks.
//!
//! ```text
//! generate -> queue -> scheduler: admit; then, in each iteration, parts of prompts and one step
//!                         |  one row for each decoding sequence, and for each token of the parts
//!                         v
//!                      decoder: embedding, norms, matmul, RoPE, attention over the KV cache
//!                         |  logits                                         |  full pages
//!                         v                                                 v
//!                      TokenSampler and GenerationRun -> events        prefix cache
//! ```
//!
//! # Threads
//!
//! An engine owns one thread, `hone-native`, which runs the scheduler. It sleeps on a condition
//! variable while no sequence runs; a request, a publication and [`BatchedEngine::close`] wake it. It
//! is also a member of a private rayon pool of [`SamplerConfig::threads`] threads, which share the
//! work of a step. If another engine serves clients, it pauses between passes while they are served
//! ([`SamplerConfig::busy_share`]), and its threads have background priority. With
//! [`SamplerConfig::serves_clients`] it restricts its own shadow sequences instead. Dropping the engine
//! cancels all sequences and joins the thread.
//!
//! # Invariants
//!
//! - A sequence runs on one policy version from its first token to its last. The version is fixed at
//!   admission; a publication affects only requests that are admitted later.
//! - On the processor, activations are matrices `[feature, column]` with one column for each token. Every sum runs over
//!   features or positions in an order that depends on its own sequence alone: page `i` holds the
//!   positions `16 i` to `16 i + 15`, and attention adds page by page. Keys, values, tokens and
//!   log-probabilities are therefore bit-identical for every batch composition, thread count and size of
//!   the parts of prompts, with and without the prefix cache.
//! - The worst-case number of cache pages is promised at admission, so no running sequence is evicted.
//! - A live request delays no other one's next token by more than parts of prompts of
//!   [`SamplerConfig::busy_prefill_tokens`], and as many as fill the last block of columns. Shadow sequences
//!   delay live ones by a bounded number of rows and one page of a prompt, and still get a share of the
//!   steps.
//! - A step of the decoder allocates nothing once the buffers have grown to their final size.

mod attention;
mod capacity;
mod config;
mod decoder;
mod device;
mod engine;
mod error;
mod kv_cache;
mod simd_ops;
#[cfg(test)]
mod testing;
mod weights;

pub use config::{LiveTraffic, SamplerConfig};
pub use decoder::{Decoder, Scratch};
pub use engine::{BatchedEngine, BatchedPublisher, BridgedEngine, PolicyEngine};
pub use error::SamplerError;
pub use kv_cache::{CacheShape, CacheType, PagePool, SequencePages, WeightsId};
pub use weights::AdapterWeights;
