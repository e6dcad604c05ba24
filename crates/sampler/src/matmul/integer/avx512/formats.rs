//! Blocks of quantized weights, as vectors of AVX-512 with the weights of 16 rows.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _mm_cvtsi32_si128, _mm256_maskz_loadu_epi16, _mm512_and_si512,
    _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_maskz_loadu_epi32, _mm512_mul_ps, _mm512_or_si512,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_sll_epi32, _mm512_slli_epi32, _mm512_srai_epi32, _mm512_srl_epi32, _mm512_srli_epi32,
    _mm512_xor_si512,
};

use crate::matmul::integer::formats::{Q4_0, Q4_1, Q4K, Q6K, Q8_0, WeightFormat, q6_k_part};
use crate::matmul::integer::layout::WORDS;

/// The blocks of the same number of up to 16 rows, whose parts are interleaved.
#[derive(Clone, Copy)]
pub(in crate::matmul::integer) struct RowBlocks {
    pub first: *const u8,
    /// The number of rows, 1 to 16.
    pub rows: usize,
    /// A bit for each row.
    pub mask: __mmask16,
}

impl RowBlocks {
    /// The word of each row that starts `at` bytes from the block's begin.
    ///
    /// # Safety
    /// The processor has AVX-512, and the words can be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn words(self, at: usize) -> __m512i {
        // SAFETY: the caller's guarantee.
        unsafe { _mm512_maskz_loadu_epi32(self.mask, self.first.add(at * self.rows).cast()) }
    }

    /// The f16 number of each row that starts `at` bytes from the block's begin.
    ///
    /// # Safety
    /// As for [`Self::words`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn halves(self, at: usize) -> __m512 {
        // SAFETY: the caller's guarantee.
        let halves =
            unsafe { _mm256_maskz_loadu_epi16(self.mask, self.first.add(at * self.rows).cast()) };
        _mm512_cvtph_ps(halves)
    }
}

/// 32 weights of 16 rows.
#[derive(Clone, Copy)]
pub(in crate::matmul::integer) struct Part {
    /// Unsigned bytes q. Vector `p` has four consecutive ones of each row.
    pub words: [__m512i; WORDS],
    pub scale: __m512,
    /// The offset, or with [`WeightFormat::SPLIT`] the scale of the second half.
    pub second: __m512,
}

/// Reads a format with AVX-512.
pub(in crate::matmul::integer) trait IntegerFormat:
    WeightFormat
{
    /// Scales and offsets of the parts of a block.
    type Scales: Copy;

    /// Reads what the parts share.
    ///
    /// # Safety
    /// The processor has AVX-512 (F, BW, VL), and the blocks can be read.
    unsafe fn scales(blocks: RowBlocks) -> Self::Scales;

    /// Reads a part.
    ///
    /// # Safety
    /// As for [`Self::scales`].
    unsafe fn part(blocks: RowBlocks, scales: Self::Scales, part: usize) -> Part;
}

impl IntegerFormat for Q8_0 {
    type Scales = __m512;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scales(blocks: RowBlocks) -> __m512 {
        // SAFETY: the caller's guarantee.
        unsafe { blocks.halves(0) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(blocks: RowBlocks, scale: __m512, _: usize) -> Part {
        let mut words = [_mm512_setzero_si512(); WORDS];
        for (p, word) in words.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let signed = unsafe { blocks.words(2 + 4 * p) };
            *word = _mm512_xor_si512(signed, _mm512_set1_epi8(i8::MIN));
        }
        Part { words, scale, second: _mm512_setzero_ps() }
    }
}

/// The integers of 4 bits of 16 bytes: the lower halves, then the upper ones.
///
/// # Safety
/// As for [`RowBlocks::words`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves_of_bytes(blocks: RowBlocks, at: usize) -> [__m512i; WORDS] {
    let mut words = [_mm512_setzero_si512(); WORDS];
    let (lower, upper) = words.split_at_mut(WORDS / 2);
    for (p, (lower, upper)) in lower.iter_mut().zip(upper).enumerate() {
        // SAFETY: the caller's guarantee.
        let both = unsafe { blocks.words(at + 4 * p) };
        *lower = _mm512_and_si512(both, _mm512_set1_epi8(15));
        *upper = _mm512_and_si512(_mm512_srli_epi32::<4>(both), _mm512_set1_epi8(15));
    }
    words
}

impl IntegerFormat for Q4_0 {
    type Scales = __m512;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scales(blocks: RowBlocks) -> __m512 {
        // SAFETY: the caller's guarantee.
        unsafe { blocks.halves(0) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(blocks: RowBlocks, scale: __m512, _: usize) -> Part {
        // SAFETY: the caller's guarantee.
        let words = unsafe { halves_of_bytes(blocks, 2) };
        Part { words, scale, second: _mm512_setzero_ps() }
    }
}

impl IntegerFormat for Q4_1 {
    /// The scale and the offset.
    type Scales = [__m512; 2];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scales(blocks: RowBlocks) -> [__m512; 2] {
        // SAFETY: the caller's guarantee.
        unsafe { [blocks.halves(0), negated(blocks.halves(2))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(blocks: RowBlocks, [scale, offset]: [__m512; 2], _: usize) -> Part {
        // SAFETY: the caller's guarantee.
        Part { words: unsafe { halves_of_bytes(blocks, 4) }, scale, second: offset }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn negated(x: __m512) -> __m512 {
    _mm512_mul_ps(x, _mm512_set1_ps(-1.0))
}

impl IntegerFormat for Q4K {
    type Scales = Q4KScales;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scales(blocks: RowBlocks) -> Q4KScales {
        // SAFETY: the caller's guarantee.
        let (scale, offset, [a, b, c]) = unsafe {
            let words = [blocks.words(4), blocks.words(8), blocks.words(12)];
            (blocks.halves(0), blocks.halves(2), words)
        };
        // Of the parts 4 to 7, the upper two bits are those of the bytes of the parts 0 to 3.
        let six = |word| _mm512_and_si512(word, _mm512_set1_epi8(63));
        let four = |word| _mm512_and_si512(word, _mm512_set1_epi8(15));
        let upper = |word| _mm512_and_si512(_mm512_srli_epi32::<2>(word), _mm512_set1_epi8(48));
        Q4KScales {
            scale,
            offset,
            scales: [six(a), _mm512_or_si512(four(c), upper(a))],
            offsets: [six(b), _mm512_or_si512(four(_mm512_srli_epi32::<4>(c)), upper(b))],
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(blocks: RowBlocks, scales: Q4KScales, part: usize) -> Part {
        let mut words = [_mm512_setzero_si512(); WORDS];
        for (p, word) in words.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let both = unsafe { blocks.words(16 + 32 * (part / 2) + 4 * p) };
            let shifted = if part.is_multiple_of(2) { both } else { _mm512_srli_epi32::<4>(both) };
            *word = _mm512_and_si512(shifted, _mm512_set1_epi8(15));
        }
        let byte = |words: [__m512i; 2]| {
            let count = _mm_cvtsi32_si128(8 * (part as i32 % 4));
            let byte = _mm512_srl_epi32(words[part / 4], count);
            _mm512_cvtepi32_ps(_mm512_and_si512(byte, _mm512_set1_epi32(255)))
        };
        Part {
            words,
            scale: _mm512_mul_ps(scales.scale, byte(scales.scales)),
            second: _mm512_mul_ps(scales.offset, byte(scales.offsets)),
        }
    }
}

/// Scales of a block of [`Q4K`].
#[derive(Clone, Copy)]
pub(in crate::matmul::integer) struct Q4KScales {
    scale: __m512,
    offset: __m512,
    /// A byte for each part: the first four, then the others.
    scales: [__m512i; 2],
    offsets: [__m512i; 2],
}

impl IntegerFormat for Q6K {
    /// The scale, and a signed byte for each half of a part.
    type Scales = (__m512, [__m512i; 4]);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scales(blocks: RowBlocks) -> Self::Scales {
        // SAFETY: the caller's guarantee.
        unsafe {
            let bytes =
                [blocks.words(192), blocks.words(196), blocks.words(200), blocks.words(204)];
            (blocks.halves(208), bytes)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(blocks: RowBlocks, (scale, bytes): Self::Scales, part: usize) -> Part {
        let ((low_at, low_shift), (high_at, high_shift)) = q6_k_part(part);
        let count = |bits: u32| _mm_cvtsi32_si128(bits.cast_signed());
        let (low_shift, high_shift) = (count(low_shift), count(high_shift));
        let mut words = [_mm512_setzero_si512(); WORDS];
        for (p, word) in words.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let (low, high) =
                unsafe { (blocks.words(low_at + 4 * p), blocks.words(high_at + 4 * p)) };
            let low = _mm512_and_si512(_mm512_srl_epi32(low, low_shift), _mm512_set1_epi8(15));
            let high = _mm512_and_si512(_mm512_srl_epi32(high, high_shift), _mm512_set1_epi8(3));
            *word = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
        }
        // Both bytes are in one word. The shift to the left moves the byte's sign to that of the word.
        let half = |half: usize| {
            let left = count(24 - 8 * ((2 * part + half) as u32 % 4));
            let byte = _mm512_srai_epi32::<24>(_mm512_sll_epi32(bytes[part / 2], left));
            _mm512_mul_ps(scale, _mm512_cvtepi32_ps(byte))
        };
        Part { words, scale: half(0), second: half(1) }
    }
}
