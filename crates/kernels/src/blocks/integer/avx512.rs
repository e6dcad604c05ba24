//! Vectors of 512 bits, and products of bytes (VNNI).

use std::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm512_add_ps, _mm512_castps_si512, _mm512_dpbusd_epi32,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_setzero_si512, _mm512_storeu_epi32,
};
use std::mem::transmute;
use std::ops::Range;

use pulp::x86::V4;

use super::activations::{LANES, WORDS};
use super::formats::RowsFormat;
use super::kernel::{Product, run};
use super::lanes::RowVectors;
use crate::transpose::transpose_words;

/// A proof that the processor has AVX-512 with VNNI.
#[derive(Clone, Copy)]
struct Avx512Rows(V4);

/// Computes all outputs.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn run_avx512<F: RowsFormat>(product: &mut Product<'_>) {
    // SAFETY: the caller's guarantee.
    run::<_, F>(Avx512Rows(unsafe { V4::new_unchecked() }), product);
}

impl RowVectors for Avx512Rows {
    type Words = __m512i;
    type Floats = __m512;
    type Weights = __m512i;
    /// Of the upper bytes of activations, and of the lower ones.
    type Dots = [__m512i; 2];
    const STEPS: [usize; 2] = [1, WORDS];

    #[inline(always)]
    unsafe fn read_words(self, blocks: *const u8, at: usize) -> __m512i {
        // SAFETY: `self` proves the instructions, and the caller guarantees 64 bytes.
        unsafe { _mm512_loadu_si512(blocks.add(at * LANES).cast()) }
    }

    #[inline(always)]
    unsafe fn read_halves(self, blocks: *const u8, at: usize) -> __m512 {
        // SAFETY: `self` proves the instructions, and the caller guarantees 32 bytes.
        let halves = unsafe { _mm256_loadu_si256(blocks.add(at * LANES).cast()) };
        self.0.avx512f._mm512_cvtph_ps(halves)
    }

    #[inline(always)]
    fn words(self, word: u32) -> __m512i {
        self.0.avx512f._mm512_set1_epi32(word.cast_signed())
    }

    #[inline(always)]
    fn floats(self, x: f32) -> __m512 {
        self.0.avx512f._mm512_set1_ps(x)
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        self.0.avx512f._mm512_and_si512(a, b)
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        self.0.avx512f._mm512_xor_si512(a, b)
    }

    #[inline(always)]
    fn shift_left(self, words: __m512i, bits: u32) -> __m512i {
        let bits = self.0.sse2._mm_cvtsi32_si128(bits.cast_signed());
        self.0.avx512f._mm512_sll_epi32(words, bits)
    }

    #[inline(always)]
    fn shift_right(self, words: __m512i, bits: u32) -> __m512i {
        let bits = self.0.sse2._mm_cvtsi32_si128(bits.cast_signed());
        self.0.avx512f._mm512_srl_epi32(words, bits)
    }

    #[inline(always)]
    fn weights(self, words: __m512i) -> __m512i {
        words
    }

    #[inline(always)]
    fn dots(self, start: __m512i) -> [__m512i; 2] {
        [self.words(0), start]
    }

    #[inline(always)]
    fn add_products<const J: usize>(
        self,
        mut dots: [__m512i; 2],
        weights: __m512i,
        x: u32,
    ) -> [__m512i; 2] {
        // SAFETY: `self` proves the instructions.
        dots[J] = unsafe { _mm512_dpbusd_epi32(dots[J], weights, self.words(x)) };
        dots
    }

    #[inline(always)]
    fn total(self, [upper, lower]: [__m512i; 2]) -> __m512i {
        let avx512 = self.0.avx512f;
        avx512._mm512_add_epi32(avx512._mm512_slli_epi32::<8>(upper), lower)
    }

    #[inline(always)]
    fn to_floats(self, words: __m512i) -> __m512 {
        self.0.avx512f._mm512_cvtepi32_ps(words)
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        self.0.avx512f._mm512_mul_ps(a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.0.avx512f._mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    fn values(self, x: __m512) -> [f32; LANES] {
        // SAFETY: both have 64 bytes, and every value is valid.
        unsafe { transmute(x) }
    }

    #[inline(always)]
    fn write<const C: usize>(
        self,
        sums: &[__m512; C],
        bias: &[f32; LANES],
        rows: Range<usize>,
        out: (&mut [f32], usize),
    ) {
        // SAFETY: `self` proves the instructions.
        unsafe { write(self, sums, bias, rows, out) }
    }
}

/// [`RowVectors::write`], which transposes 16 columns in registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn write<const C: usize>(
    v: Avx512Rows,
    sums: &[__m512; C],
    bias: &[f32; LANES],
    rows: Range<usize>,
    (out, width): (&mut [f32], usize),
) {
    // SAFETY: the array has as many values as a vector.
    let bias = unsafe { _mm512_loadu_ps(bias.as_ptr()) };
    let sums = sums.map(|sum| _mm512_add_ps(bias, sum));
    if C == LANES {
        let mut columns = [_mm512_setzero_si512(); LANES];
        for (column, sum) in columns.iter_mut().zip(sums) {
            *column = _mm512_castps_si512(sum);
        }
        for (out, row) in out.chunks_mut(width).zip(&transpose_words(columns)[rows]) {
            let out = &mut out[..LANES];
            // SAFETY: the slice has as many values as a vector.
            unsafe { _mm512_storeu_epi32(out.as_mut_ptr().cast(), *row) };
        }
        return;
    }
    let columns = sums.map(|sum| v.values(sum));
    for (out, row) in out.chunks_mut(width).zip(rows) {
        for (out, column) in out.iter_mut().zip(&columns) {
            *out = column[row];
        }
    }
}
