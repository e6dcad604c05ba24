//! The matmul kernel for a few tokens, with AVX-512: vectors of 16 outputs instead of 16 columns.
//!
//! With one token, [`super::avx512`] wastes 15 of 16 columns, and the time is that of its arithmetic
//! instead of that of reading the weights. Here a vector has one weight of each of 16 rows, which are
//! transposed in registers. A sum still adds one term after another with k ascending, so its bits are
//! those of the other kernels.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_storeu_ps, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::vector_weight::VectorWeight;

/// Outputs of a vector.
pub(super) const LANES: usize = 16;

/// Columns up to which this kernel is the faster one.
pub(super) const MAX_COLUMNS: usize = 8;

/// The operands of a product of a few columns: `out += w x`.
///
/// Columns are the first ones of matrices whose rows are `width` values apart.
pub(super) struct FewColumns<W> {
    /// `[outputs, width]`
    pub out: *mut f32,
    /// `[outputs, inner]`
    pub w: *const W,
    /// `[inner, width]`
    pub x: *const f32,
    pub inner: usize,
    pub width: usize,
    pub outputs: usize,
}

impl<W: VectorWeight> FewColumns<W> {
    /// Weights of a row that are read at a time: a vector.
    const LINE: usize = LANES * W::PER_WORD;

    /// Computes the first `columns` columns of as many outputs as form whole vectors, if rows have
    /// whole lines. Further columns may be computed too. Returns the number of outputs.
    ///
    /// # Safety
    /// The processor has the features below; `outputs` rows of `w` and `out`, `inner` rows of `x`, and
    /// [`MAX_COLUMNS`] columns exist, of which `columns` is at most as many.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    pub unsafe fn run(&self, columns: usize) -> usize {
        if !self.inner.is_multiple_of(Self::LINE) {
            return 0;
        }
        // SAFETY: the caller's guarantees.
        unsafe {
            // Several vectors of outputs give enough independent sums to hide the latency of an
            // addition.
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
        // SAFETY: rows are below row + R * LANES, k is below `inner`, which is a multiple of the line,
        // and columns are below C. A prefetch accesses no memory, for any address.
        unsafe {
            let out = self.out.add(row * self.width);
            let mut sums = [[_mm512_setzero_ps(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = load_columns(out.add(r * LANES * self.width), self.width);
            }
            let mut k = 0;
            while k < self.inner {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let from = self.w.add((row + r * LANES) * self.inner + k);
                    let mut rows = [_mm512_setzero_si512(); LANES];
                    for (i, line) in rows.iter_mut().enumerate() {
                        let from = from.wrapping_add(i * self.inner);
                        // The same line of the next tile. Rows are too short for the processor to
                        // recognize the access pattern in time.
                        let next = from.wrapping_add(R * LANES * self.inner);
                        _mm_prefetch::<_MM_HINT_T1>(next.cast());
                        *line = _mm512_loadu_si512(from.cast());
                    }
                    let words = transpose(rows);
                    for (p, words) in words.into_iter().enumerate() {
                        for i in 0..W::PER_WORD {
                            let w = W::widen_word(words, i);
                            let x = self.x.add((k + p * W::PER_WORD + i) * self.width);
                            for (c, sum) in sums.iter_mut().enumerate() {
                                *sum = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(c)), w, *sum);
                            }
                        }
                    }
                }
                k += Self::LINE;
            }
            for (r, sums) in sums.iter().enumerate() {
                store_columns(out.add(r * LANES * self.width), self.width, sums);
            }
        }
    }
}

/// Reads [`LANES`] rows of the first `C` columns, one column a vector.
///
/// # Safety
/// The processor has AVX-512, and these values can be read.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_columns<const C: usize>(from: *const f32, width: usize) -> [__m512; C] {
    let mut columns = [[0.0_f32; LANES]; C];
    for lane in 0..LANES {
        for (c, column) in columns.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            column[lane] = unsafe { *from.add(lane * width + c) };
        }
    }
    // SAFETY: each column has as many values as a vector.
    columns.map(|column| unsafe { _mm512_loadu_ps(column.as_ptr()) })
}

/// Writes what [`load_columns`] reads.
///
/// # Safety
/// The processor has AVX-512, and these values can be written.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store_columns<const C: usize>(
    to: *mut f32,
    width: usize,
    columns: &[__m512; C],
) {
    for (c, column) in columns.iter().enumerate() {
        let mut values = [0.0_f32; LANES];
        // SAFETY: the array has as many values as a vector.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), *column) };
        for (lane, value) in values.into_iter().enumerate() {
            // SAFETY: the caller's guarantee.
            unsafe { *to.add(lane * width + c) = value };
        }
    }
}

/// Transposes 16 rows of 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let zero = _mm512_setzero_si512();
    let mut pairs = [zero; LANES];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // `quads[4 i + c]` has, in its 128-bit part l, word 4 l + c of the rows 4 i to 4 i + 3.
    let mut quads = [zero; LANES];
    for i in (0..LANES).step_by(4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut words = [zero; LANES];
    for c in 0..4 {
        // The parts 0 and 2, then 1 and 3, of the first and the last eight rows.
        let even_first = _mm512_shuffle_i32x4::<0x88>(quads[c], quads[4 + c]);
        let odd_first = _mm512_shuffle_i32x4::<0xdd>(quads[c], quads[4 + c]);
        let even_last = _mm512_shuffle_i32x4::<0x88>(quads[8 + c], quads[12 + c]);
        let odd_last = _mm512_shuffle_i32x4::<0xdd>(quads[8 + c], quads[12 + c]);
        words[c] = _mm512_shuffle_i32x4::<0x88>(even_first, even_last);
        words[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_first, odd_last);
        words[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_first, even_last);
        words[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_first, odd_last);
    }
    words
}
