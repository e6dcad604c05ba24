//! Products for processors without AVX-512 VNNI: integers of 16 bits times bytes, with vectors that have a
//! value of each of 16 rows.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod kernel;
mod portable;

use crate::matmul::integer::formats::{Q4_0, Q4_1, Q4K, Q6K, Q8_0, WeightFormat, q6_k_part};
use crate::matmul::integer::layout::{BLOCK_WORDS, LANES, WORDS};

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::{run_avx_vnni, run_avx2};
pub(super) use portable::run_portable;

// The operations that the kernel and the formats need.

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

// Blocks of quantized weights of 16 rows, as [`RowVectors`].

/// 32 weights of 16 rows.
pub(in crate::matmul::integer) struct RowsPart<V: RowVectors> {
    /// Of four consecutive integers, a vector has the first and the third, and the next vector the second and
    /// the fourth.
    pub pairs: [V::Pairs; BLOCK_WORDS],
    pub scale: V::Floats,
    /// The offset, or with [`WeightFormat::SPLIT`] the scale of the second half.
    pub second: V::Floats,
}

/// Reads a format as [`RowVectors`].
pub(in crate::matmul::integer) trait RowsFormat: WeightFormat {
    /// Scales and offsets of the parts of a block.
    type Scales<V: RowVectors>: Copy;

    /// Reads what the parts share from the interleaved blocks of 16 rows.
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> Self::Scales<V>;

    /// Reads a part.
    fn part<V: RowVectors>(
        v: V,
        blocks: &[u8],
        scales: Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V>;
}

/// The word of each row that starts `at` bytes from the block's begin.
#[inline(always)]
fn words<V: RowVectors>(v: V, blocks: &[u8], at: usize) -> V::Words {
    v.read_words(&blocks[at * LANES..])
}

/// The f16 number of each row that starts `at` bytes from the block's begin.
#[inline(always)]
fn halves<V: RowVectors>(v: V, blocks: &[u8], at: usize) -> V::Floats {
    v.read_halves(&blocks[at * LANES..])
}

/// The same byte in all bytes.
#[inline(always)]
fn bytes<V: RowVectors>(v: V, byte: u8) -> V::Words {
    v.words(u32::from_le_bytes([byte; 4]))
}

/// The pairs of all words.
#[inline(always)]
fn all_pairs<V: RowVectors>(v: V, words: [V::Words; WORDS]) -> [V::Pairs; BLOCK_WORDS] {
    let [none, _] = v.pairs(v.words(0));
    let mut all = [none; BLOCK_WORDS];
    for (pairs, words) in all.as_chunks_mut::<2>().0.iter_mut().zip(&words) {
        *pairs = v.pairs(*words);
    }
    all
}

impl RowsFormat for Q8_0 {
    type Scales<V: RowVectors> = V::Floats;

    #[inline(always)]
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> V::Floats {
        halves(v, blocks, 0)
    }

    #[inline(always)]
    fn part<V: RowVectors>(v: V, blocks: &[u8], scale: V::Floats, _: usize) -> RowsPart<V> {
        let mut unsigned = [v.words(0); WORDS];
        for (p, word) in unsigned.iter_mut().enumerate() {
            *word = v.xor(words(v, blocks, 2 + 4 * p), bytes(v, 128));
        }
        RowsPart { pairs: all_pairs(v, unsigned), scale, second: scale }
    }
}

/// The integers of 4 bits of 16 bytes: the lower halves, then the upper ones.
#[inline(always)]
fn halves_of_bytes<V: RowVectors>(v: V, blocks: &[u8], at: usize) -> [V::Pairs; BLOCK_WORDS] {
    let mut unsigned = [v.words(0); WORDS];
    let (lower, upper) = unsigned.split_at_mut(WORDS / 2);
    for (p, (lower, upper)) in lower.iter_mut().zip(upper).enumerate() {
        let both = words(v, blocks, at + 4 * p);
        *lower = v.and(both, bytes(v, 15));
        *upper = v.and(v.shift_right(both, 4), bytes(v, 15));
    }
    all_pairs(v, unsigned)
}

impl RowsFormat for Q4_0 {
    type Scales<V: RowVectors> = V::Floats;

    #[inline(always)]
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> V::Floats {
        halves(v, blocks, 0)
    }

    #[inline(always)]
    fn part<V: RowVectors>(v: V, blocks: &[u8], scale: V::Floats, _: usize) -> RowsPart<V> {
        RowsPart { pairs: halves_of_bytes(v, blocks, 2), scale, second: scale }
    }
}

impl RowsFormat for Q4_1 {
    /// The scale and the offset.
    type Scales<V: RowVectors> = [V::Floats; 2];

    #[inline(always)]
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> [V::Floats; 2] {
        // The offset is added to the weight.
        [halves(v, blocks, 0), v.mul(halves(v, blocks, 2), v.floats(-1.0))]
    }

    #[inline(always)]
    fn part<V: RowVectors>(v: V, blocks: &[u8], scales: [V::Floats; 2], _: usize) -> RowsPart<V> {
        let [scale, second] = scales;
        RowsPart { pairs: halves_of_bytes(v, blocks, 4), scale, second }
    }
}

impl RowsFormat for Q4K {
    /// The scale and the offset, and a byte of each for each part: the first four, then the others.
    type Scales<V: RowVectors> = ([V::Floats; 2], [[V::Words; 2]; 2]);

    #[inline(always)]
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> Self::Scales<V> {
        let (a, b, c) = (words(v, blocks, 4), words(v, blocks, 8), words(v, blocks, 12));
        // Of the parts 4 to 7, the upper two bits are those of the bytes of the parts 0 to 3.
        let (low, high) = (bytes(v, 15), bytes(v, 48));
        let scales = v.or(v.and(c, low), v.and(v.shift_right(a, 2), high));
        let offsets = v.or(v.and(v.shift_right(c, 4), low), v.and(v.shift_right(b, 2), high));
        let first = bytes(v, 63);
        let both = [halves(v, blocks, 0), halves(v, blocks, 2)];
        (both, [[v.and(a, first), scales], [v.and(b, first), offsets]])
    }

    #[inline(always)]
    fn part<V: RowVectors>(
        v: V,
        blocks: &[u8],
        ([scale, offset], [scales, offsets]): Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V> {
        let (mut unsigned, shift) = ([v.words(0); WORDS], 4 * (part as u32 % 2));
        for (p, word) in unsigned.iter_mut().enumerate() {
            let both = words(v, blocks, 16 + 32 * (part / 2) + 4 * p);
            *word = v.and(v.shift_right(both, shift), bytes(v, 15));
        }
        let at = 8 * (part as u32 % 4);
        let scale_byte = v.and(v.shift_right(scales[part / 4], at), v.words(255));
        let offset_byte = v.and(v.shift_right(offsets[part / 4], at), v.words(255));
        RowsPart {
            pairs: all_pairs(v, unsigned),
            scale: v.mul(scale, v.to_floats(scale_byte)),
            second: v.mul(offset, v.to_floats(offset_byte)),
        }
    }
}

impl RowsFormat for Q6K {
    /// The scale, and a signed byte for each half of a part.
    type Scales<V: RowVectors> = (V::Floats, [V::Words; 4]);

    #[inline(always)]
    fn scales<V: RowVectors>(v: V, blocks: &[u8]) -> Self::Scales<V> {
        let mut scales = [v.words(0); 4];
        for (i, scales) in scales.iter_mut().enumerate() {
            *scales = words(v, blocks, 192 + 4 * i);
        }
        (halves(v, blocks, 208), scales)
    }

    #[inline(always)]
    fn part<V: RowVectors>(
        v: V,
        blocks: &[u8],
        (scale, scales): Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V> {
        let ((low_at, low_shift), (high_at, high_shift)) = q6_k_part(part);
        let mut unsigned = [v.words(0); WORDS];
        for (p, word) in unsigned.iter_mut().enumerate() {
            let low = v.shift_right(words(v, blocks, low_at + 4 * p), low_shift);
            let high = v.shift_right(words(v, blocks, high_at + 4 * p), high_shift);
            let high = v.shift_left(v.and(high, bytes(v, 3)), 4);
            *word = v.or(v.and(low, bytes(v, 15)), high);
        }
        let first = signed_byte(v, scales[part / 2], 2 * (part % 2));
        let second = signed_byte(v, scales[part / 2], 2 * (part % 2) + 1);
        RowsPart {
            pairs: all_pairs(v, unsigned),
            scale: v.mul(scale, first),
            second: v.mul(scale, second),
        }
    }
}

/// Byte `at` of each word as a signed number.
#[inline(always)]
fn signed_byte<V: RowVectors>(v: V, words: V::Words, at: usize) -> V::Floats {
    let byte = v.and(v.shift_right(words, 8 * at as u32), v.words(255));
    // `(byte + 128) mod 256 - 128`
    let signed = v.add(v.xor(byte, v.words(128)), v.words(128_u32.wrapping_neg()));
    v.to_floats(signed)
}
