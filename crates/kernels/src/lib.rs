//! The kernels that trainer and native sampler share: products of matrices, quantized blocks, and loops on several
//! threads.
//!
//! [`processor`] selects the instructions. [`matmul`] multiplies matrices for the trainer, and [`columns`] weights
//! with the activations of a few tokens for the sampler. [`blocks`] has quantized matrices, their values, and
//! their products with activations that are rounded to integers. [`strided`] multiplies the small factors of adapters. Of
//! candle, this crate uses the types of numbers.
//!
//! Bits of results depend neither on the number of threads nor, unless a function says otherwise, on the
//! instructions.

pub mod blocks;
pub mod columns;
pub mod float;
pub mod hot_team;
pub mod matmul;
pub mod parallel;
pub mod processor;
pub mod strided;
pub mod testing;
pub mod transpose;
pub mod vector;
