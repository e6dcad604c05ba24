//! What one layer's attention does to its scores.

/// How scores become weights: `softmax(mask(cap(scale * q k^T)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Soft cap c on the scaled scores: `c tanh(score / c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// A query at position i sees the keys from `i - window + 1` to i; all keys up to i without one.
    pub window: Option<usize>,
}
