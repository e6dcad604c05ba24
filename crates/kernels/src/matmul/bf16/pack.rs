//! Packs factors with AVX-512: rounds values to bf16 and stores them in the order of the tiles.

use std::arch::x86_64::{
    __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_cvtne2ps_pbh, _mm512_loadu_epi16,
    _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_permutex2var_epi16,
    _mm512_setzero_si512, _mm512_store_si512,
};
use std::mem::transmute;

use half::bf16;

use super::layout::{EDGE, TileRow};
use crate::transpose::transpose_words;

pub(super) trait Packable: Copy {
    /// The first `count` values at `from` as bf16, at most 32, and zeros.
    ///
    /// # Safety
    /// The processor has AVX-512 with bf16, and `from` has `count` values or 32.
    unsafe fn load(from: *const Self, count: usize) -> __m512i;
}

/// Writes a row of a tile.
///
/// # Safety
/// The processor has AVX-512, and `to` is valid for writes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(to: *mut TileRow, values: __m512i) {
    // SAFETY: a row of a tile has 64 bytes and is aligned to as many.
    unsafe { _mm512_store_si512((&raw mut (*to).0).cast(), values) };
}

/// Starts to load the same values of the row that is packed 32 rows later. Rows are too short for the
/// processor to recognize the access pattern in time.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch_next<V>(row: *const V, columns: usize) {
    const LINE: usize = 64;
    let next = row.wrapping_add(EDGE * columns).cast::<u8>();
    for line in 0..size_of::<V>() * EDGE / LINE {
        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * LINE).cast());
    }
}

/// A bit for each of the first `count` of 32 values.
#[inline]
fn mask(count: usize) -> u32 {
    if count >= EDGE { u32::MAX } else { (1 << count) - 1 }
}

impl Packable for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load(from: *const f32, count: usize) -> __m512i {
        let mask = mask(count);
        // SAFETY: the masks leave out what is not there; both types have 64 bytes.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask as u16, from);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }
}

impl Packable for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the mask leaves out what is not there. `bf16` is a `u16` in memory.
        unsafe { _mm512_maskz_loadu_epi16(mask(count), from.cast()) }
    }
}

/// Packs `count` rows (32 or fewer) of `columns` values, `stride` values apart, as a panel of the left
/// factor.
///
/// # Safety
/// The processor has AVX-512 with bf16. `from` has these rows. `to` has 32 rows of memory for each 32
/// columns, or fewer at the end.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn rows(
    from: *const f32,
    stride: usize,
    (count, columns): (usize, usize),
    to: *mut TileRow,
) {
    for tile in 0..columns.div_ceil(EDGE) {
        for row in 0..EDGE {
            // SAFETY: the caller guarantees the rows of `from` and 32 rows of `to` for this tile.
            unsafe {
                let values = if row < count {
                    f32::load(from.add(row * stride + tile * EDGE), columns - tile * EDGE)
                } else {
                    _mm512_setzero_si512()
                };
                store(to.add(tile * EDGE + row), values);
            }
        }
    }
}

/// Packs `count` rows (32 or fewer) of `columns` values, without gaps, as columns of the right factor,
/// which are a panel.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn transposed<V: Packable>(
    from: *const V,
    (count, columns): (usize, usize),
    to: *mut TileRow,
) {
    for tile in 0..columns.div_ceil(EDGE) {
        for first in [0, EDGE / 2] {
            let mut values = [_mm512_setzero_si512(); 16];
            for (i, values) in values.iter_mut().enumerate().take(count.saturating_sub(first)) {
                // SAFETY: the row is below `count`, and the caller guarantees its values.
                *values = unsafe {
                    let row = from.add((first + i) * columns + tile * EDGE);
                    prefetch_next(row, columns);
                    V::load(row, columns - tile * EDGE)
                };
            }
            for (i, pairs) in transpose_words(values).into_iter().enumerate() {
                // SAFETY: the caller guarantees 32 rows of `to` for this tile.
                unsafe { store(to.add(tile * EDGE + first + i), pairs) };
            }
        }
    }
}

/// Positions in two vectors of 32 values whose values alternate, from value `first` on.
const fn alternating(first: u16) -> [u16; EDGE] {
    let mut positions = [0; EDGE];
    let mut i = 0;
    while i < EDGE / 2 {
        positions[2 * i] = first + i as u16;
        positions[2 * i + 1] = first + i as u16 + 32;
        i += 1;
    }
    positions
}

/// Packs `count` rows (32 or fewer) of `columns` values, without gaps, as inner values of the right
/// factor: two tiles of each panel. The panels start `step` rows of memory apart.
///
/// # Safety
/// The processor has AVX-512 with bf16. `from` has these rows. `to` is the first of 32 rows of memory in
/// the first panel, and the other panels have the same.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn pairs<V: Packable>(
    from: *const V,
    (count, columns): (usize, usize),
    to: *mut TileRow,
    step: usize,
) {
    const POSITIONS: [[u16; EDGE]; 2] = [alternating(0), alternating(16)];
    // SAFETY: both have 32 values.
    let [low, high] = unsafe { POSITIONS.map(|p| _mm512_loadu_epi16(p.as_ptr().cast())) };
    for panel in 0..columns.div_ceil(EDGE) {
        for pair in 0..EDGE / 2 {
            // SAFETY: the caller guarantees the rows of `from`, and 32 rows of `to` in each panel.
            unsafe {
                let load = |row: usize| {
                    if row < count {
                        let from = from.add(row * columns + panel * EDGE);
                        prefetch_next(from, columns);
                        V::load(from, columns - panel * EDGE)
                    } else {
                        _mm512_setzero_si512()
                    }
                };
                let (even, odd) = (load(2 * pair), load(2 * pair + 1));
                let to = to.add(panel * step + pair);
                let first = _mm512_permutex2var_epi16(even, low, odd);
                let second = _mm512_permutex2var_epi16(even, high, odd);
                store(to, first);
                store(to.add(EDGE / 2), second);
            }
        }
    }
}
