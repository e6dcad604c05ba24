//! Vectors of 256 bits, two for 16 rows.

use std::arch::x86_64::{
    __m256, __m256i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256,
    _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_dpwssd_avx_epi32, _mm256_fmadd_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_mul_ps, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_sll_epi32, _mm256_srai_epi32, _mm256_srl_epi32, _mm256_srli_epi16,
    _mm256_storeu_ps, _mm256_xor_si256,
};

use super::activations::LANES;
use super::formats::RowsFormat;
use super::kernel::run;
use super::lanes::RowVectors;
use super::product::Product;

/// A proof that the processor has AVX2, FMA and F16C, and with `VNNI` also AVX-VNNI.
#[derive(Clone, Copy)]
struct Avx2<const VNNI: bool>(());

/// Computes all outputs with AVX2.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<F: RowsFormat>(product: &mut Product<'_>) {
    run::<_, F>(Avx2::<false>(()), product);
}

/// Computes all outputs with AVX2 and AVX-VNNI.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn run_avx_vnni<F: RowsFormat>(product: &mut Product<'_>) {
    run::<_, F>(Avx2::<true>(()), product);
}

impl<const VNNI: bool> RowVectors for Avx2<VNNI> {
    type Words = [__m256i; 2];
    type Floats = [__m256; 2];
    /// Integers of 16 bits: the first and the third weight, and the second and the fourth.
    type Weights = [[__m256i; 2]; 2];
    type Dots = [__m256i; 2];
    const STEPS: [usize; 2] = [2, 1];

    #[inline(always)]
    unsafe fn read_words(self, from: *const u8) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions, and the caller guarantees 64 bytes.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(2 * LANES).cast())] }
    }

    #[inline(always)]
    unsafe fn read_halves(self, from: *const u8) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions, and the caller guarantees 32 bytes.
        unsafe {
            let [a, b] = [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(LANES).cast())];
            [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)]
        }
    }

    #[inline(always)]
    fn words(self, word: u32) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_set1_epi32(word.cast_signed()); 2] }
    }

    #[inline(always)]
    fn floats(self, x: f32) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn xor(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn shift_left(self, words: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let bits = _mm_cvtsi32_si128(bits.cast_signed());
            [_mm256_sll_epi32(words[0], bits), _mm256_sll_epi32(words[1], bits)]
        }
    }

    #[inline(always)]
    fn shift_right(self, words: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let bits = _mm_cvtsi32_si128(bits.cast_signed());
            [_mm256_srl_epi32(words[0], bits), _mm256_srl_epi32(words[1], bits)]
        }
    }

    #[inline(always)]
    fn signed_bytes(self, words: [__m256i; 2], at: u32) -> [__m256; 2] {
        let [a, b] = self.shift_left(words, 24 - 8 * at);
        // SAFETY: `self` proves the instructions.
        self.to_floats(unsafe { [_mm256_srai_epi32::<24>(a), _mm256_srai_epi32::<24>(b)] })
    }

    #[inline(always)]
    fn weights(self, [a, b]: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let byte = _mm256_set1_epi16(255);
            [
                [_mm256_and_si256(a, byte), _mm256_and_si256(b, byte)],
                [_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b)],
            ]
        }
    }

    #[inline(always)]
    fn dots(self, start: [__m256i; 2]) -> [__m256i; 2] {
        start
    }

    #[inline(always)]
    fn add_products<const J: usize>(
        self,
        [a, b]: [__m256i; 2],
        weights: [[__m256i; 2]; 2],
        x: u32,
    ) -> [__m256i; 2] {
        let [v, w] = weights[J];
        // SAFETY: `self` proves the instructions, with `VNNI` those of AVX-VNNI too.
        unsafe {
            let x = _mm256_set1_epi32(x.cast_signed());
            if VNNI {
                [_mm256_dpwssd_avx_epi32(a, v, x), _mm256_dpwssd_avx_epi32(b, w, x)]
            } else {
                let (v, w) = (_mm256_madd_epi16(v, x), _mm256_madd_epi16(w, x));
                [_mm256_add_epi32(a, v), _mm256_add_epi32(b, w)]
            }
        }
    }

    #[inline(always)]
    fn total(self, dots: [__m256i; 2]) -> [__m256i; 2] {
        dots
    }

    #[inline(always)]
    fn to_floats(self, words: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_cvtepi32_ps(words[0]), _mm256_cvtepi32_ps(words[1])] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn values(self, x: [__m256; 2]) -> [f32; LANES] {
        let mut values = [0.0; LANES];
        let to = values.as_mut_ptr();
        // SAFETY: `self` proves the instructions, and the array has as many values as both vectors.
        unsafe {
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(LANES / 2), x[1]);
        }
        values
    }
}
