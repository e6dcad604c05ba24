//! The sampler's errors.

use std::io;

use hone_core::types::TokenId;
use hone_model::ModelError;

/// Why the sampler cannot start or cannot compute.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// The model's weights cannot be read in place.
    #[error(
        "the sampler needs quantized weights, or contiguous f32, f16 or bf16 ones in main memory: {0}"
    )]
    Weights(String),
    /// A setting is out of range.
    #[error("{0}")]
    Setting(String),
    /// The cache is too small for one sequence.
    #[error(
        "rollout.max_batch_tokens is {configured}, which is too small: one sequence of {tokens} \
         tokens needs {needed} places in the cache"
    )]
    CacheTooSmall {
        /// The configured size in tokens, rounded down to whole pages.
        configured: usize,
        /// Tokens of the prompt and the completion.
        tokens: usize,
        /// The cache positions of these tokens in whole pages.
        needed: usize,
    },
    /// The cache has no page for a token, although pages are reserved at admission.
    #[error("the cache has no page left for a token")]
    NoPage,
    /// A sequence has no token to compute.
    #[error("a sequence has no token for the next step")]
    NoToken,
    /// A pass has more rows than its scratch buffers hold.
    #[error("{rows} rows do not fit in {limit}")]
    TooManyRows {
        /// Rows of the pass.
        rows: usize,
        /// Rows of the buffers.
        limit: usize,
    },
    /// A token has no embedding.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// The scheduler's thread cannot be started.
    #[error("the sampler's thread cannot be started: {0}")]
    Thread(#[source] io::Error),
    /// The model cannot compute the request, or an adapter cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor cannot be read.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// A result of this crate.
pub(crate) type Result<T> = std::result::Result<T, SamplerError>;
