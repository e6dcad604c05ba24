//! Activations as integers of 16 bits.

use rayon::prelude::*;

use hone_core::simd::{SimdTask, dispatch};

use super::super::kernel::{COLUMN_BLOCK, TokenColumns};

/// Activations that share a scale, as many as weights do.
pub(crate) const BLOCK: usize = 32;

/// Words of 4 bytes that hold the upper bytes of a block, and those that hold its lower bytes.
pub(super) const WORDS: usize = BLOCK / 4;

/// The greatest integer: its bytes are 127 and 0, and no other upper byte is greater.
const GREATEST: f32 = (127 << 8) as f32;

/// If all activations of a block are smaller than this, they count as 0, because the reciprocal of their
/// scale may not be finite.
const LEAST: f32 = 1e-30;

/// Activations `[inner, width]` rounded to integers: `x = (256 upper + lower) scale`, with two signed
/// bytes. [`BLOCK`] activations of a token share a scale, with which the greatest of them is 32512. So
/// they change by at most 1 / 65024 of the greatest one. The integers of a token do not depend on the
/// other tokens.
#[derive(Debug, Default)]
pub(crate) struct IntegerColumns {
    /// Columns of a group.
    columns: usize,
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

impl IntegerColumns {
    /// Rounds the columns of the tokens of `x`, on up to `threads` threads of the current pool. `inner` is
    /// a multiple of [`BLOCK`].
    pub fn round(&mut self, x: TokenColumns<'_>, inner: usize, threads: usize) -> &Self {
        assert!(inner.is_multiple_of(BLOCK) && x.values.len() >= inner * x.width);
        let columns = x.width.min(COLUMN_BLOCK);
        let (blocks, groups) = (inner / BLOCK, x.tokens.div_ceil(columns));
        (self.columns, self.blocks) = (columns, blocks);
        let scales = blocks * columns;
        let words = scales * 2 * WORDS;
        self.words.resize(groups * words, 0);
        self.scales.resize(groups * scales, 0.0);
        self.negative_sums.resize(groups * scales, 0);
        let parts = self.words.par_chunks_mut(words).zip(self.scales.par_chunks_mut(scales));
        let parts = parts.zip(self.negative_sums.par_chunks_mut(scales));
        // One part, and no other thread, for the columns of a few tokens.
        parts.with_min_len(groups.div_ceil(threads.max(1))).enumerate().for_each(
            |(group, ((words, scales), negative_sums))| {
                let (values, width) = (&x.values[group * COLUMN_BLOCK..], x.width);
                dispatch(RoundGroup { columns, values, width, words, scales, negative_sums });
            },
        );
        self
    }

    /// Bytes of `tokens` columns of `inner` activations.
    pub fn bytes(tokens: usize, inner: usize) -> usize {
        let block = 2 * WORDS * size_of::<u32>() + size_of::<f32>() + size_of::<i32>();
        tokens * inner.div_ceil(BLOCK) * block
    }

    /// Columns of a group.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Groups of columns.
    pub(super) fn groups(&self) -> usize {
        self.scales.len() / (self.blocks * self.columns).max(1)
    }

    /// Blocks of a column.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The first block of a group; the group's other blocks follow.
    pub(super) fn group(&self, group: usize) -> IntegerBlock {
        let at = group * self.blocks * self.columns;
        IntegerBlock {
            words: self.words[at * 2 * WORDS..].as_ptr(),
            scales: self.scales[at..].as_ptr(),
            negative_sums: self.negative_sums[at..].as_ptr(),
        }
    }
}

/// Rounds the columns of a group.
struct RoundGroup<'a> {
    /// At most [`COLUMN_BLOCK`].
    columns: usize,
    /// The activations from the group's first column on.
    values: &'a [f32],
    width: usize,
    words: &'a mut [u32],
    scales: &'a mut [f32],
    negative_sums: &'a mut [i32],
}

impl SimdTask for RoundGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.columns {
            1 if self.width == 1 => self.one_column(),
            1 => self.blocks::<1>(),
            2..=4 => self.blocks::<4>(),
            5..=8 => self.blocks::<8>(),
            _ => self.blocks::<COLUMN_BLOCK>(),
        }
    }
}

impl RoundGroup<'_> {
    /// Rounds the only column, in vectors of consecutive activations.
    #[inline(always)]
    fn one_column(self) {
        let blocks = self.values.as_chunks::<BLOCK>().0.iter();
        let blocks = blocks.zip(self.words.as_chunks_mut::<{ 2 * WORDS }>().0);
        let sums = self.scales.iter_mut().zip(self.negative_sums);
        for ((x, words), (scale, negative_sum)) in blocks.zip(sums) {
            let greatest = x.iter().fold(0, |greatest, x| x.abs().to_bits().max(greatest));
            let factor;
            (*scale, factor) = scale_and_factor(f32::from_bits(greatest));
            let integers = x.map(|x| integer(x, factor));
            *negative_sum = -integers.iter().sum::<i32>();
            let bytes = [integers.map(upper), integers.map(lower)];
            let (bytes, _) = bytes.as_flattened().as_chunks();
            words.iter_mut().zip(bytes).for_each(|(word, b)| *word = u32::from_le_bytes(*b));
        }
    }

    /// Rounds the columns in vectors of `N`. No column depends on `N`.
    #[inline(always)]
    fn blocks<const N: usize>(self) {
        let Self { columns, values, width, words, scales, negative_sums } = self;
        let blocks = words.chunks_exact_mut(2 * WORDS * columns);
        let blocks = blocks.zip(scales.chunks_exact_mut(columns));
        let blocks = blocks.zip(negative_sums.chunks_exact_mut(columns));
        for (block, ((words, scales), negative_sums)) in blocks.enumerate() {
            let mut x = [[0.0_f32; N]; BLOCK];
            for (k, x) in x.iter_mut().enumerate() {
                let row = &values[(block * BLOCK + k) * width..];
                match row.first_chunk() {
                    Some(row) if columns == N => *x = *row,
                    _ => x[..columns].copy_from_slice(&row[..columns]),
                }
            }
            let rounded = round(&x);
            scales.copy_from_slice(&rounded.scales[..columns]);
            negative_sums.copy_from_slice(&rounded.negative_sums[..columns]);
            for (to, word) in words.chunks_exact_mut(columns).zip(&rounded.words) {
                to.copy_from_slice(&word[..columns]);
            }
        }
    }
}

/// A rounded block of `N` columns.
struct Rounded<const N: usize> {
    words: [[u32; N]; 2 * WORDS],
    scales: [f32; N],
    negative_sums: [i32; N],
}

/// The scale of a block with this greatest magnitude, and its reciprocal.
#[inline(always)]
fn scale_and_factor(greatest: f32) -> (f32, f32) {
    // If the magnitude is not finite, the scale is not either, and no factor makes an integer that is not 0.
    // Then products are NaN, as those of the activations would be.
    if greatest < LEAST { (0.0, 0.0) } else { (greatest * (1.0 / GREATEST), GREATEST / greatest) }
}

#[inline(always)]
fn integer(x: f32, factor: f32) -> i32 {
    (x * factor).round_ties_even() as i32
}

/// The upper byte of an integer, to which the lower one is added.
#[inline(always)]
fn upper(integer: i32) -> u8 {
    ((integer + 128) >> 8) as u8
}

/// The lower byte of an integer, -128 to 127.
#[inline(always)]
fn lower(integer: i32) -> u8 {
    integer as u8
}

#[inline(always)]
fn round<const N: usize>(x: &[[f32; N]; BLOCK]) -> Rounded<N> {
    // The bits of the greatest magnitude. Those of NaN are greater than all others.
    let mut greatest = [0_u32; N];
    for x in x {
        for (greatest, x) in greatest.iter_mut().zip(x) {
            *greatest = (*greatest).max(x.abs().to_bits());
        }
    }
    let (mut scales, mut factors) = ([0.0; N], [0.0; N]);
    for i in 0..N {
        (scales[i], factors[i]) = scale_and_factor(f32::from_bits(greatest[i]));
    }
    let mut rounded = Rounded { words: [[0; N]; 2 * WORDS], scales, negative_sums: [0; N] };
    let (uppers, lowers) = rounded.words.split_at_mut(WORDS);
    for (k, x) in x.iter().enumerate() {
        let (uppers, lowers, shift) = (&mut uppers[k / 4], &mut lowers[k / 4], k % 4 * 8);
        for i in 0..N {
            let integer = integer(x[i], factors[i]);
            uppers[i] |= u32::from(upper(integer)) << shift;
            lowers[i] |= u32::from(lower(integer)) << shift;
            rounded.negative_sums[i] -= integer;
        }
    }
    rounded
}

#[cfg(test)]
mod tests {
    use hone_core::testing::assert_same_bits;
    use hone_model::testing::waves;

    use super::*;

    /// The integers of a column, and the scale of each block.
    fn integers(x: &IntegerColumns, column: usize) -> (Vec<i32>, Vec<f32>) {
        let (group, column) = (column / x.columns, column % x.columns);
        let first = group * x.blocks;
        let scales = (0..x.blocks).map(|block| x.scales[(first + block) * x.columns + column]);
        let integers = (0..x.blocks * BLOCK).map(|k| {
            let byte = |lower: usize| {
                let word = (first + k / BLOCK) * 2 * WORDS + lower * WORDS + k % BLOCK / 4;
                let word = x.words[word * x.columns + column];
                i32::from(word.to_le_bytes()[k % 4].cast_signed())
            };
            256 * byte(0) + byte(1)
        });
        (integers.collect(), scales.collect())
    }

    #[test]
    fn integers_times_scales_are_the_activations() {
        for (width, tokens) in [(1, 1), (2, 2), (3, 3), (6, 5), (8, 8), (16, 9), (48, 37)] {
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
                    let at = (token / rounded.columns * 3 + block) * rounded.columns;
                    let sum = rounded.negative_sums[at + token % rounded.columns];
                    assert_eq!(sum, -integers[range].iter().sum::<i32>());
                }
                let alone = TokenColumns { values: &values, width: 1, tokens: 1 };
                let mut one = IntegerColumns::default();
                one.round(alone, inner, 1);
                assert_eq!(self::integers(&one, 0), (integers, scales));
            }
            let IntegerColumns { words, scales, negative_sums, .. } = &rounded;
            let bytes = 4 * (words.len() + scales.len() + negative_sums.len());
            let columns = rounded.groups() * rounded.columns;
            assert_eq!(IntegerColumns::bytes(columns, inner), bytes);
        }
    }

    #[test]
    fn every_instruction_set_rounds_to_the_same_integers() {
        let values = waves(4 * BLOCK, 0.7);
        assert_same_bits(|instructions| {
            let (mut words, mut scales) = (vec![0; 4 * 2 * WORDS], vec![0.0; 4]);
            let mut sums = vec![0; 4];
            instructions.run(RoundGroup {
                columns: 4,
                values: &values,
                width: 4,
                words: &mut words,
                scales: &mut scales,
                negative_sums: &mut sums,
            });
            let bits = words.into_iter().chain(sums.into_iter().map(i32::cast_unsigned));
            bits.map(f32::from_bits).chain(scales).collect()
        });
    }

    #[test]
    fn special_values_are_kept_and_tiny_ones_are_zero() {
        let rounded = |values: [f32; 2]| {
            let mut x = [[1.0]; BLOCK];
            (x[3], x[9]) = ([values[0]], [values[1]]);
            if values[0] < 1e-20 {
                x.fill([values[0]]);
            }
            round(&x).scales[0]
        };
        assert!(rounded([f32::NAN, f32::INFINITY]).is_nan());
        assert_eq!(rounded([f32::INFINITY, 1.0]), f32::INFINITY);
        assert_eq!(rounded([1e-40, 1.0]), 0.0);
        assert_eq!(round(&[[0.0]; BLOCK]).words, [[0]; 2 * WORDS]);
    }
}
