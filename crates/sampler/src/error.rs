//! The sampler's errors.

use std::io;

use hone_model::ModelError;

/// Why the sampler cannot start or cannot compute.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// The model's weights cannot be read in place.
    #[error(
        "the sampler needs quantized weights, or contiguous f32, f16 or bf16 ones in main memory: {0}"
    )]
    Weights(String),
    /// A setting is out of range, or a request or a pass does not fit.
    #[error("{0}")]
    Refused(String),
    /// The cache has no page for a token, although pages are reserved at admission.
    #[error("the cache has no page left for a token")]
    NoPage,
    /// The scheduler's thread cannot be started.
    #[error("the sampler's thread cannot be started: {0}")]
    Thread(#[source] io::Error),
    /// The model cannot compute the request, or an adapter cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The GPU cannot compute.
    #[error("GPU: {0}")]
    Device(#[from] hone_cuda::GpuError),
    /// An adapter has other linear layers or greater ranks than the engine has room for.
    #[error("the adapter of {0} does not fit the engine's")]
    OtherAdapter(String),
    /// A tensor cannot be read.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

pub(crate) type Result<T> = std::result::Result<T, SamplerError>;
