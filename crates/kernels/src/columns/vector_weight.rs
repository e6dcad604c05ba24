//! The types of stored weights, as vectors of AVX-512.

use std::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_loadu_ps,
    _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32,
};

use half::{bf16, f16};

use super::kernel::StoredWeight;
use super::narrow::{Transposed, add_product};

/// Weights of a row that are read at a time: a vector, and of f32 a cache line.
pub(super) const LINE: usize = 16;

/// A type of weights that a vector of f32 is read from.
pub trait VectorWeight: StoredWeight {
    /// Reads `LINE` weights.
    ///
    /// # Safety
    /// The processor has AVX-512, and `LINE` weights can be read from `from`.
    unsafe fn read_line(from: *const Self) -> __m512;

    /// Weight `i` of each word of 32 bits, exactly.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn widen_word(words: __m512i, i: usize) -> __m512;
}

impl VectorWeight for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn read_line(from: *const Self) -> __m512 {
        // SAFETY: the caller guarantees that the line can be read.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_word(words: __m512i, _: usize) -> __m512 {
        _mm512_castsi512_ps(words)
    }
}

impl VectorWeight for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn read_line(from: *const Self) -> __m512 {
        // SAFETY: the caller guarantees that the line can be read.
        let bits = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_word(words: __m512i, i: usize) -> __m512 {
        const UPPER_HALF: i32 = !0xffff;
        _mm512_castsi512_ps(match i {
            0 => _mm512_slli_epi32::<16>(words),
            _ => _mm512_and_si512(words, _mm512_set1_epi32(UPPER_HALF)),
        })
    }
}

impl VectorWeight for f16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn read_line(from: *const Self) -> __m512 {
        // SAFETY: the caller guarantees that the line can be read.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_word(words: __m512i, i: usize) -> __m512 {
        let words = if i == 0 { words } else { _mm512_srli_epi32::<16>(words) };
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
    }
}

impl<W: VectorWeight> Transposed for W {
    const PER_WORD: usize = size_of::<u32>() / size_of::<W>();
    const INPUTS: usize = Self::PER_WORD;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn add<const C: usize>(sums: &mut [__m512; C], words: __m512i, i: usize, x: *const f32) {
        // SAFETY: the caller guarantees the features and the values.
        unsafe { add_product(sums, W::widen_word(words, i), x) }
    }
}
