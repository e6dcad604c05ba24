//! Model directories and GGUF files, the transformer, its LoRA adapters, PEFT files, merging, and the model
//! inside the binary.
//!
//! Engines, trainer and native sampler share this crate: [`ModelDir`] reads the files of a model,
//! [`ModelSpec`] describes it, [`Model`] holds its weights and computes forward and backward passes,
//! [`adapter`] has the adapter's settings, weights and files. The native sampler has its own decoder over
//! the same weights.
//!
//! This crate starts no threads. A fused operation runs on the calling thread, or, within
//! [`kernels::parallel::with_threads`], on up to that many threads of the caller's rayon pool.
//! `hone-train` decides: its pool has `train.threads` threads, and its `forward_backward` module runs
//! either one shard per thread or one shard on all threads. Candle graphs use candle's own setting.
//!
//! Callers may rely on these properties:
//!
//! - There are two numeric paths. Fused CPU kernels run a frozen base; candle graphs run everything
//!   else: other devices, and weights that are trained, such as those of the embedded model.
//!   `transformer::fused_layer::tests` compares values and gradients of the two for every model family,
//!   and `hone-train` whole optimizer steps.
//! - Results of the fused path are bit-equal for any number of threads, because sums run in a fixed
//!   order, and with or without recomputation of activations ([`Model::forward_saving`]).
//! - Products with the matrices of a frozen base may be in bf16 instead of f32
//!   ([`Model::with_compute`]), where the processor is faster with it. All sums are in f32, and these
//!   guarantees hold in either case.
//! - Matrices of a frozen base may stay in 16 bits ([`adapter::BaseDtype`]) or in quantized blocks
//!   ([`weights`]); they are widened when used, and computation is in f32, except for the native sampler's
//!   products with blocks. Quantized matrices need the fused path.
//! - [`Model::digest`] is stable: it is part of checkpoints.

pub mod adapter;
pub mod device;
pub mod embedded;
mod error;
mod gguf;
pub mod kernels;
mod model_dir;
pub mod spec;
pub mod testing;
pub mod transformer;
pub mod weights;

pub use error::{ModelError, Result};
pub use model_dir::ModelDir;
pub use spec::ModelSpec;
pub use transformer::Model;
