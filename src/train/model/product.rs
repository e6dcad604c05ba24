//! Matrix products into memory that is there already (CPU).

use super::parallel::{self, threads};
use super::real::Real;
use super::simd::{self, Loop};

/// A matrix in a slice.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, T> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Row after row without gaps.
    pub fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// Rows that start `row_stride` values after one another.
    pub fn strided(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(fits(values.len(), rows, columns, row_stride), "the slice is too short");
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transposed matrix.
    pub fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

fn fits(len: usize, rows: usize, columns: usize, row_stride: usize) -> bool {
    rows == 0 || columns == 0 || (rows - 1) * row_stride + columns <= len
}

/// `scale * left right` in new memory, row after row.
pub(super) fn product<T: Real>(scale: f64, left: Matrix<'_, T>, right: Matrix<'_, T>) -> Vec<T> {
    let (m, n) = (left.rows, right.columns);
    if left.columns == 0 {
        return vec![T::of(0.0); m * n];
    }
    let mut out = Vec::with_capacity(m * n);
    run(out.as_mut_ptr(), n, Store::Replace, scale, left, right, m * n);
    // SAFETY: the capacity is m * n, and the product has written every one of these values: its inner
    // dimension is above 0, and its rows of n values leave no gaps.
    unsafe { out.set_len(m * n) };
    out
}

/// Whether a product replaces what is there or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    Replace,
    Add,
}

/// `out = scale * left right`, or `out += ...`; rows of `out` start `stride` values after one
/// another. Sums run over the inner dimension in an order that does not depend on the threads.
///
/// # Panics
/// If the inner dimensions differ or `out` is too short.
pub(super) fn multiply<T: Real>(
    (out, stride): (&mut [T], usize),
    store: Store,
    scale: f64,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
) {
    if left.columns == 0 && store == Store::Replace {
        for row in out.chunks_mut(stride.max(1)).take(left.rows) {
            row[..right.columns].fill(T::of(0.0));
        }
        return;
    }
    run(out.as_mut_ptr(), stride, store, scale, left, right, out.len());
}

/// The product into `len` values at `out`, which may be uninitialised where they are replaced.
fn run<T: Real>(
    out: *mut T,
    stride: usize,
    store: Store,
    scale: f64,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
    len: usize,
) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    assert_eq!(k, right.rows, "inner dimensions differ");
    assert!(fits(len, m, n, stride) && (m <= 1 || n <= stride), "the output is too short");
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    // `right` is a transposed matrix with enough to do for its rows to be worth turning.
    let turned = right.row_stride == 1 && right.column_stride > 1;
    if !turned || m.min(n).min(k) < TURN_FROM {
        // SAFETY: both callers own the `len` values at `out` and give them to nobody else meanwhile;
        // the assertions above keep the product within them, and rows from overlapping. `product`
        // never asks for `Store::Add`.
        return unsafe { call((out, stride), store, scale, left, right) };
    }
    let block = (TURNED / k).next_multiple_of(TILE).min(n);
    for first in (0..n).step_by(block) {
        let count = block.min(n - first);
        // Rows a power of two apart would share few lines of the cache.
        let width = count.next_multiple_of(TILE) + TILE;
        T::with_buffer(k * width, |buffer| {
            let from = &right.values[first * right.column_stride..];
            parallel::rows(buffer, width, |row, rows| {
                let from = (from, right.column_stride);
                simd::dispatch(Turn { from, first: row, count, out: rows, width });
            });
            let right = Matrix::strided(buffer, k, count, width);
            // SAFETY: as above; these are `count` columns from `first` on, which is below n, of the
            // m rows.
            unsafe { call((out.add(first), stride), store, scale, left, right) };
        });
    }
}

/// Least of all three dimensions from which turning pays.
const TURN_FROM: usize = 16;

/// Values that are turned at once, about.
const TURNED: usize = 2 << 20;

/// Side of the squares that are turned.
const TILE: usize = 16;

/// Rows `first..` of the transpose of `from`, whose `count` rows start a stride after one another. The
/// product's own packing goes down a column at a time, each step of it to another page.
struct Turn<'a, T> {
    from: (&'a [T], usize),
    first: usize,
    count: usize,
    out: &'a mut [T],
    width: usize,
}

impl<T: Real> Loop for Turn<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let ((from, stride), rows) = (self.from, self.out.len() / self.width);
        for column in (0..self.count).step_by(TILE) {
            for row in (0..rows).step_by(TILE) {
                let at = column * stride + self.first + row;
                let out = &mut self.out[row * self.width + column..];
                if column + TILE <= self.count && row + TILE <= rows {
                    let mut tile = [[T::of(0.0); TILE]; TILE];
                    for (i, line) in tile.iter_mut().enumerate() {
                        line.copy_from_slice(&from[at + i * stride..][..TILE]);
                    }
                    for i in 0..TILE {
                        let line = &mut out[i * self.width..][..TILE];
                        for j in 0..TILE {
                            line[j] = tile[j][i];
                        }
                    }
                } else {
                    for i in 0..TILE.min(rows - row) {
                        for j in 0..TILE.min(self.count - column) {
                            out[i * self.width + j] = from[at + j * stride + i];
                        }
                    }
                }
            }
        }
    }
}

/// The product as it is.
///
/// # Safety
/// The caller owns `left.rows` rows of `right.columns` values, `stride` after one another, at `out`,
/// and they do not overlap; they may be uninitialised where they are replaced. The inner dimensions
/// are equal and not 0.
unsafe fn call<T: Real>(
    (out, stride): (*mut T, usize),
    store: Store,
    scale: f64,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    let parallelism = match threads() {
        1 => gemm::Parallelism::None,
        threads => gemm::Parallelism::Rayon(threads),
    };
    // SAFETY: the caller owns what is written at `out`. The assertion in `Matrix::strided` keeps every
    // index that is read (row * row_stride + column * column_stride) within the two slices; strides
    // of slices fit in isize. `out` is read only with `Store::Add`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            stride as isize,
            store == Store::Add,
            left.values.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            T::of(1.0),
            T::of(scale),
            false,
            false,
            false,
            parallelism,
        );
    }
}
