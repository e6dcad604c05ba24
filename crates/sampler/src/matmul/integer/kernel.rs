//! The kernel: a vector of 16 outputs for each of a few columns, with VNNI.

use std::arch::x86_64::{
    __m512, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_storeu_ps,
};
use std::ops::Range;

use hone_model::kernels::transpose::transpose_words;
use hone_model::weights::GROUP_ROWS;

use super::super::narrow::LANES;
use super::columns::IntegerColumns;
use super::formats::{IntegerFormat, Part, RowBlocks};
use super::layout::{IntegerBlock, WORDS};

// The masks of the rows are those of the groups in memory.
const _: () = assert!(LANES == GROUP_ROWS);

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Bytes that weights are fetched ahead of their use.
const AHEAD: usize = 4096;

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

/// Up to 16 rows of the weights.
struct OutputTile {
    blocks: RowBlocks,
    /// Those that are computed.
    lanes: Range<usize>,
    /// The output of the first of them.
    at: usize,
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
        assert!(self.x.whole_groups() * LANES + self.x.last_columns() <= self.width);
        let row_bytes = self.x.blocks() / F::PARTS * F::BYTES;
        let end = self.first + outputs;
        let mut start = self.first / LANES * LANES;
        while start < end {
            let rows = LANES.min(self.rows - start);
            let blocks = RowBlocks {
                first: self.w[start * row_bytes..].as_ptr(),
                rows,
                mask: (((1_u32 << rows) - 1) & 0xffff) as u16,
            };
            let lanes = self.first.max(start) - start..end.min(start + rows) - start;
            let tile = OutputTile { blocks, at: start + lanes.start - self.first, lanes };
            let last = self.x.whole_groups();
            // SAFETY: the assertions keep all rows, blocks and columns within the operands.
            unsafe {
                for group in 0..last {
                    self.tile::<F, LANES, 4>(&tile, group);
                }
                match self.x.last_columns() {
                    0 => {}
                    1 => self.tile::<F, 1, 1>(&tile, last),
                    2 => self.tile::<F, 2, 2>(&tile, last),
                    3 => self.tile::<F, 3, 3>(&tile, last),
                    4 => self.tile::<F, 4, 4>(&tile, last),
                    6 => self.tile::<F, 6, 3>(&tile, last),
                    8 => self.tile::<F, 8, 4>(&tile, last),
                    LANES => self.tile::<F, LANES, 4>(&tile, last),
                    columns => unreachable!("{columns} columns"),
                }
            }
            start += LANES;
        }
    }

    /// Computes the rows of a tile for a group of `C` columns.
    ///
    /// # Safety
    /// As for [`Self::run`]; the rows are within the matrix, and there are `C` columns in the group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn tile<F: IntegerFormat, const C: usize, const U: usize>(
        &mut self,
        tile: &OutputTile,
        group: usize,
    ) {
        let (blocks, x) = (tile.blocks, self.x.group(group));
        // SAFETY: the caller's guarantees.
        let sums = unsafe {
            if blocks.rows == LANES {
                // With a constant, offsets between words are known when this is compiled.
                let blocks = RowBlocks { rows: LANES, mask: u16::MAX, ..blocks };
                self.sums::<F, C, U>(blocks, x)
            } else {
                self.sums::<F, C, U>(blocks, x)
            }
        };
        let out = &mut self.out[tile.at * self.width + group * LANES..];
        add(out, self.width, tile.lanes.clone(), &sums);
    }

    /// The products of a group of rows and a group of columns, `U` columns at a time. The sums of several
    /// columns do not wait for each other.
    ///
    /// # Safety
    /// As for [`Self::groups`]; the rows have as many blocks as the columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn sums<F: IntegerFormat, const C: usize, const U: usize>(
        &self,
        mut blocks: RowBlocks,
        mut x: IntegerBlock,
    ) -> [__m512; C] {
        let mut sums = [_mm512_setzero_ps(); C];
        for _ in 0..self.x.blocks() / F::PARTS {
            // SAFETY: the caller guarantees the blocks of the rows, and that the columns have as many. The
            // last pointers are at the ends of their memory. A prefetch accesses no memory, for any address.
            unsafe {
                // The processor's own prefetching ends with each page of 4 KiB.
                for line in (0..F::BYTES * blocks.rows).step_by(CACHE_LINE) {
                    let ahead = blocks.first.wrapping_add(AHEAD + line);
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                }
                let scales = F::scales(blocks);
                for part in 0..F::PARTS {
                    let w = F::part(blocks, scales, part);
                    for (i, sums) in sums.as_chunks_mut().0.iter_mut().enumerate() {
                        add_part::<F, U>(sums, &w, x.skip_columns(i * U), C);
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

/// Adds the products of 32 weights of each row to the sums of `U` columns, which are the first ones of `x`. A
/// group has `columns` columns.
///
/// # Safety
/// The processor has the features, and the columns exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_part<F: IntegerFormat, const U: usize>(
    sums: &mut [__m512; U],
    w: &Part,
    x: IntegerBlock,
    columns: usize,
) {
    let mut upper = [_mm512_setzero_si512(); U];
    let mut lower = upper;
    // SAFETY: the caller guarantees the columns.
    unsafe {
        for (c, lower) in lower.iter_mut().enumerate() {
            let negative = _mm512_set1_epi32(*x.negative_sums.add(c));
            match F::SHIFT {
                Some(7) => *lower = _mm512_slli_epi32::<7>(negative),
                Some(_) => *lower = _mm512_slli_epi32::<3>(negative),
                None => {}
            }
        }
        for (p, w) in w.words.iter().enumerate() {
            for c in 0..U {
                let word =
                    |p: usize| _mm512_set1_epi32((*x.words.add(p * columns + c)).cast_signed());
                upper[c] = _mm512_dpbusd_epi32(upper[c], *w, word(p));
                lower[c] = _mm512_dpbusd_epi32(lower[c], *w, word(WORDS + p));
            }
        }
        for (c, sum) in sums.iter_mut().enumerate() {
            let scale = _mm512_set1_ps(*x.scales.add(c));
            let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(upper[c]), lower[c]);
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(w.scale, scale), *sum);
            if F::SHIFT.is_none() {
                let negative = _mm512_set1_epi32(*x.negative_sums.add(c));
                let x = _mm512_mul_ps(_mm512_cvtepi32_ps(negative), scale);
                *sum = _mm512_fmadd_ps(x, w.offset, *sum);
            }
        }
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
        let rows = transpose_words(columns);
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
