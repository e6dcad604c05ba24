//! The options and the shape of one layer's attention.

/// How scores become weights: `softmax(mask(cap(scale * q k^T)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Soft cap c on the scaled scores: `c tanh(score / c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// A query at position i attends to the keys from `i - window + 1` to i; without a window to all
    /// keys up to i.
    pub window: Option<usize>,
}

/// Counts and width of the heads of a layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadLayout {
    /// Query heads.
    pub queries: usize,
    /// Key and value heads; divides `queries`.
    pub keys: usize,
    /// Width of a head.
    pub dim: usize,
}
