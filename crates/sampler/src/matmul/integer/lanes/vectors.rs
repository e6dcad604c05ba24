//! The operations that the kernel and the formats need.

use crate::matmul::integer::layout::LANES;

/// Vectors with a value of each of 16 rows. A value of this type proves that the processor has the
/// instructions.
///
/// All methods are inlined into a function that enables the instructions. So generic code that uses them has
/// `#[inline(always)]`, and no closures.
pub(in crate::matmul::integer) trait RowVectors: Copy {
    /// A word of 4 bytes, or an integer of 32 bits, of each row.
    type Words: Copy;

    /// Two weights of each row, as integers of 16 bits.
    type Pairs: Copy;

    /// A number of each row.
    type Floats: Copy;

    /// Reads a word of each row from the first bytes.
    fn read_words(self, from: &[u8]) -> Self::Words;

    /// Reads an f16 number of each row from the first bytes.
    fn read_halves(self, from: &[u8]) -> Self::Floats;

    /// The same word in all rows.
    fn words(self, word: u32) -> Self::Words;

    /// The same number in all rows.
    fn floats(self, x: f32) -> Self::Floats;

    /// The bits of both.
    fn and(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// The bits of either.
    fn or(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// The bits of one of both.
    fn xor(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// Sums modulo 2^32.
    fn add(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// Words shifted by fewer than 32 bits.
    fn shift_left(self, words: Self::Words, bits: u32) -> Self::Words;

    /// Words shifted by fewer than 32 bits; zeros move in.
    fn shift_right(self, words: Self::Words, bits: u32) -> Self::Words;

    /// Unsigned bytes of each word as integers of 16 bits: the first and the third, and the second and the
    /// fourth.
    fn pairs(self, words: Self::Words) -> [Self::Pairs; 2];

    /// Adds to `sums` both products of weights with the signed integers of 16 bits in `x`.
    fn add_products(self, sums: Self::Words, weights: Self::Pairs, x: u32) -> Self::Words;

    /// The nearest numbers of signed integers.
    fn to_floats(self, words: Self::Words) -> Self::Floats;

    /// Products.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// `a b + c`, rounded once if the processor has the instruction.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// The numbers of the rows.
    fn values(self, x: Self::Floats) -> [f32; LANES];
}
