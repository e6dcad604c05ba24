//! Products of matrices whose values are rounded to bf16, with sums in f32, by the tile registers (AMX) or
//! the vectors (AVX-512) of x86 processors.
//!
//! A factor is packed first: its values are rounded to the nearest bf16, ties to even, and stored in the
//! order in which tiles are loaded. A tile of the left factor holds 32 inner values of 16 rows, and a tile
//! of the right factor 32 inner values of 16 columns. One instruction multiplies two tiles and adds the
//! product to a tile of 16 x 16 sums. A panel is two tiles wide: 32 rows of the left factor or 32 columns
//! of the right one, with all inner values. Packed factors are padded with zeros to whole panels. The
//! kernel for AVX-512 reads the same packed factors.
//!
//! A sum starts from 0, or from the output that it is added to. It runs over the inner dimension in
//! parts of at most `DEPTH` tiles, whose number depends on the inner dimension alone, so the bits do
//! not depend on the number of threads. Subnormal numbers count as 0.

mod amx;
mod layout;
mod pack;
mod vectors;

use std::ops::Range;

use hone_core::threads::pause_point;

use super::{Matrix, WriteMode, fill_zeros, share, written};
use crate::parallel::{self, SharedPointer, threads};
use crate::processor::Bf16Unit;
use amx::TileRegisters;
pub use layout::UnpackedRows;
use layout::{EDGE, TileBuffer, TileRow};
use pack::Packable;

/// Rows of memory of the two tiles of a panel that have the same inner values.
const PAIR: usize = EDGE;

/// Most tiles along the inner dimension that are multiplied before the sums are stored. More of them
/// do not fit into the first-level cache, and with fewer of them the sums are loaded and stored more
/// often.
const DEPTH: usize = 24;

/// Most panels of rows and of columns in one task. With [`DEPTH`] tiles it takes about 100 µs, and its
/// factors fit into the second-level cache.
const TASK_PANELS: (usize, usize) = (16, 4);

/// Tasks for each thread, where there are enough panels, so that no thread waits long for the last one.
const TASKS_PER_THREAD: usize = 4;

/// A packed factor.
pub struct PackedFactor {
    unit: Bf16Unit,
    /// For each panel, for each tile along the inner dimension, the rows of memory of two tiles.
    tiles: TileBuffer,
    /// Rows of the left factor, or columns of the right one.
    len: usize,
    inner: usize,
}

impl PackedFactor {
    /// Packs the left factor of a product.
    ///
    /// # Panics
    /// If the matrix is transposed.
    pub fn left(unit: Bf16Unit, matrix: Matrix<'_, f32>) -> Self {
        let Matrix { values, rows, columns, row_stride, column_stride } = matrix;
        assert_eq!(column_stride, 1, "the left factor is transposed");
        let depth = columns.div_ceil(EDGE);
        Self::pack(unit, rows, columns, |to| {
            parallel::each(rows.div_ceil(EDGE), |panel| {
                let first = panel * EDGE;
                let count = EDGE.min(rows - first);
                // SAFETY: `unit` proves the instructions. The matrix has these rows, `row_stride` values apart, of `columns` values, and
                // the panel has `depth` pairs of tiles that no other task writes to.
                unsafe {
                    let from = values.as_ptr().add(first * row_stride);
                    pack::rows(from, row_stride, (count, columns), to.at(panel * depth * PAIR));
                }
            });
        })
    }

    /// Packs the right factor of a product: a stored matrix of `rows` rows of `columns` values, or its
    /// transpose. `read(rows, pack)` calls `pack` with the values of these rows. Matrices in a format
    /// other than f32 and bf16 are thus converted a few rows at a time.
    ///
    /// # Panics
    /// If `read` passes another number of values.
    pub fn right(
        unit: Bf16Unit,
        (rows, columns): (usize, usize),
        transposed: bool,
        read: impl Fn(Range<usize>, &dyn Fn(UnpackedRows<'_>)) + Sync + Send,
    ) -> Self {
        let (len, inner) = if transposed { (rows, columns) } else { (columns, rows) };
        Self::pack(unit, len, inner, |to| {
            parallel::each(rows.div_ceil(EDGE), |part| {
                let part_rows = part * EDGE..rows.min((part + 1) * EDGE);
                let shape = (part_rows.len(), columns);
                let part = PackedPart { to, part, depth: inner.div_ceil(EDGE), transposed };
                // SAFETY: `unit` proves the instructions, and no other task writes to the part.
                read(part_rows, &|stored| unsafe {
                    match stored {
                        UnpackedRows::F32(values) => part.pack(values, shape),
                        UnpackedRows::Bf16(values) => part.pack(values, shape),
                    }
                });
            });
        })
    }

    /// A factor whose tiles `write` writes, all of them.
    fn pack(
        unit: Bf16Unit,
        len: usize,
        inner: usize,
        write: impl FnOnce(SharedPointer<TileRow>),
    ) -> Self {
        let count = len.div_ceil(EDGE) * inner.div_ceil(EDGE) * PAIR;
        Self { unit, tiles: TileBuffer::written(count, write), len, inner }
    }

    /// The proof with which the factor was packed.
    pub fn unit(&self) -> Bf16Unit {
        self.unit
    }

    /// Tiles along the inner dimension.
    fn depth(&self) -> usize {
        self.inner.div_ceil(EDGE)
    }

    /// The first row of memory of a pair of tiles.
    fn pair(&self, panel: usize, tile: usize) -> *const TileRow {
        self.tiles[(panel * self.depth() + tile) * PAIR..].as_ptr()
    }
}

/// Where 32 rows, or the last ones, of a stored matrix are packed.
#[derive(Clone, Copy)]
struct PackedPart {
    to: SharedPointer<TileRow>,
    part: usize,
    depth: usize,
    /// Whether the rows are columns of the factor, a panel, or else inner values, a pair of tiles of each panel.
    transposed: bool,
}

impl PackedPart {
    /// Packs the rows of a matrix.
    ///
    /// # Safety
    /// The processor has AVX-512 with bf16. The memory is that of the factor's tiles, and nothing else uses those of
    /// the part.
    unsafe fn pack<V: Packable>(self, values: &[V], (rows, columns): (usize, usize)) {
        let Self { to, part, depth, transposed } = self;
        assert_eq!(values.len(), rows * columns, "other rows than requested");
        let (from, shape) = (values.as_ptr(), (rows, columns));
        // SAFETY: the assertion bounds what is read, and the caller guarantees what is written.
        unsafe {
            if transposed {
                pack::transposed(from, shape, to.at(part * depth * PAIR));
            } else {
                pack::pairs(from, shape, to.at(part * PAIR), depth * PAIR);
            }
        }
    }
}

/// `left right`, row by row.
///
/// # Panics
/// If the inner dimensions differ.
pub fn product(left: &PackedFactor, right: &PackedFactor) -> Vec<f32> {
    written((left.len, right.len), left.inner, |out, len| {
        run((out, right.len), len, WriteMode::Replace, left, right);
    })
}

/// `out = left right`, or `out += left right`; rows of `out` start `stride` values apart.
///
/// # Panics
/// If the inner dimensions differ or `out` is too short.
pub fn multiply(
    (out, stride): (&mut [f32], usize),
    mode: WriteMode,
    left: &PackedFactor,
    right: &PackedFactor,
) {
    if left.inner == 0 && mode == WriteMode::Replace {
        return fill_zeros((out, stride), (left.len, right.len));
    }
    run((out.as_mut_ptr(), stride), out.len(), mode, left, right);
}

/// The product into `len` values at `out`, which may be uninitialized with [`WriteMode::Replace`].
fn run(
    (out, stride): (*mut f32, usize),
    len: usize,
    mode: WriteMode,
    left: &PackedFactor,
    right: &PackedFactor,
) {
    assert_eq!(left.inner, right.inner, "inner dimensions differ");
    let (m, n, depth) = (left.len, right.len, left.depth());
    assert!(super::fits(len, m, n, stride) && (m <= 1 || n <= stride), "the output is too short");
    if m == 0 || n == 0 || depth == 0 {
        return;
    }
    let (rows, columns) = (m.div_ceil(EDGE), n.div_ceil(EDGE));
    let (height, width) = task_panels(rows, columns, threads());
    let (bands, strips) = (rows.div_ceil(height), columns.div_ceil(width));
    let (out, parts) = (SharedPointer(out), depth.div_ceil(DEPTH));
    parallel::each(bands * strips, |task| {
        let (rows, columns) =
            (share(rows, bands, task / strips), share(columns, strips, task % strips));
        for part in 0..parts {
            let product = PartialProduct {
                left,
                right,
                tiles: share(depth, parts, part),
                out,
                stride,
                adds: part > 0 || mode == WriteMode::Add,
            };
            // SAFETY: both callers have exclusive access to the `len` values at `out`, and these rows
            // and columns belong to this task alone. The assertion keeps them within the output.
            // Values are read only to add to them: with `WriteMode::Add`, which `product` does not
            // use, or after the first part has written them.
            unsafe { product.multiply(rows.clone(), columns.clone()) };
            pause_point();
        }
    });
}

/// Panels of rows and of columns of a task.
fn task_panels(rows: usize, columns: usize, threads: usize) -> (usize, usize) {
    let (mut height, mut width) = TASK_PANELS;
    let enough = if threads > 1 { TASKS_PER_THREAD * threads } else { 1 };
    while rows.div_ceil(height) * columns.div_ceil(width) < enough && height * width > 1 {
        if height > width { height /= 2 } else { width /= 2 }
    }
    (height, width)
}

/// A block of the output that is only partly within it. Aligned, because tiles whose rows cross lines of
/// the cache are stored slowly.
#[repr(align(64))]
struct BlockSums([f32; EDGE * EDGE]);

/// A part of a product: some tiles along the inner dimension.
struct PartialProduct<'a> {
    left: &'a PackedFactor,
    right: &'a PackedFactor,
    tiles: Range<usize>,
    out: SharedPointer<f32>,
    stride: usize,
    /// Whether the products are added to the output.
    adds: bool,
}

impl PartialProduct<'_> {
    /// Computes these panels of rows and columns.
    ///
    /// # Safety
    /// The output has these rows and columns, as far as they are within the product. No other thread
    /// uses them, and they are initialized if the products are added.
    unsafe fn multiply(&self, rows: Range<usize>, columns: Range<usize>) {
        // SAFETY: the factor's unit proves the instructions.
        let registers = self.left.unit.is_amx().then(|| unsafe { TileRegisters::new() });
        for i in rows {
            for j in columns.clone() {
                let (first_row, first_column) = (i * EDGE, j * EDGE);
                let height = EDGE.min(self.left.len - first_row);
                let width = EDGE.min(self.right.len - first_column);
                let left = self.left.pair(i, self.tiles.start);
                let right = self.right.pair(j, self.tiles.start);
                let multiply = |out: (*mut f32, usize)| {
                    let (panels, tiles, adds) = ((left, right), self.tiles.len(), self.adds);
                    // SAFETY: the unit proves the instructions, both panels have these tiles, and callers have
                    // the block.
                    unsafe {
                        match &registers {
                            Some(registers) => registers.multiply(panels, tiles, out, adds),
                            None => vectors::multiply(panels, tiles, out, adds),
                        }
                    }
                };
                // SAFETY: the caller guarantees the output: a whole block is written directly, and of a
                // partial one only the values within it.
                unsafe {
                    let out = self.out.at(first_row * self.stride + first_column);
                    if height == EDGE && width == EDGE {
                        multiply((out, self.stride));
                        continue;
                    }
                    let mut whole = BlockSums([0.0; EDGE * EDGE]);
                    let sums = whole.0.as_mut_ptr();
                    if self.adds {
                        copy((out, self.stride), (sums, EDGE), (height, width));
                    }
                    multiply((sums, EDGE));
                    copy((sums, EDGE), (out, self.stride), (height, width));
                }
            }
        }
    }
}

/// Copies rows of values; each matrix is a pointer and the distance of its rows.
///
/// # Safety
/// Both matrices have `height` rows of `width` values, and they do not overlap.
unsafe fn copy(
    (from, from_stride): (*const f32, usize),
    (to, to_stride): (*mut f32, usize),
    (height, width): (usize, usize),
) {
    for row in 0..height {
        // SAFETY: the caller guarantees these rows.
        unsafe {
            to.add(row * to_stride).copy_from_nonoverlapping(from.add(row * from_stride), width)
        };
    }
}

#[cfg(test)]
mod tests;
