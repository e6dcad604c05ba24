//! The operations that the kernel and the formats need.

use std::ops::Range;

use super::activations::LANES;

/// Vectors with a value of each of 16 rows. A value of this type proves that the processor has the
/// instructions.
///
/// All methods are inlined into a function that enables the instructions. So generic code that uses them has
/// `#[inline(always)]`, and no closures.
pub(super) trait RowVectors: Copy {
    /// A word of 4 bytes, or an integer of 32 bits, of each row.
    type Words: Copy;

    /// A number of each row.
    type Floats: Copy;

    /// Four weights of each row, as products take them.
    type Weights: Copy;

    /// Sums of products of each row.
    type Dots: Copy;

    /// A word of weights is multiplied with two words of a column, one after another. These are the words from
    /// one word of weights to the next, and from the first of the two to the second.
    const STEPS: [usize; 2];

    /// Reads the word of each row that starts `at` bytes from the begin of interleaved blocks.
    ///
    /// # Safety
    /// The blocks have it.
    unsafe fn read_words(self, blocks: *const u8, at: usize) -> Self::Words;

    /// Reads the f16 number of each row that starts `at` bytes from the begin of interleaved blocks.
    ///
    /// # Safety
    /// The blocks have it.
    unsafe fn read_halves(self, blocks: *const u8, at: usize) -> Self::Floats;

    /// The same word in all rows.
    fn words(self, word: u32) -> Self::Words;

    /// The same number in all rows.
    fn floats(self, x: f32) -> Self::Floats;

    fn and(self, a: Self::Words, b: Self::Words) -> Self::Words;
    fn xor(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// Words shifted by fewer than 32 bits.
    fn shift_left(self, words: Self::Words, bits: u32) -> Self::Words;

    /// Words shifted by fewer than 32 bits; zeros move in.
    fn shift_right(self, words: Self::Words, bits: u32) -> Self::Words;

    /// Weights of unsigned bytes.
    fn weights(self, words: Self::Words) -> Self::Weights;

    /// Sums that begin with these integers.
    fn dots(self, start: Self::Words) -> Self::Dots;

    /// Adds the products of weights with the first (`J` = 0) or the second of their words of a column.
    fn add_products<const J: usize>(
        self,
        dots: Self::Dots,
        weights: Self::Weights,
        x: u32,
    ) -> Self::Dots;

    /// The sums modulo 2^32.
    fn total(self, dots: Self::Dots) -> Self::Words;

    /// The nearest numbers of signed integers.
    fn to_floats(self, words: Self::Words) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// `a b + c`, rounded once if the processor has the instruction.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// The numbers of the rows.
    fn values(self, x: Self::Floats) -> [f32; LANES];

    /// Writes the sums of these rows and their biases to `out`, whose first value is that of the first of the
    /// rows and the first column.
    #[inline(always)]
    fn write<const C: usize>(
        self,
        sums: &[Self::Floats; C],
        bias: &[f32; LANES],
        rows: Range<usize>,
        (out, width): (&mut [f32], usize),
    ) {
        let mut values = [[0.0; LANES]; C];
        for (values, sum) in values.iter_mut().zip(sums) {
            *values = self.values(*sum);
        }
        for (out, row) in out.chunks_mut(width).zip(rows) {
            for (out, column) in out.iter_mut().zip(&values) {
                *out = bias[row] + column[row];
            }
        }
    }
}
