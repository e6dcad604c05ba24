//! Kinds that score a completion's length in tokens, the stop token included.

pub mod cosine_scaled;
pub mod length;
pub mod length_range;
pub mod soft_overlong;

/// Most tokens that a parameter may name.
const MOST_TOKENS: u32 = 1 << 20;
