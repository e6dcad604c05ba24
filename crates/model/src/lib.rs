//! The transformer, its LoRA adapters, PEFT files, merging, and the model inside the binary.
//!
//! Trainer and native sampler share this crate: [`ModelSpec`] describes the base model, [`Model`] holds
//! its weights and computes forward and backward passes, [`adapter`] has the adapter's settings, weights
//! and files. The native sampler has its own decoder over the same weights.
//!
//! This crate starts no threads. Operations run on the calling thread, or, within
//! [`kernels::parallel::with_threads`], on up to that many threads of the caller's rayon pool. The
//! trainer decides: it calls `with_threads` for each shard in `forward_backward` of `hone-train`.
//!
//! Callers may rely on these properties:
//!
//! - Results on the CPU are bit-equal for any number of threads, and with or without recomputation of
//!   activations ([`Model::forward_saving`]). Sums run in a fixed order.
//! - There are two numeric paths. Fused CPU kernels run a frozen base; candle graphs run everything
//!   else: other devices, and weights that are trained. `transformer::fused_layer::tests` holds values
//!   and gradients of the two paths equal for every model family.
//! - Matrices of a frozen base may stay in 16 bits ([`adapter::BaseDtype`]); they are upcast when used,
//!   and computation is in f32.
//! - The text hashed by [`Model::digest`] is stable, so checkpoints find their base model again.

pub mod adapter;
pub mod embedded;
mod error;
pub mod files;
pub mod kernels;
pub mod spec;
pub mod testing;
pub mod transformer;

pub use error::{ModelError, Result};
pub use spec::ModelSpec;
pub use transformer::Model;
