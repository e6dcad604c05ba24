//! The kernel for AVX-512 with VNNI: a vector of 16 outputs for each of a few columns.

mod formats;
mod round;

use std::arch::x86_64::{
    __m512, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512,
    _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_epi32, _mm512_storeu_ps,
};
use std::ops::Range;

use hone_model::kernels::transpose::transpose_words;

use super::layout::{IntegerGroup, LANES, WORDS};
use super::product::{OutputRows, Product};
use formats::{Part, RowBlocks};

pub(super) use formats::IntegerFormat;
pub(super) use round::round_group;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Bytes that weights are fetched ahead of their use.
const AHEAD: usize = 4096;

/// The same block of the columns of a group.
#[derive(Clone, Copy)]
struct ColumnPointers {
    /// `[2 WORDS, columns]`
    words: *const u32,
    /// `[columns]`
    scales: *const f32,
    /// `[columns]`
    negative_sums: *const i32,
    /// `[columns]`
    first_sums: *const i32,
}

impl ColumnPointers {
    fn new(group: IntegerGroup<'_>) -> Self {
        Self {
            words: group.words.as_ptr(),
            scales: group.scales.as_ptr(),
            negative_sums: group.negative_sums.as_ptr(),
            first_sums: group.first_sums.as_ptr(),
        }
    }

    /// The columns from `count` on.
    #[inline(always)]
    fn skip_columns(self, count: usize) -> Self {
        Self { words: self.words.wrapping_add(count), ..self.skip_values(count) }
    }

    /// The next block of a group of `columns` columns.
    #[inline(always)]
    fn next_block(self, columns: usize) -> Self {
        Self { words: self.words.wrapping_add(2 * WORDS * columns), ..self.skip_values(columns) }
    }

    #[inline(always)]
    fn skip_values(self, count: usize) -> Self {
        Self {
            words: self.words,
            scales: self.scales.wrapping_add(count),
            negative_sums: self.negative_sums.wrapping_add(count),
            first_sums: self.first_sums.wrapping_add(count),
        }
    }
}

/// Computes all outputs.
///
/// # Safety
/// The processor has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn run<F: IntegerFormat>(mut product: Product<'_>) {
    product.check::<F>();
    let row_bytes = product.row_bytes::<F>();
    let mut start = 0;
    while let Some(rows) = product.rows_from(start) {
        start = rows.start + LANES;
        let blocks = RowBlocks {
            first: product.w[rows.start * row_bytes..].as_ptr(),
            rows: rows.rows,
            mask: (((1_u32 << rows.rows) - 1) & 0xffff) as u16,
        };
        let bias = product.biases(&rows);
        for group in 0..product.x.groups() {
            let x = product.x.group(group);
            let tile = OutputTile { blocks, rows: &rows, bias: &bias, x, column: group * LANES };
            // SAFETY: the check keeps all rows, blocks and columns within the operands.
            unsafe {
                match x.columns {
                    1 => tile.compute::<F, 1, 1>(&mut product),
                    2 => tile.compute::<F, 2, 2>(&mut product),
                    3 => tile.compute::<F, 3, 3>(&mut product),
                    4 => tile.compute::<F, 4, 4>(&mut product),
                    6 => tile.compute::<F, 6, 3>(&mut product),
                    8 => tile.compute::<F, 8, 4>(&mut product),
                    LANES => tile.compute::<F, LANES, 4>(&mut product),
                    columns => unreachable!("{columns} columns"),
                }
            }
        }
    }
}

/// Up to 16 rows of the weights, and a group of columns.
struct OutputTile<'a> {
    blocks: RowBlocks,
    rows: &'a OutputRows,
    /// The biases of the rows.
    bias: &'a [f32; LANES],
    x: IntegerGroup<'a>,
    /// The first column.
    column: usize,
}

impl OutputTile<'_> {
    /// Writes the products with the bias to the outputs. The group has `C` columns.
    ///
    /// # Safety
    /// As for [`run`]; the rows are within the matrix, and have as many blocks as the columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn compute<F: IntegerFormat, const C: usize, const U: usize>(
        &self,
        product: &mut Product<'_>,
    ) {
        // SAFETY: the caller's guarantees.
        let sums = unsafe {
            if self.blocks.rows == LANES {
                self.sums::<F, C, U, true>()
            } else {
                self.sums::<F, C, U, false>()
            }
        };
        let out = &mut product.out[self.rows.at * product.width + self.column..];
        write(out, product.width, self.rows.lanes.clone(), self.bias, &sums);
    }

    /// The products of a group of rows and a group of columns, `U` columns at a time. The sums of several
    /// columns do not wait for each other. With `WHOLE` there are 16 rows.
    ///
    /// # Safety
    /// As for [`Self::compute`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn sums<F: IntegerFormat, const C: usize, const U: usize, const WHOLE: bool>(
        &self,
    ) -> [__m512; C] {
        let mut blocks = self.blocks;
        if WHOLE {
            // With a constant, offsets between words are known when this is compiled.
            blocks = RowBlocks { rows: LANES, mask: u16::MAX, ..blocks };
        }
        let mut x = ColumnPointers::new(self.x);
        let mut sums = [_mm512_setzero_ps(); C];
        for _ in 0..self.x.scales.len() / C / F::PARTS {
            // SAFETY: the caller guarantees the blocks of the rows, and that the columns have as many. The
            // last pointers are at the ends of their memory. A prefetch accesses no memory, for any address.
            unsafe {
                // The processor's own prefetching ends with each page of 4 KiB. Later columns find the weights in a
                // cache.
                if self.column == 0 {
                    for line in (0..F::BYTES * blocks.rows).step_by(CACHE_LINE) {
                        let ahead = blocks.first.wrapping_add(AHEAD + line);
                        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    }
                }
                let scales = F::scales(blocks);
                for part in 0..F::PARTS {
                    let w = F::part(blocks, scales, part);
                    for (i, sums) in sums.as_chunks_mut().0.iter_mut().enumerate() {
                        if F::SPLIT {
                            add_split_part::<F, U>(sums, &w, x.skip_columns(i * U), C);
                        } else {
                            add_part::<F, U>(sums, &w, x.skip_columns(i * U), C);
                        }
                    }
                    x = x.next_block(C);
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
    x: ColumnPointers,
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
                *sum = _mm512_fmadd_ps(x, w.second, *sum);
            }
        }
    }
}

/// [`add_part`] for a format whose parts have two scales.
///
/// # Safety
/// As for [`add_part`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_split_part<F: IntegerFormat, const U: usize>(
    sums: &mut [__m512; U],
    w: &Part,
    x: ColumnPointers,
    columns: usize,
) {
    for (half, w_scale) in [w.scale, w.second].into_iter().enumerate() {
        let mut upper = [_mm512_setzero_si512(); U];
        let mut lower = upper;
        // SAFETY: the caller guarantees the columns.
        unsafe {
            for (c, lower) in lower.iter_mut().enumerate() {
                let first = *x.first_sums.add(c);
                let second = (*x.negative_sums.add(c)).wrapping_sub(first);
                let negative = if half == 0 { first } else { second };
                *lower = _mm512_set1_epi32(negative << F::SHIFT.unwrap_or(0));
            }
            let from = half * WORDS / 2;
            for (p, w) in w.words[from..].iter().take(WORDS / 2).enumerate() {
                for c in 0..U {
                    let at = (from + p) * columns + c;
                    let word = |at: usize| _mm512_set1_epi32((*x.words.add(at)).cast_signed());
                    upper[c] = _mm512_dpbusd_epi32(upper[c], *w, word(at));
                    lower[c] = _mm512_dpbusd_epi32(lower[c], *w, word(at + WORDS * columns));
                }
            }
            for (c, sum) in sums.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(*x.scales.add(c)));
                let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(upper[c]), lower[c]);
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *sum);
            }
        }
    }
}

/// Writes the sums of some rows and their biases to `out`, whose first value is that of the first of these rows
/// and the first column.
#[inline]
#[target_feature(enable = "avx512f")]
fn write<const C: usize>(
    out: &mut [f32],
    width: usize,
    lanes: Range<usize>,
    bias: &[f32; LANES],
    sums: &[__m512; C],
) {
    // SAFETY: the array has as many values as a vector.
    let bias = unsafe { _mm512_loadu_ps(bias.as_ptr()) };
    let sums = sums.map(|sum| _mm512_add_ps(bias, sum));
    if C == LANES {
        let mut columns = [_mm512_setzero_si512(); LANES];
        for (column, sum) in columns.iter_mut().zip(sums) {
            *column = _mm512_castps_si512(sum);
        }
        let rows = transpose_words(columns);
        for (out, row) in out.chunks_mut(width).zip(&rows[lanes]) {
            let out = &mut out[..LANES];
            // SAFETY: the slice has as many values as a vector.
            unsafe { _mm512_storeu_epi32(out.as_mut_ptr().cast(), *row) };
        }
        return;
    }
    let mut columns = [[0.0_f32; LANES]; C];
    for (column, sum) in columns.iter_mut().zip(sums) {
        // SAFETY: the array has as many values as a vector.
        unsafe { _mm512_storeu_ps(column.as_mut_ptr(), sum) };
    }
    for (out, lane) in out.chunks_mut(width).zip(lanes) {
        for (out, column) in out.iter_mut().zip(&columns) {
            *out = column[lane];
        }
    }
}
