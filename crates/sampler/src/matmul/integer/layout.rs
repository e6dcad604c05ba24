//! The order of activations as integers.

#![cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only the kernel for x86-64 reads the integers")
)]

/// Activations that share a scale, as many as weights do.
pub(super) const BLOCK: usize = 32;

/// Words of 4 bytes for the upper bytes of a block; the lower bytes take as many.
pub(super) const WORDS: usize = BLOCK / 4;

/// A group of columns to round.
pub(super) struct ColumnGroup<'a> {
    /// At most 16.
    pub columns: usize,
    /// The activations from the group's first column on, in rows of `width`.
    pub values: &'a [f32],
    pub width: usize,
    /// For each block, `[2 WORDS, columns]`.
    pub words: &'a mut [u32],
    /// For each block, `[columns]`.
    pub scales: &'a mut [f32],
    /// For each block, `[columns]`.
    pub negative_sums: &'a mut [i32],
}

/// The same block of the columns of a group.
#[derive(Clone, Copy)]
pub(super) struct IntegerBlock {
    /// `[2 WORDS, columns]`
    pub words: *const u32,
    /// `[columns]`
    pub scales: *const f32,
    /// `[columns]`
    pub negative_sums: *const i32,
}

impl IntegerBlock {
    /// The columns from `count` on.
    #[inline(always)]
    pub fn skip_columns(self, count: usize) -> Self {
        Self {
            words: self.words.wrapping_add(count),
            scales: self.scales.wrapping_add(count),
            negative_sums: self.negative_sums.wrapping_add(count),
        }
    }
}
