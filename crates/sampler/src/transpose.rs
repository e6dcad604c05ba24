//! Transposes matrices: between activations `[feature, width]`, whose columns are tokens, and rows `[token,
//! feature]`.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_mask_storeu_epi32, _mm512_maskz_loadu_epi32, _mm512_setzero_si512};

#[cfg(target_arch = "x86_64")]
use hone_model::kernels::transpose::transpose_words;
#[cfg(target_arch = "x86_64")]
use pulp::Arch;

/// Rows and columns that are transposed together, so that whole cache lines are used.
const BLOCK: usize = 16;

/// Transposes columns into rows: `out[token, first + feature] = x[feature, token]`. The rows of `out`
/// are `stride` values long, and there are at most `width` of them.
pub(crate) fn columns_to_rows(
    out: &mut [f32],
    (first, stride): (usize, usize),
    x: &[f32],
    width: usize,
) {
    let (features, tokens) = (x.len() / width, out.len() / stride);
    assert!(tokens <= width && first + features <= stride);
    if tokens > 0 {
        transpose(&mut out[first..], stride, (x, width), (features, tokens));
    }
}

/// Transposes rows into columns: `out[feature, token] = x[token, feature]`. Columns without a row
/// become 0.
pub(crate) fn rows_to_columns(out: &mut [f32], width: usize, x: &[f32], features: usize) {
    let tokens = x.len() / features.max(1);
    assert!(tokens <= width, "{tokens} tokens in {width} columns");
    transpose(out, width, (x, features), (tokens, features));
    if tokens < width {
        out.chunks_exact_mut(width).for_each(|out| out[tokens..].fill(0.0));
    }
}

/// `out[c, r] = x[r, c]` for these rows and columns of `x`, whose rows are `x_stride` values apart; those of
/// `out` are `stride` values apart.
fn transpose(
    out: &mut [f32],
    stride: usize,
    (x, x_stride): (&[f32], usize),
    (rows, columns): (usize, usize),
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * x_stride + columns <= x.len(), "{rows} x {columns}");
    assert!((columns - 1) * stride + rows <= out.len(), "{rows} x {columns}");
    if columns == 1 && x_stride == 1 {
        return out[..rows].copy_from_slice(&x[..rows]);
    }
    #[cfg(target_arch = "x86_64")]
    if let Arch::V4(_) = Arch::new() {
        // SAFETY: `V4` proves the features, and the assertions keep rows and columns within both.
        return unsafe {
            transpose_by_words((out.as_mut_ptr(), stride), (x.as_ptr(), x_stride), (rows, columns))
        };
    }
    transpose_by_values(out, stride, (x, x_stride), (rows, columns));
}

/// [`transpose`] on any processor.
fn transpose_by_values(
    out: &mut [f32],
    stride: usize,
    (x, x_stride): (&[f32], usize),
    (rows, columns): (usize, usize),
) {
    for first in (0..rows).step_by(BLOCK) {
        let end = rows.min(first + BLOCK);
        for (c, out) in out.chunks_mut(stride).enumerate().take(columns) {
            for (out, r) in out[first..end].iter_mut().zip(first..) {
                *out = x[r * x_stride + c];
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

#[cfg(test)]
mod tests {
    use hone_model::testing::waves;

    use super::*;

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
            columns_to_rows(&mut back, (5, stride), &columns, width);
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
                if by_values {
                    transpose_by_values(&mut out, 41, (&x, 40), shape);
                } else {
                    transpose(&mut out, 41, (&x, 40), shape);
                }
                out
            };
            assert_eq!(run(true), run(false), "{rows} x {columns}");
        }
    }
}
