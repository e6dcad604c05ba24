//! The frozen base's weights: candle tensors, or matrices of quantized blocks.
//!
//! A quantized matrix stays quantized in memory. What uses it dequantizes whole rows when it needs them
//! ([`with_upcast`](crate::kernels::storage::with_upcast)), so the trainer computes in f32 with
//! these values ("QLoRA", Dettmers et al. 2023). The sampler multiplies the blocks themselves where it can.
//! Weights come from safetensors files, which can be quantized while they are loaded ([`Quantize`]), or from
//! a GGUF file.

mod dequantize;
mod files;
mod format;
mod gguf;
mod interleave;
mod matrix;
mod options;
mod quantize;

pub use files::WeightFiles;
pub(crate) use files::is_gguf;
pub use format::{BlockFormat, WeightType};
pub use interleave::GROUP_ROWS;
pub use matrix::{BaseMatrix, QuantizedMatrix};
pub use options::{LoadOptions, Quantize};

#[cfg(test)]
mod tests;
