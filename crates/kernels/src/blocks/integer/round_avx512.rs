//! Rounds activations to bytes, with AVX-512.

use std::arch::x86_64::{
    __m512, __m512i, _mm_storeu_si128, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi8, _mm512_cvtps_epi32,
    _mm512_cvtss_f32, _mm512_loadu_ps, _mm512_mask_storeu_epi32, _mm512_maskz_div_ps,
    _mm512_maskz_loadu_ps, _mm512_maskz_mul_ps, _mm512_max_epu32, _mm512_mul_ps, _mm512_or_si512,
    _mm512_reduce_add_epi32, _mm512_reduce_max_epu32, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_si512, _mm512_slli_epi32, _mm512_srai_epi32, _mm512_srli_epi32,
    _mm512_sub_epi32,
};

use super::activations::{BLOCK, BLOCK_ROWS, BLOCK_WORDS, ColumnGroup, GREATEST, WORDS};
use crate::vector::LEAST_MAGNITUDE;

/// Rounds the columns to bytes.
///
/// # Safety
/// The processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn round_group(group: ColumnGroup<'_>) {
    if group.columns == 1 && group.width == 1 {
        one_column(group);
    } else {
        some_columns(group);
    }
}

/// Rounds a column whose activations are consecutive.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn one_column(group: ColumnGroup<'_>) {
    let blocks = group.values.as_chunks::<BLOCK>().0.iter();
    for (x, to) in blocks.zip(group.rows.as_chunks_mut::<BLOCK_ROWS>().0) {
        // SAFETY: a block has as many values as two vectors.
        let x = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
        let [a, b] = [magnitude(x[0]), magnitude(x[1])];
        let greatest = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
        let (all, factor) = scale_and_factor(_mm512_set1_epi32(greatest.cast_signed()));
        let integers = [integers(x[0], factor), integers(x[1], factor)];
        let [first, second] = integers.map(|half| _mm512_reduce_add_epi32(half));
        to[BLOCK_WORDS] = _mm512_cvtss_f32(all).to_bits();
        to[BLOCK_WORDS + 1] = first.wrapping_add(second).wrapping_neg().cast_unsigned();
        to[BLOCK_WORDS + 2] = first.wrapping_neg().cast_unsigned();
        for (half, integers) in integers.into_iter().enumerate() {
            let rounded = _mm512_add_epi32(integers, _mm512_set1_epi32(128));
            let upper = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(rounded));
            let lower = _mm512_cvtepi32_epi8(integers);
            // SAFETY: half of the upper and of the lower words have 16 bytes.
            unsafe {
                let to = to.as_mut_ptr().add(half * WORDS / 2);
                _mm_storeu_si128(to.cast(), upper);
                _mm_storeu_si128(to.add(WORDS).cast(), lower);
            }
        }
    }
}

/// Rounds up to 16 columns, a vector of them at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn some_columns(group: ColumnGroup<'_>) {
    let ColumnGroup { columns, values, width, rows } = group;
    let mask = ((1_u32 << columns) - 1) as u16;
    for (block, to) in rows.chunks_exact_mut(BLOCK_ROWS * columns).enumerate() {
        let to = to.as_mut_ptr().cast::<i32>();
        // SAFETY: every row of the block has as many values as the mask has bits.
        let store = |row: usize, values: __m512i| unsafe {
            _mm512_mask_storeu_epi32(to.add(row * columns), mask, values);
        };
        let rows = &values[block * BLOCK * width..];
        assert!(rows.len() >= (BLOCK - 1) * width + columns && columns <= 16);
        // SAFETY: the assertion keeps the columns of each row within the values.
        let row = |k: usize| unsafe { _mm512_maskz_loadu_ps(mask, rows.as_ptr().add(k * width)) };
        let mut greatest = _mm512_setzero_si512();
        for k in 0..BLOCK {
            greatest = _mm512_max_epu32(greatest, magnitude(row(k)));
        }
        let (scale, factor) = scale_and_factor(greatest);
        let mut negative = _mm512_setzero_si512();
        for word in 0..WORDS {
            let q: [__m512i; 4] = std::array::from_fn(|i| integers(row(4 * word + i), factor));
            for q in q {
                negative = _mm512_sub_epi32(negative, q);
            }
            let rounded = q.map(|q| _mm512_add_epi32(q, _mm512_set1_epi32(128)));
            let byte = |x: __m512i, at: u32| {
                _mm512_and_si512(x, _mm512_set1_epi32((0xff_u32 << (8 * at)).cast_signed()))
            };
            let [a, b, c, d] = rounded;
            let upper = join([
                byte(_mm512_srli_epi32::<8>(a), 0),
                byte(b, 1),
                byte(_mm512_slli_epi32::<8>(c), 2),
                byte(_mm512_slli_epi32::<16>(d), 3),
            ]);
            let [a, b, c, d] = q;
            let lower = join([
                byte(a, 0),
                byte(_mm512_slli_epi32::<8>(b), 1),
                byte(_mm512_slli_epi32::<16>(c), 2),
                byte(_mm512_slli_epi32::<24>(d), 3),
            ]);
            store(word, upper);
            store(WORDS + word, lower);
            if word == WORDS / 2 - 1 {
                store(BLOCK_WORDS + 2, negative);
            }
        }
        store(BLOCK_WORDS, _mm512_castps_si512(scale));
        store(BLOCK_WORDS + 1, negative);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn join([a, b, c, d]: [__m512i; 4]) -> __m512i {
    _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d))
}

/// The bits of the magnitudes. Those of NaN are greater than all others.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitude(x: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX))
}

/// The integers of activations with this reciprocal of their scale, ties to even.
#[inline]
#[target_feature(enable = "avx512f")]
fn integers(x: __m512, factor: __m512) -> __m512i {
    _mm512_cvtps_epi32(_mm512_mul_ps(x, factor))
}

/// The scales of blocks with these bits of their greatest magnitudes, and the reciprocals.
#[inline]
#[target_feature(enable = "avx512f")]
fn scale_and_factor(greatest: __m512i) -> (__m512, __m512) {
    let greatest = _mm512_castsi512_ps(greatest);
    // Not less than, which NaN is too. If a magnitude is infinite or NaN, so is the scale, and products with
    // the block are infinite or NaN.
    const NOT_LESS: i32 = std::arch::x86_64::_CMP_NLT_UQ;
    let counts = _mm512_cmp_ps_mask::<NOT_LESS>(greatest, _mm512_set1_ps(LEAST_MAGNITUDE));
    let scale = _mm512_maskz_mul_ps(counts, greatest, _mm512_set1_ps(1.0 / GREATEST));
    let factor = _mm512_maskz_div_ps(counts, _mm512_set1_ps(GREATEST), greatest);
    (scale, factor)
}
