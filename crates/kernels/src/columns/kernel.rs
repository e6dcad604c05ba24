//! The matmul kernel: tiles of sums that stay in vector registers.

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use crate::processor::{CACHE_LINE, prefetch};
use crate::vector::{widen_bf16, widen_f16};

/// The width of activations is a multiple of this, except for the kernels for a few tokens. It is a
/// multiple of every vector length.
pub const COLUMN_BLOCK: usize = 16;

/// Weights of a row that are converted to f32 at a time.
const LINE: usize = 32;

/// Weights `[out, inner]` in row-major order.
#[derive(Clone, Copy)]
pub struct WeightMatrix<'a, W = f32> {
    /// The weights.
    pub values: &'a [W],
    /// Weights of a row.
    pub inner: usize,
}

/// Activations `[features, width]` in row-major order, one column for each token.
#[derive(Clone, Copy)]
pub struct TokenColumns<'a> {
    /// The activations.
    pub values: &'a [f32],
    /// Values of a row.
    pub width: usize,
    /// The number of tokens, at most `width`. Columns beyond it are padding, and kernels may leave them
    /// out.
    pub tokens: usize,
}

/// A type that weights are stored in.
pub trait StoredWeight: Copy {
    /// The exact value.
    fn widen(self) -> f32;
}

impl StoredWeight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl StoredWeight for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_bf16(self)
    }
}

impl StoredWeight for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_f16(self.to_bits())
    }
}

/// `out += w x`. `out` is `[outputs, width]`, and `w` has at least as many rows.
pub(super) struct AddMatmul<'a, W> {
    pub out: &'a mut [f32],
    pub w: WeightMatrix<'a, W>,
    pub x: TokenColumns<'a>,
}

impl<W: StoredWeight> WithSimd for AddMatmul<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let TokenColumns { values, width, .. } = self.x;
        assert!(width.is_multiple_of(COLUMN_BLOCK) && values.len() >= self.w.inner * width);
        let mut column = 0;
        while column < width {
            // Sums, a vector of each row of x and a weight fill most of the 32 registers of AVX-512
            // and NEON, or the 16 of AVX2.
            let vectors = match (S::F32_LANES, (width - column) / S::F32_LANES) {
                (16, 4..) => self.columns::<S, 6, 4>(simd, column),
                (16, 3) => self.columns::<S, 8, 3>(simd, column),
                (16, 2) => self.columns::<S, 8, 2>(simd, column),
                (16, _) => self.columns::<S, 16, 1>(simd, column),
                (8, _) => self.columns::<S, 6, 2>(simd, column),
                (4, _) => self.columns::<S, 6, 4>(simd, column),
                // The compiler forms SSE2 vectors.
                _ => self.columns::<S, 1, 16>(simd, column),
            };
            column += vectors * S::F32_LANES;
        }
    }
}

impl<W: StoredWeight> AddMatmul<'_, W> {
    /// Computes all outputs of `N` vectors of columns, `M` outputs at a time. Returns `N`.
    #[inline(always)]
    fn columns<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        column: usize,
    ) -> usize {
        let outputs = self.out.len() / self.x.width;
        let mut row = 0;
        while row + M <= outputs {
            self.tile::<S, M, N>(simd, row, column);
            row += M;
        }
        while row + 4 <= outputs {
            self.tile::<S, 4, N>(simd, row, column);
            row += 4;
        }
        while row < outputs {
            self.tile::<S, 1, N>(simd, row, column);
            row += 1;
        }
        N
    }

    /// Computes `M` outputs of `N` vectors of columns.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        row: usize,
        column: usize,
    ) {
        let (inner, width, lanes) = (self.w.inner, self.x.width, N * S::F32_LANES);
        let (rows, next_tile) = self.w.values[row * inner..].split_at(M * inner);
        let out = &mut self.out[row * width..][..M * width];
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for (sums, out) in sums.iter_mut().zip(out.chunks_exact(width)) {
            sums.copy_from_slice(S::as_simd_f32s(&out[column..][..lanes]).0);
        }
        let mut lines = [[0.0_f32; LINE]; M];
        for (k, x) in (0..inner).step_by(LINE).zip(self.x.values.chunks(LINE * width)) {
            for (line, row) in lines.iter_mut().zip(rows.chunks_exact(inner)) {
                let widen = |(wide, w): (&mut f32, &W)| *wide = w.widen();
                match row[k..].first_chunk::<LINE>() {
                    // The compiler vectorizes a loop of constant length.
                    Some(row) => line.iter_mut().zip(row).for_each(widen),
                    None => line.iter_mut().zip(&row[k..]).for_each(widen),
                }
            }
            for (x, i) in x.chunks_exact(width).take(inner - k).zip(0..LINE) {
                // The cache lines of this line in the next tile, one in each step. Rows are too short for
                // the processor to recognize the access pattern in time.
                let ahead = i % M * inner + k + i / M * CACHE_LINE;
                prefetch(next_tile.as_ptr().wrapping_add(ahead));
                let x = S::as_simd_f32s(&x[column..][..lanes]).0;
                for (sums, line) in sums.iter_mut().zip(&lines) {
                    let w = simd.splat_f32s(line[i]);
                    let pairs = sums.iter_mut().zip(x);
                    pairs.for_each(|(sum, x)| *sum = simd.mul_add_e_f32s(w, *x, *sum));
                }
            }
        }
        for (sums, out) in sums.iter().zip(out.chunks_exact_mut(width)) {
            S::as_mut_simd_f32s(&mut out[column..][..lanes]).0.copy_from_slice(sums);
        }
    }
}
