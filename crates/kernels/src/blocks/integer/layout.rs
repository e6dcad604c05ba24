//! The order of activations as integers.

/// Activations that share a scale, as many as weights do.
pub(super) const BLOCK: usize = 32;

/// Words of 4 bytes that a byte of each activation of a block takes, or of each weight.
pub(super) const WORDS: usize = BLOCK / 4;

/// Words that a block of one column takes: two bytes for each activation.
pub(super) const BLOCK_WORDS: usize = 2 * WORDS;

/// Columns that the kernels compute together, and rows of weights.
pub(super) const LANES: usize = 16;

/// The columns of the last group for so many tokens: as many, or a few more.
pub(super) fn last_columns(tokens: usize) -> usize {
    match tokens {
        5 => 6,
        7 => 8,
        9.. => LANES,
        _ => tokens,
    }
}

/// A group of columns to round. Values other than the activations are for each block, `[columns]`.
pub(super) struct ColumnGroup<'a> {
    /// At most [`LANES`].
    pub columns: usize,
    /// The activations from the group's first column on, in rows of `width`.
    pub values: &'a [f32],
    pub width: usize,
    /// For each block, `[BLOCK_WORDS, columns]`.
    pub words: &'a mut [u32],
    pub scales: &'a mut [f32],
    pub negative_sums: &'a mut [i32],
    pub first_sums: &'a mut [i32],
}

/// The blocks of a group of columns.
#[derive(Clone, Copy)]
pub(super) struct IntegerGroup<'a> {
    /// At most [`LANES`].
    pub columns: usize,
    /// For each block, `[BLOCK_WORDS, columns]`.
    pub words: &'a [u32],
    /// For each block, `[columns]`.
    pub scales: &'a [f32],
    /// The sums of the integers, negated, in the same order.
    pub negative_sums: &'a [i32],
    /// The same of the first half of each block.
    pub first_sums: &'a [i32],
}
