//! The frozen base's weights: candle tensors, or matrices of quantized blocks.
//!
//! A quantized matrix stays quantized in memory. What uses it dequantizes whole rows when it needs them
//! ([`with_upcast`](crate::kernels::storage::with_upcast)), so the trainer computes in f32 with
//! these values ("QLoRA", Dettmers et al. 2023). The sampler multiplies the blocks themselves where it can.
//! Weights come from safetensors files, which can be quantized while they are loaded ([`Quantize`]), or from
//! a GGUF file.

mod files;
mod matrix;
mod options;

pub use files::{WeightFiles, safetensors_bytes};

pub use hone_kernels::blocks::{BlockFormat, QuantizedMatrix};
pub use matrix::{BaseMatrix, WeightType};
pub use options::{LoadOptions, Quantize};

#[cfg(test)]
mod tests;
