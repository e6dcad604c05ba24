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

/// The greatest integer, 32512, with the bytes 127 and 0. As two signed bytes, those above 32639 would need an
/// upper byte of 128.
pub(super) const GREATEST: f32 = (127 << 8) as f32;

/// Rounds the columns of a group.
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
    let ColumnGroup { values, width, words, scales, negative_sums, first_sums, .. } = group;
    let sums = negative_sums.as_chunks_mut::<C>().0.iter_mut();
    let sums = sums.zip(first_sums.as_chunks_mut::<C>().0);
    let blocks = scales.as_chunks_mut::<C>().0.iter_mut().zip(sums);
    let blocks = blocks.zip(words.chunks_exact_mut(BLOCK_WORDS * C)).enumerate();
    for (block, ((scales, (negative_sums, first_sums)), words)) in blocks {
        let values = &values[block * BLOCK * width..];
        let mut rows = [[0.0_f32; C]; BLOCK];
        for (row, values) in rows.iter_mut().zip(values.chunks(width)) {
            row.copy_from_slice(&values[..C]);
        }
        let factors;
        (*scales, factors) = scales_and_factors(&rows);
        let mut negative = [0_i32; C];
        let words = words.chunks_exact_mut(2 * C).zip(rows.chunks_exact(4)).enumerate();
        for (word, (words, rows)) in words {
            let (even, odd) = words.split_at_mut(C);
            for c in 0..C {
                let q = |i: usize| nearest(rows[i][c] * factors[c]);
                let [a, b, d, e] = [q(0), q(1), q(2), q(3)];
                even[c] = pair(a, d);
                odd[c] = pair(b, e);
                let sum = a.wrapping_add(b).wrapping_add(d.wrapping_add(e));
                negative[c] = negative[c].wrapping_sub(sum);
            }
            if word == BLOCK / 8 - 1 {
                *first_sums = negative;
            }
        }
        *negative_sums = negative;
    }
}

/// The scales of the columns of a block, and their reciprocals.
#[inline(always)]
fn scales_and_factors<const C: usize>(rows: &[[f32; C]; BLOCK]) -> ([f32; C], [f32; C]) {
    let mut greatest = [0_u32; C];
    for row in rows {
        for (greatest, x) in greatest.iter_mut().zip(row) {
            *greatest = (*greatest).max(magnitude_bits(*x));
        }
    }
    let (mut scales, mut factors) = ([0.0; C], [0.0; C]);
    for c in 0..C {
        (scales[c], factors[c]) = scale_and_factor(greatest[c], GREATEST);
    }
    (scales, factors)
}

/// The lower 16 bits of two integers.
#[inline(always)]
fn pair(a: i32, b: i32) -> u32 {
    (a.cast_unsigned() & 0xffff) | (b.cast_unsigned() << 16)
}
