//! Transposes matrices: between activations `[feature, width]`, whose columns are tokens, and rows `[token,
//! feature]`.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512i, _mm512_mask_storeu_epi32, _mm512_maskz_loadu_epi32, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};
use std::marker::PhantomData;

use crate::parallel::SharedPointer;
#[cfg(target_arch = "x86_64")]
use crate::processor::avx512;

/// Rows and columns that are transposed together, so that whole cache lines are used.
const BLOCK: usize = 16;

/// Rows `[token, feature]` that several threads write at once, each other features of all tokens.
pub struct SharedRows<'a> {
    out: SharedPointer<f32>,
    rows: usize,
    stride: usize,
    values: PhantomData<&'a mut [f32]>,
}

impl<'a> SharedRows<'a> {
    /// Rows of `stride` values, as many as `out` has.
    pub fn new(out: &'a mut [f32], stride: usize) -> Self {
        let rows = out.len() / stride;
        Self { out: SharedPointer(out.as_mut_ptr()), rows, stride, values: PhantomData }
    }

    /// Transposes columns into features from `first` on: `out[token, first + feature] = x[feature, token]`. There
    /// are at most `width` rows.
    ///
    /// # Safety
    /// Nothing else writes these features meanwhile.
    pub unsafe fn write(&self, first: usize, x: &[f32], width: usize) {
        let &Self { out, rows, stride, .. } = self;
        let features = x.len() / width;
        assert!(rows <= width && first + features <= stride);
        // SAFETY: the assertion keeps the features within each of the rows, which `self` borrows mutably, and the
        // caller guarantees that nothing else uses these values.
        unsafe { transpose((out.0.wrapping_add(first), stride), (x, width), (features, rows)) };
    }
}

/// Transposes rows into columns: `out[feature, token] = x[token, feature]`. Columns without a row
/// become 0.
pub fn rows_to_columns(out: &mut [f32], width: usize, x: &[f32], features: usize) {
    let tokens = x.len() / features.max(1);
    assert!(tokens <= width && features * width <= out.len(), "{tokens} tokens in {width} columns");
    // SAFETY: the assertion keeps the columns within `out`.
    unsafe { transpose((out.as_mut_ptr(), width), (x, features), (tokens, features)) };
    if tokens < width {
        out.chunks_exact_mut(width).for_each(|out| out[tokens..].fill(0.0));
    }
}

/// Transposes matrices whose rows are as many values apart as the number beside them says: `out[c, r] = x[r, c]` for
/// these rows and columns of `x`.
///
/// # Panics
/// If a matrix has too few values.
pub fn transpose_strided(
    (out, stride): (&mut [f32], usize),
    x: (&[f32], usize),
    (rows, columns): (usize, usize),
) {
    let values = columns.checked_sub(1).map_or(0, |last| last * stride + rows);
    assert!(values <= out.len(), "{columns} x {rows}");
    // SAFETY: the assertion keeps the values within `out`, which is borrowed mutably.
    unsafe { transpose((out.as_mut_ptr(), stride), x, (rows, columns)) };
}

/// `out[c, r] = x[r, c]` for these rows and columns of `x`, whose rows are `x_stride` values apart; those of
/// `out` are `stride` values apart.
///
/// # Safety
/// `out` has these values, and nothing else uses them meanwhile.
unsafe fn transpose(
    (out, stride): (*mut f32, usize),
    (x, x_stride): (&[f32], usize),
    (rows, columns): (usize, usize),
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * x_stride + columns <= x.len(), "{rows} x {columns}");
    if columns == 1 && x_stride == 1 {
        // SAFETY: by the assertion and the caller's guarantee, both have as many values.
        return unsafe { out.copy_from_nonoverlapping(x.as_ptr(), rows) };
    }
    #[cfg(target_arch = "x86_64")]
    if avx512().is_some() {
        // SAFETY: `avx512` proves the features, and rows and columns are within both.
        return unsafe {
            transpose_by_words((out, stride), (x.as_ptr(), x_stride), (rows, columns))
        };
    }
    // SAFETY: the caller's guarantee.
    unsafe { transpose_by_values((out, stride), (x, x_stride), (rows, columns)) };
}

/// [`transpose`] on any processor.
///
/// # Safety
/// That of [`transpose`].
unsafe fn transpose_by_values(
    (out, stride): (*mut f32, usize),
    (x, x_stride): (&[f32], usize),
    (rows, columns): (usize, usize),
) {
    for first in (0..rows).step_by(BLOCK) {
        for c in 0..columns {
            for r in first..rows.min(first + BLOCK) {
                // SAFETY: the caller guarantees the value.
                unsafe { *out.add(c * stride + r) = x[r * x_stride + c] };
            }
        }
    }
}

/// [`transpose`] in vector registers.
///
/// # Safety
/// The processor has AVX-512, and both matrices have these rows and columns.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_by_words(
    (out, stride): (*mut f32, usize),
    (x, x_stride): (*const f32, usize),
    (rows, columns): (usize, usize),
) {
    let mask = |count: usize| if count >= BLOCK { u16::MAX } else { (1 << count) - 1 };
    for r in (0..rows).step_by(BLOCK) {
        for c in (0..columns).step_by(BLOCK) {
            let (height, width) = (BLOCK.min(rows - r), BLOCK.min(columns - c));
            let mut words = [_mm512_setzero_si512(); BLOCK];
            for (i, words) in words.iter_mut().enumerate().take(height) {
                // SAFETY: the caller guarantees the row and the columns of the mask.
                *words = unsafe {
                    _mm512_maskz_loadu_epi32(mask(width), x.add((r + i) * x_stride + c).cast())
                };
            }
            let words = transpose_words(words);
            for (i, words) in words.into_iter().enumerate().take(width) {
                // SAFETY: the caller guarantees the row and the columns of the mask.
                unsafe {
                    let out = out.add((c + i) * stride + r);
                    _mm512_mask_storeu_epi32(out.cast(), mask(height), words);
                }
            }
        }
    }
}

/// Transposes 16 rows of 16 words.
///
/// # Safety
/// The processor has AVX-512 (F). Functions that enable it call this safely.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose_words(rows: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let mut pairs = [zero; 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // `quads[4 i + c]` has, in its 128-bit part l, word 4 l + c of the rows 4 i to 4 i + 3.
    let mut quads = [zero; 16];
    for i in (0..16).step_by(4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut words = [zero; 16];
    for c in 0..4 {
        // The parts 0 and 2, then 1 and 3, of the first and the last eight rows.
        let even_first = _mm512_shuffle_i32x4::<0x88>(quads[c], quads[4 + c]);
        let odd_first = _mm512_shuffle_i32x4::<0xdd>(quads[c], quads[4 + c]);
        let even_last = _mm512_shuffle_i32x4::<0x88>(quads[8 + c], quads[12 + c]);
        let odd_last = _mm512_shuffle_i32x4::<0xdd>(quads[8 + c], quads[12 + c]);
        words[c] = _mm512_shuffle_i32x4::<0x88>(even_first, even_last);
        words[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_first, odd_last);
        words[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_first, even_last);
        words[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_first, odd_last);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::waves;

    #[test]
    fn columns_become_rows_and_back() {
        for (features, tokens, width) in
            [(1, 1, 1), (3, 1, 1), (50, 1, 1), (16, 16, 16), (50, 3, 3), (33, 31, 32), (3, 40, 48)]
        {
            let x = waves(tokens * features, 0.3);
            let mut columns = vec![9.0; features * width];
            rows_to_columns(&mut columns, width, &x, features);
            for (k, row) in columns.chunks(width).enumerate() {
                for (token, value) in row.iter().enumerate() {
                    let expected = if token < tokens { x[token * features + k] } else { 0.0 };
                    assert_eq!(*value, expected, "{features} {tokens} {width}");
                }
            }
            let stride = features + 5;
            let mut back = vec![9.0; tokens * stride];
            let rows = SharedRows::new(&mut back, stride);
            // Two threads could write these parts.
            let (some, others) = columns.split_at(features / 2 * width);
            for (first, part) in [(5, some), (5 + features / 2, others)] {
                // SAFETY: nothing else writes.
                unsafe { rows.write(first, part, width) };
            }
            for (back, x) in back.chunks(stride).zip(x.chunks(features)) {
                assert_eq!((&back[..5], &back[5..]), (&[9.0; 5][..], x));
            }
        }
    }

    #[test]
    fn values_and_words_are_transposed_alike() {
        let x = waves(35 * 40, 0.7);
        for (rows, columns) in [(35, 37), (16, 16), (1, 9), (7, 1), (20, 3)] {
            let run = |by_values: bool| {
                let mut out = vec![0.0; 40 * 41];
                let shape = (rows, columns);
                let (to, x) = ((out.as_mut_ptr(), 41), (&x[..], 40));
                // SAFETY: both have more rows and columns.
                unsafe {
                    if by_values {
                        transpose_by_values(to, x, shape)
                    } else {
                        transpose(to, x, shape)
                    }
                };
                out
            };
            assert_eq!(run(true), run(false), "{rows} x {columns}");
        }
    }
}
