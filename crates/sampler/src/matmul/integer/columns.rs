//! Activations as integers of 16 bits.

#![cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only the kernel for x86-64 reads the integers")
)]

use rayon::prelude::*;

use super::super::kernel::{COLUMN_BLOCK, TokenColumns};
use super::layout::{BLOCK, ColumnGroup, IntegerBlock, WORDS};
use super::support::has_instructions;
use crate::matmul::padded_width;

/// Activations `[inner, width]` rounded to integers: `x = (256 upper + lower) scale`, with two signed
/// bytes. [`BLOCK`] activations of a token share a scale, with which the greatest of them is 32512. So
/// rounding changes an activation by at most about 1 / 65024 of the greatest one in its block. The integers
/// of a token do not depend on the other tokens.
#[derive(Debug, Default)]
pub(crate) struct IntegerColumns {
    /// Groups of [`COLUMN_BLOCK`] columns.
    whole: usize,
    /// Columns of the last group, 0 without one that is not whole.
    last: usize,
    /// Blocks of a column.
    blocks: usize,
    /// For each group of columns, for each block: [`WORDS`] words of upper bytes, then as many of lower
    /// ones. A word has four consecutive activations of a column, and the words of the group's columns
    /// are side by side.
    words: Vec<u32>,
    /// For each group, for each block, for each column.
    scales: Vec<f32>,
    /// The sums of the integers, negated, in the same order.
    negative_sums: Vec<i32>,
}

impl IntegerColumns {
    /// Rounds the columns of the tokens of `x`, on up to `threads` threads of the current pool. `inner` is
    /// a multiple of [`BLOCK`].
    pub fn round(&mut self, x: TokenColumns<'_>, inner: usize, threads: usize) -> &Self {
        assert!(inner.is_multiple_of(BLOCK) && x.values.len() >= inner * x.width);
        let blocks = inner / BLOCK;
        self.blocks = blocks;
        (self.whole, self.last) = if x.width < COLUMN_BLOCK {
            (0, x.width)
        } else {
            (x.tokens / COLUMN_BLOCK, padded_width(x.tokens % COLUMN_BLOCK))
        };
        let (scales, words) = (blocks * COLUMN_BLOCK, blocks * COLUMN_BLOCK * 2 * WORDS);
        let all = blocks * (self.whole * COLUMN_BLOCK + self.last);
        self.words.resize(all * 2 * WORDS, 0);
        self.scales.resize(all, 0.0);
        self.negative_sums.resize(all, 0);
        let round = |group: usize, words: &mut [u32], scales: &mut [f32], sums: &mut [i32]| {
            let (values, width) = (&x.values[group * COLUMN_BLOCK..], x.width);
            let columns = scales.len() / blocks.max(1);
            let group = ColumnGroup { columns, values, width, words, scales, negative_sums: sums };
            round_group(group);
        };
        let groups = self.whole + usize::from(self.last > 0);
        if threads.min(groups) <= 1 {
            let parts = self.words.chunks_mut(words).zip(self.scales.chunks_mut(scales));
            let parts = parts.zip(self.negative_sums.chunks_mut(scales)).enumerate();
            parts.for_each(|(i, ((words, scales), sums))| round(i, words, scales, sums));
            return self;
        }
        let parts = self.words.par_chunks_mut(words).zip(self.scales.par_chunks_mut(scales));
        let parts = parts.zip(self.negative_sums.par_chunks_mut(scales)).enumerate();
        parts
            .with_min_len((groups / threads).max(1))
            .for_each(|(i, ((words, scales), sums))| round(i, words, scales, sums));
        self
    }

    /// Bytes of `tokens` columns of `inner` activations.
    pub fn bytes(tokens: usize, inner: usize) -> usize {
        let block = 2 * WORDS * size_of::<u32>() + size_of::<f32>() + size_of::<i32>();
        tokens * inner.div_ceil(BLOCK) * block
    }

    /// Groups of [`COLUMN_BLOCK`] columns.
    pub(super) fn whole_groups(&self) -> usize {
        self.whole
    }

    /// Columns of the group after them: 0, 1, 2, 3, 4, 6, 8 or 16.
    pub(super) fn last_columns(&self) -> usize {
        self.last
    }

    /// Blocks of a column.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The first block of a group; the group's other blocks follow.
    pub(super) fn group(&self, group: usize) -> IntegerBlock {
        let at = group * self.blocks * COLUMN_BLOCK;
        IntegerBlock {
            words: self.words[at * 2 * WORDS..].as_ptr(),
            scales: self.scales[at..].as_ptr(),
            negative_sums: self.negative_sums[at..].as_ptr(),
        }
    }
}

fn round_group(group: ColumnGroup<'_>) {
    assert!(has_instructions(), "the processor does not have AVX-512 with VNNI");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the assertion checked the processor.
    unsafe {
        super::round::round_group(group);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = group;
}

#[cfg(test)]
mod tests {
    use hone_core::testing::skip_without;
    use hone_model::testing::waves;

    use super::*;

    fn is_supported() -> bool {
        let supported = has_instructions();
        if !supported {
            skip_without("AVX-512 with VNNI");
        }
        supported
    }

    /// Where a column is: the first value of its group, and its place among the group's columns.
    fn place(x: &IntegerColumns, column: usize) -> (usize, usize, usize) {
        let group = column / COLUMN_BLOCK;
        let columns = if group < x.whole { COLUMN_BLOCK } else { x.last };
        (group * x.blocks * COLUMN_BLOCK, column % COLUMN_BLOCK, columns)
    }

    /// The integers of a column, and the scale of each block.
    fn integers(x: &IntegerColumns, column: usize) -> (Vec<i32>, Vec<f32>) {
        let (first, column, columns) = place(x, column);
        let scales = (0..x.blocks).map(|block| x.scales[first + block * columns + column]);
        let integers = (0..x.blocks * BLOCK).map(|k| {
            let byte = |lower: usize| {
                let word = (k / BLOCK) * 2 * WORDS + lower * WORDS + k % BLOCK / 4;
                let word = x.words[first * 2 * WORDS + word * columns + column];
                i32::from(word.to_le_bytes()[k % 4].cast_signed())
            };
            256 * byte(0) + byte(1)
        });
        (integers.collect(), scales.collect())
    }

    #[test]
    fn integers_times_scales_are_the_activations() {
        if !is_supported() {
            return;
        }
        for (width, tokens) in
            [(1, 1), (2, 2), (3, 3), (6, 5), (8, 8), (16, 9), (16, 16), (48, 37), (48, 41)]
        {
            let inner = 3 * BLOCK;
            let x = waves(inner * width, 0.3);
            let columns = TokenColumns { values: &x, width, tokens };
            let mut rounded = IntegerColumns::default();
            rounded.round(columns, inner, 2);
            for token in 0..tokens {
                let (integers, scales) = integers(&rounded, token);
                let values: Vec<f32> = x.iter().skip(token).step_by(width).copied().collect();
                for (block, scale) in scales.iter().enumerate() {
                    let range = block * BLOCK..(block + 1) * BLOCK;
                    for (x, q) in values[range.clone()].iter().zip(&integers[range.clone()]) {
                        assert!((x - *q as f32 * scale).abs() <= 0.501 * scale, "{x} {q} {scale}");
                    }
                    assert!(integers[range.clone()].iter().any(|q| q.abs() == 32512));
                    let (first, column, columns) = place(&rounded, token);
                    let sum = rounded.negative_sums[first + block * columns + column];
                    assert_eq!(sum, -integers[range].iter().sum::<i32>());
                }
                let alone = TokenColumns { values: &values, width: 1, tokens: 1 };
                let mut one = IntegerColumns::default();
                one.round(alone, inner, 1);
                assert_eq!(self::integers(&one, 0), (integers, scales));
            }
            let IntegerColumns { words, scales, negative_sums, .. } = &rounded;
            let bytes = 4 * (words.len() + scales.len() + negative_sums.len());
            let columns = rounded.whole * COLUMN_BLOCK + rounded.last;
            assert_eq!(IntegerColumns::bytes(columns, inner), bytes);
        }
    }

    #[test]
    fn special_values_are_kept_and_tiny_ones_are_zero() {
        if !is_supported() {
            return;
        }
        for width in [1, 2] {
            let scale = |values: [f32; 2], others: f32| {
                let mut x = vec![others; BLOCK * width];
                (x[3 * width], x[9 * width]) = (values[0], values[1]);
                let mut rounded = IntegerColumns::default();
                rounded.round(TokenColumns { values: &x, width, tokens: width }, BLOCK, 1);
                (rounded.scales[0], rounded.words)
            };
            assert!(scale([f32::NAN, f32::INFINITY], 1.0).0.is_nan());
            assert!(scale([1.0, f32::NAN], f32::INFINITY).0.is_nan());
            assert_eq!(scale([f32::NEG_INFINITY, 1.0], 1.0).0, f32::INFINITY);
            assert_eq!(scale([1e-40, -1e-38], 1e-39), (0.0, vec![0; 2 * WORDS * width]));
            assert_eq!(scale([0.0, -0.0], 0.0), (0.0, vec![0; 2 * WORDS * width]));
        }
    }
}
