//! Attention of consecutive tokens of one sequence, with AVX-512.
//!
//! Each token of a prompt attends to all keys and values before it. Token by token and query by query, most
//! of the time is that of reading these from the caches of the processor. Here the queries of a tile of tokens
//! share each read, and so do those of a single token that share a head of keys. Every sum has the terms, the
//! order and the partial sums of the portable kernel, so the bits are the same.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps,
};
use std::ops::Range;

use pulp::x86::V4;

use super::kernel::AttentionKernel;
use super::operands::{PARTIAL_SUMS, SequenceAttention};
use crate::kv_cache::PAGE;

/// Tokens of a tile. With more of them, their scores do not fit into the cache.
pub(super) const TILE: usize = 8;

const LANES: usize = 16;

pub(super) fn is_supported(dim: usize) -> bool {
    dim.is_multiple_of(LANES)
}

/// Computes up to [`TILE`] tokens. The value proves that the processor has AVX-512.
pub(super) fn run(operands: SequenceAttention<'_>, proof: V4) {
    /// # Safety
    /// The processor has AVX-512.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn compute(operands: SequenceAttention<'_>, proof: V4) {
        operands.compute(proof);
    }
    // SAFETY: `V4` proves the features.
    unsafe { compute(operands, proof) }
}

impl AttentionKernel for V4 {
    #[inline(always)]
    fn dot_products<const N: usize>(
        self,
        queries: [&[f32]; N],
        keys: &[f32],
        scores: &mut [f32],
        stride: usize,
    ) {
        // SAFETY: `V4` proves the features.
        unsafe { dot_products(queries, keys, scores, stride) }
    }

    #[inline(always)]
    fn weighted_sums<const N: usize>(
        self,
        weights: &[f32],
        stride: usize,
        pages: &[&[f32]],
        slots: Range<usize>,
        dim: usize,
        sums: &mut [f32],
    ) {
        // SAFETY: `V4` proves the features.
        unsafe { weighted_sums::<N>(weights, stride, pages, slots, dim, sums) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn total([a, b, c, d]: [__m512; PARTIAL_SUMS]) -> __m512 {
    _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))
}

/// [`AttentionKernel::dot_products`]. The length of queries is a multiple of [`PARTIAL_SUMS`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn dot_products<const N: usize>(
    queries: [&[f32]; N],
    keys: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    assert!(scores.len() >= (N - 1) * stride + PAGE);
    assert!(queries.iter().all(|query| query.len() * PAGE >= keys.len()));
    let mut sums = [[_mm512_setzero_ps(); PARTIAL_SUMS]; N];
    // SAFETY: by the assertions, all values are within their slices.
    unsafe {
        for (k, keys) in keys.chunks_exact(PARTIAL_SUMS * PAGE).enumerate() {
            for i in 0..PARTIAL_SUMS {
                let key = _mm512_loadu_ps(keys.as_ptr().add(i * PAGE));
                for (sums, query) in sums.iter_mut().zip(queries) {
                    let q = _mm512_set1_ps(*query.as_ptr().add(k * PARTIAL_SUMS + i));
                    sums[i] = _mm512_fmadd_ps(q, key, sums[i]);
                }
            }
        }
        for (n, sums) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(scores.as_mut_ptr().add(n * stride), total(sums));
        }
    }
}

/// [`AttentionKernel::weighted_sums`]. `dim` is a multiple of [`LANES`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn weighted_sums<const N: usize>(
    weights: &[f32],
    stride: usize,
    pages: &[&[f32]],
    slots: Range<usize>,
    dim: usize,
    sums: &mut [f32],
) {
    assert!(slots.end <= PAGE);
    assert!(dim.is_multiple_of(LANES) && sums.len() >= N * PARTIAL_SUMS * dim);
    assert!(weights.len() >= (N - 1) * stride + pages.len() * PAGE);
    assert!(pages.iter().all(|values| values.len() >= PAGE * dim));
    let (weights, sums) = (weights.as_ptr(), sums.as_mut_ptr());
    for first in (0..dim).step_by(LANES) {
        let mut partial = [[_mm512_setzero_ps(); PARTIAL_SUMS]; N];
        // SAFETY: by the assertions, weights, the values of the slots, and sums are within their slices.
        unsafe {
            for (n, partial) in partial.iter_mut().enumerate() {
                for (i, partial) in partial.iter_mut().enumerate() {
                    *partial = _mm512_loadu_ps(sums.add((n * PARTIAL_SUMS + i) * dim + first));
                }
            }
            for (page, values) in pages.iter().enumerate() {
                let values = values.as_ptr().add(first);
                let at = weights.add(page * PAGE);
                for group in slots.start / PARTIAL_SUMS..slots.end.div_ceil(PARTIAL_SUMS) {
                    for i in 0..PARTIAL_SUMS {
                        let slot = group * PARTIAL_SUMS + i;
                        if !slots.contains(&slot) {
                            continue;
                        }
                        let values = _mm512_loadu_ps(values.add(slot * dim));
                        for (n, partial) in partial.iter_mut().enumerate() {
                            let weight = _mm512_set1_ps(*at.add(n * stride + slot));
                            partial[i] = _mm512_fmadd_ps(weight, values, partial[i]);
                        }
                    }
                }
            }
            for (n, partial) in partial.into_iter().enumerate() {
                for (i, partial) in partial.into_iter().enumerate() {
                    _mm512_storeu_ps(sums.add((n * PARTIAL_SUMS + i) * dim + first), partial);
                }
            }
        }
    }
}
