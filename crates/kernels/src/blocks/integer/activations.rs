//! The order of activations as integers, and their rounding to pairs of 16 bits, with the instructions that the
//! compiler selects.

use hone_core::simd::SimdTask;

use crate::vector::{magnitude_bits, nearest, scale_and_factor};

/// Activations that share a scale, as many as weights do.
pub(super) const BLOCK: usize = 32;

/// Words of 4 bytes that a byte of each activation of a block takes, or of each weight.
pub(super) const WORDS: usize = BLOCK / 4;

/// Words that a block of one column takes: two bytes for each activation, the scale, the sum of the integers, and that
/// of their first half, both negated.
pub(super) const BLOCK_WORDS: usize = 2 * WORDS + 3;

/// The word of a block with the scale, an f32.
pub(super) const SCALE: usize = 2 * WORDS;

/// The word with the sum.
pub(super) const NEGATIVE_SUM: usize = SCALE + 1;

/// The word with the sum of the first half.
pub(super) const FIRST_SUM: usize = SCALE + 2;

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

/// Consecutive blocks of a group of columns to round.
pub(super) struct ColumnGroup<'a> {
    /// At most [`LANES`].
    pub columns: usize,
    /// The activations from the first block and column on, in rows of `width`.
    pub values: &'a [f32],
    pub width: usize,
    /// For each block, `[BLOCK_WORDS, columns]`.
    pub blocks: &'a mut [u32],
}

/// The greatest integer, 32512, with the bytes 127 and 0. As two signed bytes, those above 32639 would need an
/// upper byte of 128.
pub(super) const GREATEST: f32 = (127 << 8) as f32;

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
    let ColumnGroup { values, width, blocks, .. } = group;
    let blocks = blocks.as_chunks_mut::<C>().0.as_chunks_mut::<BLOCK_WORDS>().0;
    for (block, words) in blocks.iter_mut().enumerate() {
        let values = &values[block * BLOCK * width..];
        let mut rows = [[0.0_f32; C]; BLOCK];
        for (row, values) in rows.iter_mut().zip(values.chunks(width)) {
            row.copy_from_slice(&values[..C]);
        }
        let (scales, factors) = scales_and_factors(&rows);
        words[SCALE] = scales.map(f32::to_bits);
        let mut negative = [0_u32; C];
        for word in 0..WORDS {
            for c in 0..C {
                let q = |i: usize| nearest(rows[4 * word + i][c] * factors[c]).cast_unsigned();
                let [a, b, d, e] = [q(0), q(1), q(2), q(3)];
                words[2 * word][c] = pair(a, d);
                words[2 * word + 1][c] = pair(b, e);
                let sum = a.wrapping_add(b).wrapping_add(d.wrapping_add(e));
                negative[c] = negative[c].wrapping_sub(sum);
            }
            if word == WORDS / 2 - 1 {
                words[FIRST_SUM] = negative;
            }
        }
        words[NEGATIVE_SUM] = negative;
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
fn pair(a: u32, b: u32) -> u32 {
    (a & 0xffff) | (b << 16)
}
