//! The kernel: a vector of 16 outputs for each of a few columns.

use std::cell::Cell;
use std::iter::repeat_n;
use std::ops::Range;

use super::RowVectors;
use super::{RowsFormat, RowsPart};
use crate::matmul::integer::formats::WeightFormat;
use crate::matmul::integer::layout::{BLOCK_WORDS, IntegerGroup, LANES};
use crate::matmul::integer::product::Product;
use crate::prefetch::prefetch;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Bytes that weights are fetched ahead of their use.
const AHEAD: usize = 4096;

thread_local! {
    /// The last rows of a matrix if they are fewer than 16, and zeros.
    static LAST_ROWS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Computes all outputs.
#[inline(always)]
pub(super) fn run<V: RowVectors, F: RowsFormat>(v: V, product: &mut Product<'_>) {
    product.check::<F>();
    let (w, row_bytes) = (product.w, product.row_bytes::<F>());
    let (x, width) = (product.x, product.width);
    let mut last_rows = LAST_ROWS.take();
    let mut start = 0;
    while let Some(rows) = product.rows_from(start) {
        start = rows.start + LANES;
        let stored = &w[rows.start * row_bytes..][..rows.rows * row_bytes];
        let blocks = if rows.rows == LANES {
            stored
        } else {
            fill_rows::<F>(stored, rows.rows, &mut last_rows);
            last_rows.as_slice()
        };
        let bias = product.biases(&rows);
        for group in 0..x.groups() {
            let x = x.group(group);
            let out = &mut product.out[rows.at * width + group * LANES..];
            let step = match x.columns {
                6 => 3,
                8 => 4,
                columns => columns.max(1),
            };
            for first in (0..x.columns).step_by(step) {
                let tile = RowsTile { blocks, x, first, bias: &bias, lanes: rows.lanes.clone() };
                let out = &mut out[first..];
                match step {
                    1 => tile.write::<V, F, 1, 1>(v, out, width),
                    2 => tile.write::<V, F, 2, 2>(v, out, width),
                    3 => tile.write::<V, F, 3, 3>(v, out, width),
                    4 => tile.write::<V, F, 4, 4>(v, out, width),
                    _ => tile.write::<V, F, LANES, 4>(v, out, width),
                }
            }
        }
    }
    LAST_ROWS.set(last_rows);
}

/// Interleaves fewer than 16 rows as if there were 16; the others are zero.
fn fill_rows<F: WeightFormat>(stored: &[u8], rows: usize, to: &mut Vec<u8>) {
    let [before, after] = F::HALVES;
    let words = (F::BYTES - 2 * (before + after)) / 4;
    to.clear();
    to.resize(stored.len() / rows * LANES, 0);
    let blocks = stored.chunks_exact(F::BYTES * rows).zip(to.chunks_exact_mut(F::BYTES * LANES));
    for (stored, to) in blocks {
        let mut at = 0;
        for bytes in repeat_n(2, before).chain(repeat_n(4, words)).chain(repeat_n(2, after)) {
            to[at * LANES..][..bytes * rows].copy_from_slice(&stored[at * rows..][..bytes * rows]);
            at += bytes;
        }
    }
}

/// 16 rows of the weights, and some columns.
struct RowsTile<'a> {
    /// The interleaved blocks of the rows.
    blocks: &'a [u8],
    x: IntegerGroup<'a>,
    /// The first column of the group.
    first: usize,
    bias: &'a [f32; LANES],
    /// The rows that are computed.
    lanes: Range<usize>,
}

impl RowsTile<'_> {
    /// Writes the products with `C` columns and the bias to `out`, whose first value is that of the first computed
    /// row and the first column.
    #[inline(always)]
    fn write<V: RowVectors, F: RowsFormat, const C: usize, const U: usize>(
        self,
        v: V,
        out: &mut [f32],
        width: usize,
    ) {
        let sums = self.sums::<V, F, C, U>(v);
        for (out, lane) in out.chunks_mut(width).zip(self.lanes.clone()) {
            for (out, column) in out.iter_mut().zip(&sums) {
                *out = self.bias[lane] + column[lane];
            }
        }
    }

    /// The products, `U` columns at a time.
    #[inline(always)]
    fn sums<V: RowVectors, F: RowsFormat, const C: usize, const U: usize>(
        &self,
        v: V,
    ) -> [[f32; LANES]; C] {
        // A whole group has a constant number of columns.
        let columns = if C == LANES { LANES } else { self.x.columns };
        let x = IntegerGroup { columns, ..self.x };
        let mut sums = [v.floats(0.0); C];
        let mut at = 0;
        for blocks in self.blocks.chunks_exact(F::BYTES * LANES) {
            // The processor's own prefetching ends with each page of 4 KiB.
            for line in (0..F::BYTES * LANES).step_by(CACHE_LINE) {
                prefetch(blocks.as_ptr().wrapping_add(AHEAD + line));
            }
            let scales = F::scales(v, blocks);
            for part in 0..F::PARTS {
                let w = F::part(v, blocks, scales, part);
                let x = x.block(at);
                for (i, sums) in sums.as_chunks_mut().0.iter_mut().enumerate() {
                    add_part::<V, F, U>(v, sums, &w, x, self.first + i * U);
                }
                at += 1;
            }
        }
        let mut values = [[0.0; LANES]; C];
        for (values, sum) in values.iter_mut().zip(&sums) {
            *values = v.values(*sum);
        }
        values
    }
}

/// Adds the products of 32 weights of each row to the sums of `U` columns from `first` on. `x` is a block of
/// the group.
#[inline(always)]
fn add_part<V: RowVectors, F: RowsFormat, const U: usize>(
    v: V,
    sums: &mut [V::Floats; U],
    w: &RowsPart<V>,
    x: IntegerGroup<'_>,
    first: usize,
) {
    let halves = if F::SPLIT { 2 } else { 1 };
    let pairs = BLOCK_WORDS / halves;
    for half in 0..halves {
        let mut negative_sums = [0_i32; U];
        for (c, negative) in negative_sums.iter_mut().enumerate() {
            let (all, first) = (x.negative_sums[first + c], x.first_sums[first + c]);
            *negative = match (F::SPLIT, half) {
                (false, _) => all,
                (true, 0) => first,
                (true, _) => all.wrapping_sub(first),
            };
        }
        let mut dots = [v.words(0); U];
        if let Some(shift) = F::SHIFT {
            for (dot, negative) in dots.iter_mut().zip(negative_sums) {
                *dot = v.words(negative.cast_unsigned() << shift);
            }
        }
        for (p, w) in w.pairs.iter().enumerate().skip(half * pairs).take(pairs) {
            let words = &x.words[p * x.columns + first..][..U];
            for (dot, word) in dots.iter_mut().zip(words) {
                *dot = v.add_products(*dot, *w, *word);
            }
        }
        let w_scale = if half == 0 { w.scale } else { w.second };
        for (c, sum) in sums.iter_mut().enumerate() {
            let x_scale = x.scales[first + c];
            let scale = v.mul(w_scale, v.floats(x_scale));
            *sum = v.mul_add(v.to_floats(dots[c]), scale, *sum);
            if F::SHIFT.is_none() {
                let x = v.floats(negative_sums[c] as f32 * x_scale);
                *sum = v.mul_add(x, w.second, *sum);
            }
        }
    }
}
