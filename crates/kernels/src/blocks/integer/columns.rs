//! Activations as integers of 16 bits.

use hone_core::simd::dispatch;

use super::activations::{BLOCK, BLOCK_ROWS, ColumnGroup, IntegerGroup, LANES, RoundToPairs};
#[cfg(target_arch = "x86_64")]
use super::round_avx512::round_group as round_to_bytes;
use crate::columns::TokenColumns;
use crate::hot_team::for_each_chunk;
use crate::processor::IntegerInstructions;

/// Parts of a rounding that threads share at a time.
const PARTS: usize = 16;

/// Activations `[inner, width]` rounded to integers, times a scale. `BLOCK` activations of a token share a
/// scale, with which the greatest of them is 32512. So rounding changes an activation by at most about
/// 1 / 65024 of the greatest one in its block. The integers of a token do not depend on the other tokens.
///
/// The order of the integers depends on the instructions that multiply them:
///
/// - as bytes: a word has four consecutive activations of a column. With `x = (256 upper + lower) scale`, a
///   block has half of its words for the upper bytes, then as many for the lower ones, both signed.
/// - as pairs of 16 bits: of four consecutive activations, a word has the first and the third, and the next
///   word the second and the fourth.
#[derive(Debug, Default)]
pub struct IntegerColumns {
    instructions: IntegerInstructions,
    /// Groups of [`LANES`] columns.
    whole: usize,
    /// Columns of the last group, 0 without one that is not whole.
    last: usize,
    /// Blocks of a column.
    blocks: usize,
    /// For each group of columns, for each block, for each of [`BLOCK_ROWS`] rows: those of the group's columns,
    /// side by side.
    rows: Vec<u32>,
}

impl IntegerColumns {
    /// Columns for some instructions, which this processor has.
    #[cfg(test)]
    pub fn with(instructions: IntegerInstructions) -> Self {
        Self { instructions, ..Self::default() }
    }

    /// Rounds the columns of the tokens of `x`, on up to `threads` threads of the current pool, each with at
    /// least `least` activations. `inner` is a multiple of `BLOCK`.
    pub fn round(
        &mut self,
        x: TokenColumns<'_>,
        inner: usize,
        (threads, least): (usize, usize),
    ) -> &Self {
        assert!(inner.is_multiple_of(BLOCK) && x.values.len() >= inner * x.width);
        self.blocks = inner / BLOCK;
        self.whole = x.tokens / LANES;
        // The kernels compute these numbers of columns.
        self.last = match x.tokens % LANES {
            5 => 6,
            7 => 8,
            9.. => LANES,
            tokens => tokens,
        };
        assert!(self.all_columns() <= x.width);
        let all = self.blocks * self.all_columns();
        self.rows.resize(all * BLOCK_ROWS, 0);
        let instructions = self.instructions;
        let threads = threads.min(all * BLOCK / least.max(1)).max(1);
        let mut parts = self.parts(x, (2 * threads).div_ceil(self.groups().max(1)));
        if threads == 1 {
            parts.for_each(|part| round_group(instructions, part));
            return self;
        }
        loop {
            let mut some: [Option<ColumnGroup<'_>>; PARTS] = std::array::from_fn(|_| parts.next());
            if some[0].is_none() {
                break;
            }
            for_each_chunk(&mut some, 1, |_, part| {
                let part = part.iter_mut().filter_map(Option::take);
                part.for_each(|part| round_group(instructions, part));
            });
        }
        drop(parts);
        self
    }

    /// The groups of columns to round, each divided into up to `count` ranges of its blocks.
    fn parts<'a>(
        &'a mut self,
        x: TokenColumns<'a>,
        count: usize,
    ) -> impl Iterator<Item = ColumnGroup<'a>> {
        let Self { whole, last, blocks, .. } = *self;
        let groups = 0..self.groups();
        let step = blocks.div_ceil(count.max(1)).max(1);
        let groups = groups.map(move |group| (group, if group < whole { LANES } else { last }));
        let ranges = groups.flat_map(move |(group, columns)| {
            (0..blocks).step_by(step).map(move |block| (group, columns, block))
        });
        let mut rows = &mut self.rows[..];
        ranges.map(move |(group, columns, block)| {
            let count = step.min(blocks - block) * columns * BLOCK_ROWS;
            ColumnGroup {
                columns,
                values: &x.values[block * BLOCK * x.width + group * LANES..],
                width: x.width,
                rows: rows.split_off_mut(..count).unwrap_or_default(),
            }
        })
    }

    /// Bytes of `tokens` columns of `inner` activations.
    pub fn bytes(tokens: usize, inner: usize) -> usize {
        tokens * inner.div_ceil(BLOCK) * BLOCK_ROWS * size_of::<u32>()
    }

    /// The instructions that the order of the integers is for.
    pub(super) fn instructions(&self) -> IntegerInstructions {
        self.instructions
    }

    /// Columns of all groups.
    pub(super) fn all_columns(&self) -> usize {
        self.whole * LANES + self.last
    }

    /// Groups of columns.
    pub(super) fn groups(&self) -> usize {
        self.whole + usize::from(self.last > 0)
    }

    /// Blocks of a column.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// A group of columns: of [`LANES`], the last one of 1, 2, 3, 4, 6, 8 or [`LANES`].
    pub(super) fn group(&self, group: usize) -> IntegerGroup<'_> {
        let columns = if group < self.whole { LANES } else { self.last };
        let column_rows = self.blocks * BLOCK_ROWS;
        let rows = &self.rows[group * LANES * column_rows..][..columns * column_rows];
        IntegerGroup { columns, rows }
    }
}

fn round_group(instructions: IntegerInstructions, group: ColumnGroup<'_>) {
    #[cfg(target_arch = "x86_64")]
    if instructions == IntegerInstructions::Avx512Vnni {
        assert!(instructions.is_available(), "{instructions:?}");
        // SAFETY: the assertion checked the processor.
        return unsafe { round_to_bytes(group) };
    }
    debug_assert!(!instructions.use_bytes());
    dispatch(RoundToPairs(group));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::integer::activations::BLOCK_WORDS;
    use crate::testing::waves;

    /// The integers of a column, and the scale, the sum and the first half's sum of each block.
    fn column(x: &IntegerColumns, column: usize) -> (Vec<i32>, Vec<(f32, i32, i32)>) {
        let (group, column) = (x.group(column / LANES), column % LANES);
        let columns = group.columns;
        let integer = |k: usize| {
            let words = &group.rows[k / BLOCK * BLOCK_ROWS * columns..];
            let word = |row: usize| words[row * columns + column];
            let (row, at) = (k % BLOCK / 4, k % 4);
            if x.instructions.use_bytes() {
                let byte = |row: usize| i32::from(word(row).to_le_bytes()[at].cast_signed());
                256 * byte(row) + byte(BLOCK_WORDS / 2 + row)
            } else {
                i32::from((word(2 * row + at % 2) >> (16 * (at / 2))) as i16)
            }
        };
        let block = |at: usize| {
            let row =
                |row: usize| group.rows[(at * BLOCK_ROWS + BLOCK_WORDS + row) * columns + column];
            let sum = |at| -row(at).cast_signed();
            (f32::from_bits(row(0)), sum(1), sum(2))
        };
        ((0..x.blocks * BLOCK).map(integer).collect(), (0..x.blocks).map(block).collect())
    }

    fn rounded(
        instructions: IntegerInstructions,
        (values, width, tokens): (&[f32], usize, usize),
    ) -> IntegerColumns {
        let mut rounded = IntegerColumns::with(instructions);
        let inner = values.len() / width;
        rounded.round(TokenColumns { values, width, tokens }, inner, (2, 1));
        rounded
    }

    #[test]
    fn integers_times_scales_are_the_activations() {
        for (width, tokens) in
            [(1, 1), (2, 2), (3, 3), (6, 5), (8, 8), (16, 9), (16, 3), (48, 37), (48, 41)]
        {
            let x = waves(3 * BLOCK * width, 0.3);
            for instructions in IntegerInstructions::all() {
                let all = rounded(instructions, (&x, width, tokens));
                for token in 0..tokens {
                    let (integers, blocks) = column(&all, token);
                    let values: Vec<f32> = x.iter().skip(token).step_by(width).copied().collect();
                    for (at, (scale, sum, first)) in blocks.iter().enumerate() {
                        let integers = &integers[at * BLOCK..][..BLOCK];
                        for (x, q) in values[at * BLOCK..].iter().zip(integers) {
                            let error = (x - *q as f32 * scale).abs();
                            assert!(error <= 0.501 * scale, "{x} {q} {scale}");
                        }
                        assert!(integers.iter().any(|q| q.abs() == 32512));
                        assert_eq!(*sum, integers.iter().sum::<i32>());
                        assert_eq!(*first, integers[..BLOCK / 2].iter().sum::<i32>());
                    }
                    let alone = rounded(instructions, (&values, 1, 1));
                    assert_eq!(column(&alone, 0), (integers, blocks));
                }
                let bytes = IntegerColumns::bytes(all.all_columns(), 3 * BLOCK);
                assert_eq!(bytes, 4 * all.rows.len());
            }
        }
    }

    #[test]
    fn every_instruction_set_rounds_to_the_same_integers() {
        for (width, tokens) in [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (16, 16), (48, 41)]
        {
            let mut x = waves(2 * BLOCK * width, 1.3);
            // Half of a unit, which is rounded to the even integer.
            x[0] = 32512.0;
            x[width] = 2.5;
            x[2 * width] = -3.5;
            let columns = |instructions| {
                let all = rounded(instructions, (&x, width, tokens));
                (0..tokens).map(|token| column(&all, token)).collect::<Vec<_>>()
            };
            let expected = columns(IntegerInstructions::PORTABLE);
            assert_eq!(expected[0].0[..3], [32512, 2, -4]);
            for instructions in IntegerInstructions::all() {
                assert_eq!(columns(instructions), expected, "{instructions:?} {width}");
            }
        }
    }

    #[test]
    fn special_values_are_kept_and_tiny_ones_are_zero() {
        for (instructions, width) in
            IntegerInstructions::all().into_iter().flat_map(|i| [(i, 1), (i, 2)])
        {
            let scale = |values: [f32; 2], others: f32| {
                let mut x = vec![others; BLOCK * width];
                (x[3 * width], x[9 * width]) = (values[0], values[1]);
                let all = rounded(instructions, (&x, width, width));
                let (words, rest) = all.rows.split_at(BLOCK_WORDS * width);
                (f32::from_bits(rest[0]), words.to_vec())
            };
            assert!(scale([f32::NAN, f32::INFINITY], 1.0).0.is_nan());
            assert!(scale([1.0, f32::NAN], f32::INFINITY).0.is_nan());
            assert_eq!(scale([f32::NEG_INFINITY, 1.0], 1.0).0, f32::INFINITY);
            let zeros = vec![0; BLOCK_WORDS * width];
            assert_eq!(scale([1e-40, -1e-38], 1e-39), (0.0, zeros.clone()));
            assert_eq!(scale([0.0, -0.0], 0.0), (0.0, zeros));
        }
    }
}
