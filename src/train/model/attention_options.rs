//! What varies in attention from one family to another.

/// Options of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Scores are multiplied by this, mostly `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// Scores s become `cap * tanh(s / cap)` (Gemma 2).
    pub softcap: Option<f64>,
    /// A query at position p sees keys from position `p + 1 - window` on; `None` sees all before it.
    pub window: Option<usize>,
}
