//! The matmul kernel for a few tokens on weights in the format Q8_0, with AVX-512.
//!
//! A block of Q8_0 has 32 weights of a row: a scale in f16, then 32 integers of 8 bits, each of which
//! times the scale is a weight. The product has at most 19 significant bits, so its f32 is exact, and
//! sums have the bits of those over the dequantized weights.

use std::arch::x86_64::{
    __m512i, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi256_si512,
    _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_inserti64x4, _mm512_mul_ps,
    _mm512_permutex2var_epi64, _mm512_set_epi64, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_slli_epi32, _mm512_srai_epi32, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::narrow::{LANES, load_columns, store_columns};

/// Weights of a block.
pub(super) const BLOCK: usize = 32;

/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 34;

/// Words of a block's integers.
const WORDS: usize = BLOCK / 4;

/// The operands of `out += w x`, as in [`super::narrow::FewColumns`].
pub(super) struct FewColumnsQ8 {
    /// `[outputs, width]`
    pub out: *mut f32,
    /// `[outputs, inner / BLOCK, BLOCK_BYTES]`
    pub w: *const u8,
    /// `[inner, width]`
    pub x: *const f32,
    pub inner: usize,
    pub width: usize,
    pub outputs: usize,
}

impl FewColumnsQ8 {
    /// Computes the first `columns` columns of as many outputs as form whole vectors. Further columns
    /// may be computed too. Returns the number of outputs.
    ///
    /// # Safety
    /// The processor has the features below; `inner` is a multiple of [`BLOCK`]; `outputs` rows of `w`
    /// and `out`, `inner` rows of `x`, and 8 columns exist, of which `columns` is at most as many.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    pub unsafe fn run(&self, columns: usize) -> usize {
        // SAFETY: the caller's guarantees.
        unsafe {
            match columns {
                1 => self.rows::<4, 1>(),
                2 => self.rows::<2, 2>(),
                3 => self.rows::<2, 3>(),
                4 => self.rows::<2, 4>(),
                5 | 6 => self.rows::<1, 6>(),
                _ => self.rows::<1, 8>(),
            }
        }
    }

    /// Computes `C` columns, `R` vectors of outputs at a time, then one. Returns the outputs.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn rows<const R: usize, const C: usize>(&self) -> usize {
        let mut row = 0;
        // SAFETY: each call stays below `outputs`.
        unsafe {
            while row + R * LANES <= self.outputs {
                self.tile::<R, C>(row);
                row += R * LANES;
            }
            while row + LANES <= self.outputs {
                self.tile::<1, C>(row);
                row += LANES;
            }
        }
        row
    }

    /// Computes `C` columns of `R` vectors of outputs.
    ///
    /// # Safety
    /// As for [`Self::run`]; `row + R * LANES` outputs exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn tile<const R: usize, const C: usize>(&self, row: usize) {
        let row_bytes = self.inner / BLOCK * BLOCK_BYTES;
        // SAFETY: rows are below row + R * LANES, blocks are below inner / BLOCK, and columns are below
        // C. A prefetch accesses no memory, for any address.
        unsafe {
            let out = self.out.add(row * self.width);
            let mut sums = [[_mm512_setzero_ps(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = load_columns(out.add(r * LANES * self.width), self.width);
            }
            for block in 0..self.inner / BLOCK {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let first = row + r * LANES;
                    let from = self.w.add(first * row_bytes + block * BLOCK_BYTES);
                    let mut scales = [0_u16; LANES];
                    for (i, scale) in scales.iter_mut().enumerate() {
                        let from = from.add(i * row_bytes);
                        *scale = from.cast::<u16>().read_unaligned();
                        // The same block of the next tile.
                        let next = from.wrapping_add(R * LANES * row_bytes);
                        _mm_prefetch::<_MM_HINT_T1>(next.cast());
                    }
                    let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.as_ptr().cast()));
                    let words = transpose(from.add(size_of::<u16>()), row_bytes);
                    for (p, words) in words.into_iter().enumerate() {
                        for i in 0..4 {
                            let w = _mm512_mul_ps(_mm512_cvtepi32_ps(byte(words, i)), scale);
                            let x = self.x.add((block * BLOCK + p * 4 + i) * self.width);
                            for (c, sum) in sums.iter_mut().enumerate() {
                                *sum = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(c)), w, *sum);
                            }
                        }
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                store_columns(out.add(r * LANES * self.width), self.width, sums);
            }
        }
    }
}

/// Byte `i` of each word, with its sign.
#[inline]
#[target_feature(enable = "avx512f")]
fn byte(words: __m512i, i: usize) -> __m512i {
    _mm512_srai_epi32::<24>(match i {
        0 => _mm512_slli_epi32::<24>(words),
        1 => _mm512_slli_epi32::<16>(words),
        2 => _mm512_slli_epi32::<8>(words),
        _ => words,
    })
}

/// Transposes 16 rows of 8 words, which start `stride` bytes apart.
///
/// # Safety
/// The processor has AVX-512, and the rows can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose(from: *const u8, stride: usize) -> [__m512i; WORDS] {
    let zero = _mm512_setzero_si512();
    // Row i, then row i + 8.
    let mut rows = [zero; WORDS];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's guarantee.
        let (low, high) = unsafe {
            let read = |row: usize| _mm256_loadu_si256(from.add(row * stride).cast());
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
