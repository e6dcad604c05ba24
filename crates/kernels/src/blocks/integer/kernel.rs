//! The operands of a product, and the kernel: a vector of 16 outputs for each of a few columns.

use std::cell::Cell;
use std::ops::Range;

use super::activations::{BLOCK, BLOCK_ROWS, BLOCK_WORDS, IntegerGroup, LANES, WORDS};
use super::columns::IntegerColumns;
use super::formats::{RowsFormat, RowsPart};
use super::lanes::RowVectors;
use crate::blocks::{BlockFormat, QuantizedMatrix};
use crate::processor::prefetch;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Bytes that weights are fetched ahead of their use.
const AHEAD: usize = 4096;

thread_local! {
    /// The last rows of a matrix if they are fewer than 16, and zeros.
    static LAST_ROWS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The operands of `out = w x + bias`.
pub(super) struct Product<'a> {
    /// `[outputs, width]`
    pub out: &'a mut [f32],
    pub width: usize,
    /// The first row of the matrix to use.
    pub first: usize,
    pub matrix: &'a QuantizedMatrix,
    /// For each row of the whole matrix; none is 0.
    pub bias: Option<&'a [f32]>,
    pub x: &'a IntegerColumns,
}

/// Up to [`LANES`] rows of weights whose blocks are interleaved.
struct OutputRows {
    /// The first row.
    start: usize,
    /// The number of rows.
    rows: usize,
    /// Those of them that are computed.
    lanes: Range<usize>,
    /// The output of the first one that is computed.
    at: usize,
}

impl Product<'_> {
    /// Checks that the operands fit each other.
    fn check(&self, format: BlockFormat) {
        let (rows, inner) = self.matrix.dims();
        assert!(self.matrix.format() == format && inner == self.x.blocks() * BLOCK);
        assert!(self.first + self.out.len() / self.width <= rows);
        assert!(self.x.all_columns() <= self.width);
        assert!(self.bias.is_none_or(|bias| bias.len() == rows));
    }

    /// The bias of each of some rows; 0 for those that are not computed.
    #[inline(always)]
    fn biases(&self, rows: &OutputRows) -> [f32; LANES] {
        let mut biases = [0.0; LANES];
        if let Some(bias) = self.bias {
            let lanes = rows.lanes.clone();
            biases[lanes.clone()].copy_from_slice(&bias[rows.start..][lanes]);
        }
        biases
    }

    /// Writes the columns that no token has.
    pub fn fill_other_columns(&mut self) {
        let (columns, width) = (self.x.all_columns(), self.width);
        if columns < width {
            for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
                out[columns..].fill(self.bias.map_or(0.0, |bias| bias[self.first + i]));
            }
        }
    }

    /// The rows to compute from row `start` on, which is a multiple of [`LANES`] or before the first row;
    /// `None` after the last one.
    fn rows_from(&self, start: usize) -> Option<OutputRows> {
        let end = self.first + self.out.len() / self.width;
        let start = start.max(self.first / LANES * LANES);
        if start >= end {
            return None;
        }
        let rows = LANES.min(self.matrix.dims().0 - start);
        let lanes = self.first.max(start) - start..end.min(start + rows) - start;
        Some(OutputRows { start, rows, at: start + lanes.start - self.first, lanes })
    }
}

/// Computes all outputs.
#[inline(always)]
pub(super) fn run<V: RowVectors, F: RowsFormat>(v: V, product: &mut Product<'_>) {
    product.check(F::FORMAT);
    let (x, width) = (product.x, product.width);
    let row_bytes = x.blocks() / F::PARTS * F::BYTES;
    let mut last_rows = LAST_ROWS.take();
    let mut start = 0;
    while let Some(rows) = product.rows_from(start) {
        start = rows.start + LANES;
        let mut blocks = &product.matrix.interleaved()[rows.start * row_bytes..];
        if rows.rows < LANES {
            fill_rows::<F>(blocks, rows.rows, &mut last_rows);
            blocks = &last_rows;
        }
        assert!(blocks.len() >= row_bytes * LANES);
        let bias = product.biases(&rows);
        for group in 0..x.groups() {
            let out = (&mut product.out[rows.at * width + group * LANES..], width);
            let (blocks, x, rows) = (blocks.as_ptr(), x.group(group), rows.lanes.clone());
            let tile = RowsTile { blocks, x, is_first: group == 0, bias: &bias, rows };
            // SAFETY: the assertion and the check keep all blocks and columns within the operands.
            unsafe {
                match tile.x.columns {
                    1 => tile.write::<V, F, 1, 1>(v, out),
                    2 => tile.write::<V, F, 2, 2>(v, out),
                    3 => tile.write::<V, F, 3, 3>(v, out),
                    4 => tile.write::<V, F, 4, 4>(v, out),
                    6 => tile.write::<V, F, 6, 3>(v, out),
                    8 => tile.write::<V, F, 8, 4>(v, out),
                    LANES => tile.write::<V, F, LANES, 4>(v, out),
                    columns => unreachable!("{columns} columns"),
                }
            }
        }
    }
    LAST_ROWS.set(last_rows);
}

/// Interleaves fewer than 16 rows as if there were 16; the others are zero.
fn fill_rows<F: RowsFormat>(stored: &[u8], rows: usize, to: &mut Vec<u8>) {
    to.clear();
    to.resize(stored.len() / rows * LANES, 0);
    let blocks = stored.chunks_exact(F::BYTES * rows).zip(to.chunks_exact_mut(F::BYTES * LANES));
    for (stored, to) in blocks {
        F::FORMAT.each_part(|at, len| {
            to[at * LANES..][..len * rows].copy_from_slice(&stored[at * rows..][..len * rows]);
        });
    }
}

/// 16 rows of the weights, and a group of columns.
struct RowsTile<'a> {
    /// The interleaved blocks of the rows.
    blocks: *const u8,
    x: IntegerGroup<'a>,
    /// Whether no other group of columns has used these rows.
    is_first: bool,
    bias: &'a [f32; LANES],
    /// The rows that are computed.
    rows: Range<usize>,
}

impl RowsTile<'_> {
    /// Writes the products with the group's `C` columns, `U` at a time, and the bias to `out`, whose first value is
    /// that of the first computed row and the first column. The sums of several columns do not wait for each other.
    ///
    /// # Safety
    /// The rows have as many blocks as the columns.
    #[inline(always)]
    unsafe fn write<V: RowVectors, F: RowsFormat, const C: usize, const U: usize>(
        self,
        v: V,
        out: (&mut [f32], usize),
    ) {
        let mut sums = [v.floats(0.0); C];
        let (mut blocks, mut at) = (self.blocks, 0);
        for _ in 0..self.x.rows.len() / (BLOCK_ROWS * C * F::PARTS) {
            // SAFETY: the caller guarantees the blocks of the rows, and that the columns have as many. The last
            // pointer is at the end of its memory.
            unsafe {
                // The processor's own prefetching ends with each page of 4 KiB. Later columns find the weights in a
                // cache.
                if self.is_first {
                    for line in (0..F::BYTES * LANES).step_by(CACHE_LINE) {
                        prefetch(blocks.wrapping_add(AHEAD + line));
                    }
                }
                let scales = F::scales(v, blocks);
                for part in 0..F::PARTS {
                    let w = F::part(v, blocks, scales, part);
                    for (i, sums) in sums.as_chunks_mut().0.iter_mut().enumerate() {
                        let x = self.x.rows.as_ptr().add(at * BLOCK_ROWS * C + i * U);
                        if F::SPLIT {
                            add_part::<V, F, C, U, 0>(v, sums, &w, x);
                            add_part::<V, F, C, U, 1>(v, sums, &w, x);
                        } else {
                            add_part::<V, F, C, U, 0>(v, sums, &w, x);
                        }
                    }
                    at += 1;
                }
                blocks = blocks.add(F::BYTES * LANES);
            }
        }
        v.write(&sums, self.bias, self.rows, out);
    }
}

/// Adds the products of 32 weights of each row, or with [`RowsFormat::SPLIT`] of half `HALF` of them, to the sums of the
/// first `U` columns of a group of `C`, whose block is at `x`.
///
/// # Safety
/// The columns exist.
#[inline(always)]
unsafe fn add_part<
    V: RowVectors,
    F: RowsFormat,
    const C: usize,
    const U: usize,
    const HALF: usize,
>(
    v: V,
    sums: &mut [V::Floats; U],
    w: &RowsPart<V>,
    x: *const u32,
) {
    let [word_step, product_step] = V::STEPS;
    let mut dots = [v.dots(v.words(0)); U];
    // SAFETY: the caller guarantees the columns.
    unsafe {
        let scales = x.add(BLOCK_WORDS * C).cast::<f32>();
        let negative_sums = x.add((BLOCK_WORDS + 1) * C);
        if let Some(shift) = F::SHIFT {
            for (c, dots) in dots.iter_mut().enumerate() {
                let all = *negative_sums.add(c);
                let first = if F::SPLIT { *negative_sums.add(C + c) } else { all };
                let negative = if HALF == 0 { first } else { all.wrapping_sub(first) };
                *dots = v.dots(if F::SPLIT {
                    v.words(negative << shift)
                } else {
                    v.shift_left(v.words(negative), shift)
                });
            }
        }
        let half = HALF * WORDS / 2..(HALF + 1) * WORDS / 2;
        for p in if F::SPLIT { half } else { 0..WORDS } {
            let (w, first) = (w.weights[p], x.add(p * word_step * C));
            for (c, dots) in dots.iter_mut().enumerate() {
                *dots = v.add_products::<0>(*dots, w, *first.add(c));
            }
            let next = first.add(product_step * C);
            for (c, dots) in dots.iter_mut().enumerate() {
                *dots = v.add_products::<1>(*dots, w, *next.add(c));
            }
        }
        let w_scale = if HALF == 0 { w.scale } else { w.second };
        for (c, sum) in sums.iter_mut().enumerate() {
            let x_scale = v.floats(*scales.add(c));
            let dot = v.to_floats(v.total(dots[c]));
            *sum = v.mul_add(dot, v.mul(w_scale, x_scale), *sum);
            if F::SHIFT.is_none() {
                let negative = v.words(*negative_sums.add(c));
                *sum = v.mul_add(v.mul(v.to_floats(negative), x_scale), w.second, *sum);
            }
        }
    }
}
