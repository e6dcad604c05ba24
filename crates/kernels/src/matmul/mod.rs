//! Matrix products (CPU), by the `gemm` crate. Products in bf16 have their own kernel.

#[cfg(target_arch = "x86_64")]
pub mod bf16;

use std::ops::Range;

use hone_core::threads::{must_pause_often, pause_point};

use crate::float::Real;
use crate::parallel::threads;

/// The multiplications of a piece of a product on a thread that must pause often: about a millisecond of one
/// core.
const MAX_PIECE: usize = 1 << 26;
/// The shortest side of a piece, unless the product has fewer rows or columns.
const MIN_SIDE: usize = 192;

/// A view of a slice as a matrix.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// `values` row by row, without gaps.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// Rows that start `row_stride` values apart. Panics as [`Self::new`].
    pub fn strided(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(fits(values.len(), rows, columns, row_stride), "the slice is too short");
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    /// The same matrix, if its values are f32.
    pub fn as_f32(self) -> Option<Matrix<'a, f32>>
    where
        T: Real,
    {
        let Self { values, rows, columns, row_stride, column_stride } = self;
        let values = T::as_f32(values)?;
        Some(Matrix { values, rows, columns, row_stride, column_stride })
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

/// `scale * left right`, row by row.
///
/// # Panics
/// If the inner dimensions differ.
pub fn product<T: Real>(scale: f64, left: Matrix<'_, T>, right: Matrix<'_, T>) -> Vec<T> {
    written((left.rows, right.columns), left.columns, |out, len| {
        run(out, right.columns, WriteMode::Replace, scale, left, right, len);
    })
}

/// The `[m, n]` values that `run(out, values)` writes, all of them unless the inner dimension is 0; then they are 0.
fn written<T: Real>(
    (m, n): (usize, usize),
    inner: usize,
    run: impl FnOnce(*mut T, usize),
) -> Vec<T> {
    if inner == 0 {
        return vec![T::of(0.0); m * n];
    }
    let mut out = Vec::with_capacity(m * n);
    run(out.as_mut_ptr(), m * n);
    // SAFETY: the capacity is m * n, and all of these values are written.
    unsafe { out.set_len(m * n) };
    out
}

/// Fills the first `n` values of each of `m` rows, which start `stride` values apart, with zeros.
fn fill_zeros<T: Real>((out, stride): (&mut [T], usize), (m, n): (usize, usize)) {
    for row in out.chunks_mut(stride.max(1)).take(m) {
        row[..n].fill(T::of(0.0));
    }
}

/// Whether a product replaces its output or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum WriteMode {
    /// It replaces the values.
    Replace,
    /// It is added to them.
    Add,
}

/// `out = scale * left right`, or `out += ...`; rows of `out` start `stride` values apart. Sums run over
/// the inner dimension in an order that does not depend on the number of threads.
///
/// # Panics
/// If the inner dimensions differ or `out` is too short.
pub fn multiply<T: Real>(
    (out, stride): (&mut [T], usize),
    mode: WriteMode,
    scale: f64,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
) {
    if left.columns == 0 && mode == WriteMode::Replace {
        return fill_zeros((out, stride), (left.rows, right.columns));
    }
    run(out.as_mut_ptr(), stride, mode, scale, left, right, out.len());
}

/// The product into `len` values at `out`, which may be uninitialized with [`WriteMode::Replace`].
fn run<T: Real>(
    out: *mut T,
    stride: usize,
    mode: WriteMode,
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
    let parallelism = match threads() {
        1 => gemm::Parallelism::None,
        threads => gemm::Parallelism::Rayon(threads),
    };
    let most = if must_pause_often() { MAX_PIECE } else { usize::MAX };
    let (bands, strips) = pieces(m, n, k, most);
    for piece in 0..bands * strips {
        let rows = share(m, bands, piece / strips);
        let columns = share(n, strips, piece % strips);
        // SAFETY: both callers have exclusive access to the `len` values at `out`. The assertions here and
        // in `Matrix::strided` keep every index that the product uses
        // (row * row_stride + column * column_stride) within these and the two slices, because the rows and
        // columns of a piece are below `m` and `n`; rows of `out` do not overlap; strides of slices fit in
        // isize. `out` is read only with `WriteMode::Add`, which `product` does not use.
        unsafe {
            gemm::gemm(
                rows.len(),
                columns.len(),
                k,
                out.add(rows.start * stride + columns.start),
                1,
                stride as isize,
                mode == WriteMode::Add,
                left.values.as_ptr().add(rows.start * left.row_stride),
                left.column_stride as isize,
                left.row_stride as isize,
                right.values.as_ptr().add(columns.start * right.column_stride),
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
        pause_point();
    }
}

/// Numbers of bands of rows and of strips of columns that split a product into pieces of about `most`
/// multiplications. No side of a piece is short, because packing the factors would then take longest.
fn pieces(m: usize, n: usize, k: usize, most: usize) -> (usize, usize) {
    let area = (most / k).max(MIN_SIDE * MIN_SIDE);
    let width = n.min(area.isqrt().max(area / m));
    let height = m.min(area / width);
    (m.div_ceil(height), n.div_ceil(width))
}

/// Part `i` of `count` numbers in `parts` parts, whose lengths differ by at most 1.
fn share(count: usize, parts: usize, i: usize) -> Range<usize> {
    i * count / parts..(i + 1) * count / parts
}

#[cfg(test)]
mod tests;
