//! Vectors of 256 bits, two for 16 rows.

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadu_si128, _mm256_cvtph_ps, _mm256_dpwssd_avx_epi32, _mm256_loadu_si256,
};
use std::mem::transmute;

use pulp::x86::V3;

use super::activations::LANES;
use super::formats::RowsFormat;
use super::kernel::{Product, run};
use super::lanes::RowVectors;

/// A proof that the processor has AVX2, FMA and F16C, and with `VNNI` also AVX-VNNI.
#[derive(Clone, Copy)]
struct Avx2<const VNNI: bool>(V3);

/// Computes all outputs with AVX2.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<F: RowsFormat>(product: &mut Product<'_>) {
    // SAFETY: the caller's guarantee.
    run::<_, F>(Avx2::<false>(unsafe { V3::new_unchecked() }), product);
}

/// Computes all outputs with AVX2 and AVX-VNNI.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn run_avx_vnni<F: RowsFormat>(product: &mut Product<'_>) {
    // SAFETY: the caller's guarantee.
    run::<_, F>(Avx2::<true>(unsafe { V3::new_unchecked() }), product);
}

impl<const VNNI: bool> RowVectors for Avx2<VNNI> {
    type Words = [__m256i; 2];
    type Floats = [__m256; 2];
    /// Integers of 16 bits: the first and the third weight, and the second and the fourth.
    type Weights = [[__m256i; 2]; 2];
    type Dots = [__m256i; 2];
    const STEPS: [usize; 2] = [2, 1];

    #[inline(always)]
    unsafe fn read_words(self, blocks: *const u8, at: usize) -> [__m256i; 2] {
        // SAFETY: `self` proves the instructions, and the caller guarantees 64 bytes.
        unsafe {
            let from = blocks.add(at * LANES).cast();
            [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))]
        }
    }

    #[inline(always)]
    unsafe fn read_halves(self, blocks: *const u8, at: usize) -> [__m256; 2] {
        // SAFETY: `self` proves the instructions, and the caller guarantees 32 bytes.
        unsafe {
            let from = blocks.add(at * LANES).cast();
            let [a, b] = [_mm_loadu_si128(from), _mm_loadu_si128(from.add(1))];
            [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)]
        }
    }

    #[inline(always)]
    fn words(self, word: u32) -> [__m256i; 2] {
        [self.0.avx._mm256_set1_epi32(word.cast_signed()); 2]
    }

    #[inline(always)]
    fn floats(self, x: f32) -> [__m256; 2] {
        [self.0.avx._mm256_set1_ps(x); 2]
    }

    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        let avx2 = self.0.avx2;
        [avx2._mm256_and_si256(a[0], b[0]), avx2._mm256_and_si256(a[1], b[1])]
    }

    #[inline(always)]
    fn xor(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        let avx2 = self.0.avx2;
        [avx2._mm256_xor_si256(a[0], b[0]), avx2._mm256_xor_si256(a[1], b[1])]
    }

    #[inline(always)]
    fn shift_left(self, words: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        let (avx2, bits) = (self.0.avx2, self.0.sse2._mm_cvtsi32_si128(bits.cast_signed()));
        [avx2._mm256_sll_epi32(words[0], bits), avx2._mm256_sll_epi32(words[1], bits)]
    }

    #[inline(always)]
    fn shift_right(self, words: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        let (avx2, bits) = (self.0.avx2, self.0.sse2._mm_cvtsi32_si128(bits.cast_signed()));
        [avx2._mm256_srl_epi32(words[0], bits), avx2._mm256_srl_epi32(words[1], bits)]
    }

    #[inline(always)]
    fn weights(self, [a, b]: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        let (avx2, byte) = (self.0.avx2, self.0.avx._mm256_set1_epi16(255));
        [
            [avx2._mm256_and_si256(a, byte), avx2._mm256_and_si256(b, byte)],
            [avx2._mm256_srli_epi16::<8>(a), avx2._mm256_srli_epi16::<8>(b)],
        ]
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
        let ([v, w], avx2) = (weights[J], self.0.avx2);
        let x = self.0.avx._mm256_set1_epi32(x.cast_signed());
        if VNNI {
            // SAFETY: `self` proves the instructions.
            unsafe { [_mm256_dpwssd_avx_epi32(a, v, x), _mm256_dpwssd_avx_epi32(b, w, x)] }
        } else {
            let (v, w) = (avx2._mm256_madd_epi16(v, x), avx2._mm256_madd_epi16(w, x));
            [avx2._mm256_add_epi32(a, v), avx2._mm256_add_epi32(b, w)]
        }
    }

    #[inline(always)]
    fn total(self, dots: [__m256i; 2]) -> [__m256i; 2] {
        dots
    }

    #[inline(always)]
    fn to_floats(self, words: [__m256i; 2]) -> [__m256; 2] {
        let avx = self.0.avx;
        [avx._mm256_cvtepi32_ps(words[0]), avx._mm256_cvtepi32_ps(words[1])]
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        let avx = self.0.avx;
        [avx._mm256_mul_ps(a[0], b[0]), avx._mm256_mul_ps(a[1], b[1])]
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        let fma = self.0.fma;
        [fma._mm256_fmadd_ps(a[0], b[0], c[0]), fma._mm256_fmadd_ps(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn values(self, x: [__m256; 2]) -> [f32; LANES] {
        // SAFETY: both have 64 bytes, and every value is valid.
        unsafe { transmute(x) }
    }
}
