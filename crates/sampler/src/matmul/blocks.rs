//! Quantized weights for the kernel for a few tokens: the formats with 32 weights to a scale.
//!
//! A block has 32 weights of a row: a scale in f16, then integers of 8 or 4 bits. An integer times the
//! scale has at most 19 significant bits, so its f32 is exact. The only rounded operation is the addition
//! of the offset of Q4_1, and sums have the bits of those over the dequantized weights.

use std::arch::x86_64::{
    __m512, __m512i, _mm_loadu_si128, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi128_si512,
    _mm512_castsi256_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_fmadd_ps,
    _mm512_inserti32x4, _mm512_inserti64x4, _mm512_mul_ps, _mm512_permutex2var_epi64,
    _mm512_set_epi64, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_set4_epi32,
    _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_sub_epi8, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

use super::narrow::{LANES, RowPointers, Transposed};

/// Weights of a block.
const BLOCK: usize = 32;

/// Words of a block's integers of 8 bits.
const WORDS: usize = BLOCK / 4;

/// Words of a block's integers of 4 bits.
const HALF_WORDS: usize = WORDS / 2;

/// 2^-24. Scales are multiplied by it, because an integer is widened where it is the upper byte of a word.
/// The least positive scale is 2^-24 too, so that the product is exact.
const UPPER_BYTE: f32 = 1.0 / (1 << 24) as f32;

/// Blocks of a scale and 32 integers of 8 bits.
pub(super) struct Q8_0;

/// Blocks of a scale and 16 bytes: the integers `j` and `j + 16` of 4 bits, plus 8.
pub(super) struct Q4_0;

/// Blocks of a scale, an offset, and 16 bytes as in [`Q4_0`] but without the 8.
pub(super) struct Q4_1;

impl Transposed for Q8_0 {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = size_of::<u16>() + BLOCK;
    const PER_WORD: usize = 4;

    type Words = [__m512i; WORDS];
    type Scale = __m512;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn read<const PART: bool>(rows: RowPointers, _: usize) -> (Self::Words, Self::Scale) {
        // SAFETY: the caller guarantees that the blocks can be read.
        unsafe { (transpose_8(rows.skip(2)), halves(rows, UPPER_BYTE)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn widen(words: __m512i, i: usize, scale: Self::Scale) -> __m512 {
        _mm512_mul_ps(upper(words, i), scale)
    }
}

impl Transposed for Q4_0 {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = size_of::<u16>() + BLOCK / 2;
    const PER_WORD: usize = 4;

    type Words = [__m512i; WORDS];
    type Scale = __m512;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn read<const PART: bool>(rows: RowPointers, _: usize) -> (Self::Words, Self::Scale) {
        // SAFETY: the caller guarantees that the blocks can be read.
        let (words, scale) = unsafe { (transpose_4(rows.skip(2)), halves(rows, UPPER_BYTE)) };
        (words.map(|words| _mm512_sub_epi8(words, _mm512_set1_epi8(8))), scale)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn widen(words: __m512i, i: usize, scale: Self::Scale) -> __m512 {
        _mm512_mul_ps(upper(words, i), scale)
    }
}

impl Transposed for Q4_1 {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = 2 * size_of::<u16>() + BLOCK / 2;
    const PER_WORD: usize = 4;

    type Words = [__m512i; WORDS];
    /// The scales and the offsets.
    type Scale = (__m512, __m512);

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn read<const PART: bool>(rows: RowPointers, _: usize) -> (Self::Words, Self::Scale) {
        // SAFETY: the caller guarantees that the blocks can be read.
        unsafe {
            let scales = (halves(rows, UPPER_BYTE), halves(rows.skip(2), 1.0));
            (transpose_4(rows.skip(4)), scales)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn widen(words: __m512i, i: usize, (scale, offset): Self::Scale) -> __m512 {
        // The product is exact, so that the sum is rounded as if the product were computed before.
        _mm512_fmadd_ps(upper(words, i), scale, offset)
    }
}

/// The f16 numbers at the beginning of each row, times `factor`.
///
/// # Safety
/// The processor has AVX-512, and the numbers can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
unsafe fn halves(rows: RowPointers, factor: f32) -> __m512 {
    let mut halves = [0_u16; LANES];
    for (i, half) in halves.iter_mut().enumerate() {
        // SAFETY: the caller's guarantee.
        *half = unsafe { rows.at(i).cast::<u16>().read_unaligned() };
    }
    // SAFETY: the array has 16 values.
    let halves = unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) };
    _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(factor))
}

/// Byte `i` of each word, with its sign, times 2^24.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn upper(words: __m512i, i: usize) -> __m512 {
    // The shift, the permutations and the selection are executed by different units.
    _mm512_cvtepi32_ps(match i {
        0 => _mm512_slli_epi32::<24>(words),
        1 => _mm512_shuffle_epi8(words, upper_byte::<1>()),
        2 => _mm512_shuffle_epi8(words, upper_byte::<2>()),
        _ => _mm512_and_si512(words, _mm512_set1_epi32(0xff << 24)),
    })
}

/// The permutation that makes byte `I` of each word its upper one, and the others 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper_byte<const I: i32>() -> __m512i {
    /// A byte with this bit selects 0.
    const ZERO: i32 = 0x0080_8080;
    let word = |first: i32| ((first + I) << 24) | ZERO;
    _mm512_set4_epi32(word(12), word(8), word(4), word(0))
}

/// Transposes the first 8 words of 16 rows.
///
/// # Safety
/// The processor has AVX-512, and the words can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_8(from: RowPointers) -> [__m512i; WORDS] {
    let zero = _mm512_setzero_si512();
    // Row i, then row i + 8.
    let mut rows = [zero; WORDS];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's guarantee.
        let (low, high) = unsafe {
            let read = |row| _mm256_loadu_si256(from.at(row).cast());
            (read(i), read(i + WORDS))
        };
        *row = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    let mut pairs = [zero; WORDS];
    for i in 0..4 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // `quads[4 i + c]` has word c of the rows 4 i to 4 i + 3 in its 128-bit part 0, word 4 + c in part
    // 1, and the same of the rows 8 + 4 i and so on in the parts 2 and 3.
    let mut quads = [zero; WORDS];
    for i in [0, 4] {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // 8 and above select from the second operand.
    let even = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
    let odd = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
    let mut words = [zero; WORDS];
    for c in 0..4 {
        words[c] = _mm512_permutex2var_epi64(quads[c], even, quads[4 + c]);
        words[4 + c] = _mm512_permutex2var_epi64(quads[c], odd, quads[4 + c]);
    }
    words
}

/// Transposes the first 4 words of 16 rows, and splits each byte into a byte with its lower four bits,
/// in the first four vectors, and one with its upper four bits.
///
/// # Safety
/// The processor has AVX-512, and the words can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_4(from: RowPointers) -> [__m512i; WORDS] {
    let zero = _mm512_setzero_si512();
    // The rows i, i + 4, i + 8 and i + 12.
    let mut rows = [zero; HALF_WORDS];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's guarantee.
        let read = |row| unsafe { _mm_loadu_si128(from.at(row).cast()) };
        let first = _mm512_castsi128_si512(read(i));
        let two = _mm512_inserti32x4::<1>(first, read(i + 4));
        let three = _mm512_inserti32x4::<2>(two, read(i + 8));
        *row = _mm512_inserti32x4::<3>(three, read(i + 12));
    }
    let [a, b, c, d] = rows;
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    let transposed = [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ];
    let lower = _mm512_set1_epi8(15);
    let mut words = [zero; WORDS];
    for (i, both) in transposed.into_iter().enumerate() {
        words[i] = _mm512_and_si512(both, lower);
        words[HALF_WORDS + i] = _mm512_and_si512(_mm512_srli_epi32::<4>(both), lower);
    }
    words
}
