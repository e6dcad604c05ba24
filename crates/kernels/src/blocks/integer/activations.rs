//! The order of activations as integers, and their rounding to pairs of 16 bits, with the instructions that the
//! compiler selects.

use hone_core::simd::SimdTask;

use crate::vector::{magnitude_bits, nearest, scale_and_factor};

/// Activations that share a scale, as many as weights do.
pub(super) const BLOCK: usize = 32;

/// Words of 4 bytes that a byte of each activation of a block takes, or of each weight.
pub(super) const WORDS: usize = BLOCK / 4;

/// Words that a block of one column takes: two bytes for each activation.
pub(super) const BLOCK_WORDS: usize = 2 * WORDS;

/// Rows of a block: its words, the bits of its scale, the sum of its integers, negated, and the same of its first
/// half.
pub(super) const BLOCK_ROWS: usize = BLOCK_WORDS + 3;

/// Columns that the kernels compute together, and rows of weights.
pub(super) const LANES: usize = 16;

/// The greatest integer, 32512, with the bytes 127 and 0. As two signed bytes, those above 32639 would need an
/// upper byte of 128.
pub(super) const GREATEST: f32 = (127 << 8) as f32;

/// The blocks of a group of columns.
#[derive(Clone, Copy)]
pub(super) struct IntegerGroup<'a> {
    /// At most [`LANES`].
    pub columns: usize,
    /// For each block, `[BLOCK_ROWS, columns]`.
    pub rows: &'a [u32],
}

/// Some blocks of a group of columns to round.
pub(super) struct ColumnGroup<'a> {
    /// At most [`LANES`].
    pub columns: usize,
    /// The activations from the group's first column on, in rows of `width`.
    pub values: &'a [f32],
    pub width: usize,
    /// For each block, `[BLOCK_ROWS, columns]`.
    pub rows: &'a mut [u32],
}

/// Rounds the columns of a group to pairs of 16 bits, with the instructions that the compiler selects.
pub(super) struct RoundToPairs<'a>(pub ColumnGroup<'a>);

impl SimdTask for RoundToPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.0.columns {
            1 => round::<1>(self.0),
            2 => round::<2>(self.0),
            3 => round::<3>(self.0),
            4 => round::<4>(self.0),
            6 => round::<6>(self.0),
            8 => round::<8>(self.0),
            16 => round::<16>(self.0),
            columns => unreachable!("{columns} columns"),
        }
    }
}

/// Rounds `C` columns, a block at a time.
#[inline(always)]
fn round<const C: usize>(group: ColumnGroup<'_>) {
    let ColumnGroup { values, width, rows, .. } = group;
    let blocks = rows.as_chunks_mut::<C>().0.as_chunks_mut::<BLOCK_ROWS>().0;
    for (block, to) in blocks.iter_mut().enumerate() {
        let values = &values[block * BLOCK * width..];
        let mut rows = [[0.0_f32; C]; BLOCK];
        for (row, values) in rows.iter_mut().zip(values.chunks(width)) {
            row.copy_from_slice(&values[..C]);
        }
        let mut greatest = [0_u32; C];
        for row in &rows {
            for (greatest, x) in greatest.iter_mut().zip(row) {
                *greatest = (*greatest).max(magnitude_bits(*x));
            }
        }
        let (mut scales, mut factors) = ([0; C], [0.0; C]);
        for c in 0..C {
            let (scale, factor) = scale_and_factor(greatest[c], GREATEST);
            (scales[c], factors[c]) = (scale.to_bits(), factor);
        }
        let (mut negative, mut first) = ([0_u32; C], [0_u32; C]);
        for (word, (to, rows)) in to.chunks_exact_mut(2).zip(rows.chunks_exact(4)).enumerate() {
            let (even, odd) = to.split_at_mut(1);
            for c in 0..C {
                let q = |i: usize| nearest(rows[i][c] * factors[c]).cast_unsigned();
                let [a, b, d, e] = [q(0), q(1), q(2), q(3)];
                even[0][c] = a & 0xffff | d << 16;
                odd[0][c] = b & 0xffff | e << 16;
                let sum = a.wrapping_add(b).wrapping_add(d.wrapping_add(e));
                negative[c] = negative[c].wrapping_sub(sum);
            }
            if word == WORDS / 2 - 1 {
                first = negative;
            }
        }
        to[BLOCK_WORDS..].copy_from_slice(&[scales, negative, first]);
    }
}
