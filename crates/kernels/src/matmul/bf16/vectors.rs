//! The product of two panels with AVX-512 (`vdpbf16ps`), on the same packed factors as AMX.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_dpbf16_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use super::layout::{EDGE, TileRow};

/// Rows of the left factor whose sums stay in registers, two vectors for each.
const ROWS: usize = 8;

/// Values of a vector, and pairs of inner values of a tile.
const LANES: usize = EDGE / 2;

/// As [`TileRegisters::multiply`](super::amx::TileRegisters::multiply).
///
/// # Safety
/// The processor has AVX-512 with bf16. `tiles` is above 0, both panels have as many tiles from the
/// pointers on, and `out` has the block.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(
    (left, right): (*const TileRow, *const TileRow),
    tiles: usize,
    (out, stride): (*mut f32, usize),
    adds: bool,
) {
    for first in (0..EDGE).step_by(ROWS) {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        // SAFETY: rows are below `EDGE`, and the caller guarantees the tiles and the block.
        unsafe {
            let out = out.add(first * stride);
            if adds {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let out = out.add(row * stride);
                    *sums = [_mm512_loadu_ps(out), _mm512_loadu_ps(out.add(LANES))];
                }
            }
            for tile in 0..tiles {
                add_tile(&mut sums, left.add(tile * EDGE + first), right.add(tile * EDGE));
            }
            for (row, [low, high]) in sums.into_iter().enumerate() {
                let out = out.add(row * stride);
                _mm512_storeu_ps(out, low);
                _mm512_storeu_ps(out.add(LANES), high);
            }
        }
    }
}

/// Adds the products of 32 inner values to the sums of some rows and 32 columns.
///
/// # Safety
/// The processor has AVX-512 with bf16. `left` has as many rows of memory as there are sums, and `right`
/// has 32.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_tile(sums: &mut [[__m512; 2]; ROWS], left: *const TileRow, right: *const TileRow) {
    for pair in 0..LANES {
        // SAFETY: a row of memory has 16 pairs of values, which are aligned to its 64 bytes; vectors of
        // any type have as many.
        unsafe {
            let columns = |at: usize| -> __m512bh {
                transmute(_mm512_load_si512(right.add(at + pair).cast()))
            };
            let (low, high) = (columns(0), columns(LANES));
            for (row, sums) in sums.iter_mut().enumerate() {
                let pairs = left.add(row).cast::<i32>();
                let values: __m512bh = transmute(_mm512_set1_epi32(*pairs.add(pair)));
                sums[0] = _mm512_dpbf16_ps(sums[0], low, values);
                sums[1] = _mm512_dpbf16_ps(sums[1], high, values);
            }
        }
    }
}
