//! The kernel: a vector of 16 outputs for each of a few columns, with VNNI.

use std::arch::x86_64::{
    __m512, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_ps,
};
use std::ops::Range;

use super::super::narrow::LANES;
use super::super::vector_weight::transpose;
use super::columns::{IntegerBlock, IntegerColumns, WORDS};
use super::formats::{IntegerFormat, RowBlocks};

/// The operands of `out += w x`.
pub(super) struct Product<'a> {
    /// `[outputs, width]`
    pub out: &'a mut [f32],
    pub width: usize,
    /// The first row of `w` to use.
    pub first: usize,
    /// The interleaved blocks of the whole matrix.
    pub w: &'a [u8],
    /// Rows of the whole matrix.
    pub rows: usize,
    pub x: &'a IntegerColumns,
}

impl Product<'_> {
    /// Computes all outputs.
    ///
    /// # Safety
    /// The processor has the features below.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub unsafe fn run<F: IntegerFormat>(mut self) {
        let outputs = self.out.len() / self.width;
        assert!(self.first + outputs <= self.rows && self.x.blocks().is_multiple_of(F::PARTS));
        assert!(self.w.len() == self.rows * self.x.blocks() / F::PARTS * F::BYTES);
        assert!(self.x.groups() * self.x.columns() <= self.width);
        // SAFETY: the assertions keep all rows, blocks and columns within the operands.
        unsafe {
            match self.x.columns() {
                1 => self.groups::<F, 1>(),
                2 => self.groups::<F, 2>(),
                3 => self.groups::<F, 3>(),
                4 => self.groups::<F, 4>(),
                6 => self.groups::<F, 6>(),
                8 => self.groups::<F, 8>(),
                LANES => self.groups::<F, LANES>(),
                columns => unreachable!("{columns} columns"),
            }
        }
    }

    /// Computes all outputs, 16 rows and `C` columns at a time.
    ///
    /// # Safety
    /// As for [`Self::run`]; there are `C` columns in a group.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn groups<F: IntegerFormat, const C: usize>(&mut self) {
        let row_bytes = self.x.blocks() / F::PARTS * F::BYTES;
        let end = self.first + self.out.len() / self.width;
        let mut start = self.first / LANES * LANES;
        while start < end {
            let rows = LANES.min(self.rows - start);
            let blocks = RowBlocks {
                first: self.w[start * row_bytes..].as_ptr(),
                rows,
                mask: (((1_u32 << rows) - 1) & 0xffff) as u16,
            };
            let lanes = self.first.max(start) - start..end.min(start + rows) - start;
            let at = start + lanes.start - self.first;
            for group in 0..self.x.groups() {
                // SAFETY: the rows are within the matrix.
                let sums = unsafe { self.sums::<F, C>(blocks, self.x.group(group)) };
                let out = &mut self.out[at * self.width + group * C..];
                add(out, self.width, lanes.clone(), &sums);
            }
            start += LANES;
        }
    }

    /// The products of a group of rows and a group of columns.
    ///
    /// # Safety
    /// As for [`Self::groups`]; the rows have as many blocks as the columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn sums<F: IntegerFormat, const C: usize>(
        &self,
        mut blocks: RowBlocks,
        mut x: IntegerBlock,
    ) -> [__m512; C] {
        let mut sums = [_mm512_setzero_ps(); C];
        for _ in 0..self.x.blocks() / F::PARTS {
            // SAFETY: the caller guarantees the blocks of the rows, and that the columns have as many. The
            // last pointers are at the ends of their memory.
            unsafe {
                let scales = F::scales(blocks);
                for part in 0..F::PARTS {
                    let w = F::part(blocks, scales, part);
                    for (c, sum) in sums.iter_mut().enumerate() {
                        let scale = _mm512_set1_ps(*x.scales.add(c));
                        let negative = _mm512_set1_epi32(*x.negative_sums.add(c));
                        let mut upper = _mm512_setzero_si512();
                        let mut lower = match F::SHIFT {
                            Some(7) => _mm512_slli_epi32::<7>(negative),
                            Some(_) => _mm512_slli_epi32::<3>(negative),
                            None => _mm512_setzero_si512(),
                        };
                        for (p, w) in w.words.iter().enumerate() {
                            let word = |p: usize| {
                                _mm512_set1_epi32((*x.words.add(p * C + c)).cast_signed())
                            };
                            upper = _mm512_dpbusd_epi32(upper, *w, word(p));
                            lower = _mm512_dpbusd_epi32(lower, *w, word(WORDS + p));
                        }
                        let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(upper), lower);
                        let dot = _mm512_cvtepi32_ps(dot);
                        *sum = _mm512_fmadd_ps(dot, _mm512_mul_ps(w.scale, scale), *sum);
                        if F::SHIFT.is_none() {
                            let x = _mm512_mul_ps(_mm512_cvtepi32_ps(negative), scale);
                            *sum = _mm512_fmadd_ps(x, w.offset, *sum);
                        }
                    }
                    x = IntegerBlock {
                        words: x.words.add(2 * WORDS * C),
                        scales: x.scales.add(C),
                        negative_sums: x.negative_sums.add(C),
                    };
                }
                blocks.first = blocks.first.add(F::BYTES * blocks.rows);
            }
        }
        sums
    }
}

/// Adds the sums of some rows to `out`, whose first value is that of the first of these rows and the first
/// column.
#[inline]
#[target_feature(enable = "avx512f")]
fn add<const C: usize>(out: &mut [f32], width: usize, lanes: Range<usize>, sums: &[__m512; C]) {
    if C == LANES {
        let mut columns = [_mm512_setzero_si512(); LANES];
        for (column, sum) in columns.iter_mut().zip(sums) {
            *column = _mm512_castps_si512(*sum);
        }
        let rows = transpose(columns);
        for (out, row) in out.chunks_mut(width).zip(&rows[lanes]) {
            let out = &mut out[..LANES];
            // SAFETY: the slice has as many values as a vector.
            unsafe {
                let sum = _mm512_add_ps(_mm512_loadu_ps(out.as_ptr()), _mm512_castsi512_ps(*row));
                _mm512_storeu_ps(out.as_mut_ptr(), sum);
            }
        }
        return;
    }
    let mut columns = [[0.0_f32; LANES]; C];
    for (column, sum) in columns.iter_mut().zip(sums) {
        // SAFETY: the array has as many values as a vector.
        unsafe { _mm512_storeu_ps(column.as_mut_ptr(), *sum) };
    }
    for (out, lane) in out.chunks_mut(width).zip(lanes) {
        for (out, column) in out.iter_mut().zip(&columns) {
            *out += column[lane];
        }
    }
}
