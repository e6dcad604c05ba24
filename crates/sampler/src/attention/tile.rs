//! Attention of consecutive tokens of one sequence, with AVX-512.
//!
//! Each token of a prompt attends to all keys and values before it. Token by token, most of the time is
//! that of reading these from the caches of the processor. Here a tile of tokens shares each read. Every
//! sum has the terms, the order and the partial sums of [`super::TokenAttention`], so the bits are the
//! same.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use pulp::x86::V4;

use hone_model::spec::AttentionOptions;

use super::scores::{PAGE_BLOCK, PARTIAL_SUMS, exponentiate, scale_and_cap};
use crate::kv_cache::{CacheShape, PAGE, Page};

/// Tokens of a tile. With more of them, their scores do not fit into the cache.
pub(super) const TILE: usize = 8;

/// Queries whose partial sums fill most of the registers.
const QUERIES: usize = 4;

/// Dimensions of a vector.
const LANES: usize = 16;

/// Values of scratch that a tile needs whose last token is at `position`, where `group` query heads of
/// `dim` dimensions share a kv head.
pub(super) fn scratch_len(position: usize, group: usize, dim: usize) -> usize {
    let width = (position / PAGE + 1) * PAGE;
    TILE * group * (width + PARTIAL_SUMS * dim + 1) + PAGE_BLOCK * dim * PAGE
}

/// Whether the kernel computes heads of `dim` dimensions.
pub(super) fn is_supported(dim: usize) -> bool {
    dim.is_multiple_of(LANES)
}

/// All heads of up to [`TILE`] consecutive tokens.
pub(super) struct AttentionTile<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    /// The pages of the sequence.
    pub pages: &'a [Page],
    /// Positions that the last token sees. Each token sees one more than the one before.
    pub len: usize,
    pub tokens: usize,
    /// The rotated queries: rows of `stride` values that begin with `[heads * dim]`.
    pub q: &'a [f32],
    pub stride: usize,
    /// `[tokens, heads * dim]`
    pub out: &'a mut [f32],
    /// [`scratch_len`] values.
    pub scratch: &'a mut [f32],
}

impl AttentionTile<'_> {
    /// Computes the tile. The token proves that the processor has AVX-512.
    pub fn run(mut self, _: V4) {
        let dim = self.shape.dim;
        let width = self.out.len() / self.tokens;
        assert!(is_supported(dim) && self.len >= self.tokens && self.tokens <= TILE);
        assert!(width.is_multiple_of(self.shape.heads * dim) && width <= self.stride);
        assert!(self.q.len() >= (self.tokens - 1) * self.stride + width);
        for head in 0..self.shape.heads {
            // SAFETY: `V4` proves the features, and the assertions keep reads of queries in `q`.
            unsafe { self.head(head, width / self.shape.heads / dim) };
        }
    }

    /// The positions that token `t` sees.
    fn visible(&self, t: usize) -> Range<usize> {
        let end = self.len - (self.tokens - 1 - t);
        self.options.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// The slots of page `page` that token `t` sees.
    fn slots(&self, page: usize, t: usize) -> Range<usize> {
        let visible = self.visible(t);
        let slot = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
        slot(visible.start)..slot(visible.end)
    }

    /// Computes the `group` query heads that share kv head `head`. Query `n` is that of token `n / group`
    /// and of head `n % group` of the group.
    ///
    /// # Safety
    /// The processor has AVX-512, and the assertions of [`Self::run`] hold.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn head(&mut self, head: usize, group: usize) {
        let Self { tokens, stride, .. } = *self;
        let (dim, width) = (self.shape.dim, self.out.len() / tokens);
        let pages = self.visible(0).start / PAGE..self.len.div_ceil(PAGE);
        let (count, row) = (tokens * group, pages.len() * PAGE);
        let (shape, layer) = (self.shape, self.layer);
        let query = |n: usize| n / group * stride + (head * group + n % group) * dim;
        let scratch = std::mem::take(&mut self.scratch);
        let (scores, rest) = scratch.split_at_mut(count * row);
        let (sums, rest) = rest.split_at_mut(count * PARTIAL_SUMS * dim);
        let (inverses, rest) = rest.split_at_mut(count);
        let buffers = &mut rest[..PAGE_BLOCK * shape.part_len()];

        for (i, page) in pages.clone().enumerate() {
            let (stored, _) = shape.read(&self.pages[page], layer, head);
            let keys = stored.unscaled(&mut buffers[..shape.part_len()]);
            let mut n = 0;
            while n < count {
                let many = n + QUERIES <= count;
                // SAFETY: `query` is within `q`, whose rows have a query of `dim` values there.
                unsafe {
                    let at = |i: usize| self.q.as_ptr().add(query(n + i));
                    let to = &mut scores[n * row + i * PAGE..];
                    if many {
                        dot_products::<QUERIES>(std::array::from_fn(at), keys, to, row);
                    } else {
                        dot_products::<1>([at(0)], keys, to, row);
                    }
                }
                n += if many { QUERIES } else { 1 };
            }
            for n in 0..count {
                let Some(scores) = scores[n * row + i * PAGE..].first_chunk_mut() else { break };
                stored.scale(scores);
                scale_and_cap(scores, self.options);
                let visible = self.slots(page, n / group);
                scores[..visible.start].fill(f32::NEG_INFINITY);
                scores[visible.end..].fill(f32::NEG_INFINITY);
            }
        }
        for (scores, inverse) in scores.chunks_exact_mut(row).zip(&mut *inverses) {
            *inverse = 1.0 / exponentiate(scores);
        }

        sums.fill(0.0);
        let is_whole = |page: usize| {
            (0..tokens).step_by((tokens - 1).max(1)).all(|t| self.slots(page, t) == (0..PAGE))
        };
        let mut page = pages.start;
        while page < pages.end {
            let whole = (page..pages.end.min(page + PAGE_BLOCK)).take_while(|page| is_whole(*page));
            let whole = whole.count();
            let first = page - pages.start;
            let block = page..page + whole.max(1);
            let mut values: [&[f32]; PAGE_BLOCK] = [&[]; PAGE_BLOCK];
            let places = values.iter_mut().zip(buffers.chunks_exact_mut(shape.part_len()));
            for (i, (page, (values, buffer))) in block.clone().zip(places).enumerate() {
                let (_, stored) = shape.read(&self.pages[page], layer, head);
                for scores in scores.chunks_exact_mut(row) {
                    let weights = scores[(first + i) * PAGE..].first_chunk_mut();
                    weights.into_iter().for_each(|weights| stored.scale(weights));
                }
                *values = stored.unscaled(buffer);
            }
            let used = &values[..block.len()];
            let mut n = 0;
            while n < count {
                let many = whole > 0 && n + QUERIES <= count;
                let weights = &scores[n * row + first * PAGE..];
                let sums = &mut sums[n * PARTIAL_SUMS * dim..];
                if many {
                    weighted_sums::<QUERIES>(weights, row, used, dim, sums);
                } else if whole > 0 {
                    weighted_sums::<1>(weights, row, used, dim, sums);
                } else {
                    partial_page(weights, self.slots(page, n / group), values[0], dim, sums);
                }
                n += if many { QUERIES } else { 1 };
            }
            page = block.end;
        }
        for (n, inverse) in inverses.iter().enumerate() {
            let sums = &sums[n * PARTIAL_SUMS * dim..];
            let to = n / group * width + (head * group + n % group) * dim;
            let out = &mut self.out[to..to + dim];
            // SAFETY: the vectors are within `sums` and `out`, because `dim` is a multiple of `LANES`.
            unsafe {
                for first in (0..dim).step_by(LANES) {
                    let part = |i: usize| _mm512_loadu_ps(sums[i * dim + first..].as_ptr());
                    let total = total([part(0), part(1), part(2), part(3)]);
                    let total = _mm512_mul_ps(total, _mm512_set1_ps(*inverse));
                    _mm512_storeu_ps(out[first..].as_mut_ptr(), total);
                }
            }
        }
        self.scratch = scratch;
    }
}

/// The sum of the partial sums.
#[inline]
#[target_feature(enable = "avx512f")]
fn total([a, b, c, d]: [__m512; PARTIAL_SUMS]) -> __m512 {
    _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))
}

/// Writes the dot products of `N` queries and the keys `[dim, PAGE]` of a page to `scores`, a row of
/// `stride` values for each query.
///
/// # Safety
/// The processor has AVX-512, `keys` has `dim` rows, and `dim` values can be read from each query. `dim`
/// is a multiple of [`PARTIAL_SUMS`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
unsafe fn dot_products<const N: usize>(
    queries: [*const f32; N],
    keys: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    assert!(scores.len() >= (N - 1) * stride + PAGE);
    let mut sums = [[_mm512_setzero_ps(); PARTIAL_SUMS]; N];
    // SAFETY: the caller's guarantee and the assertion.
    unsafe {
        for (k, keys) in keys.chunks_exact(PARTIAL_SUMS * PAGE).enumerate() {
            for i in 0..PARTIAL_SUMS {
                let key = _mm512_loadu_ps(keys.as_ptr().add(i * PAGE));
                for (sums, query) in sums.iter_mut().zip(queries) {
                    let q = _mm512_set1_ps(*query.add(k * PARTIAL_SUMS + i));
                    sums[i] = _mm512_fmadd_ps(q, key, sums[i]);
                }
            }
        }
        for (n, sums) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(scores.as_mut_ptr().add(n * stride), total(sums));
        }
    }
}

/// Adds whole pages of values `[PAGE, dim]`, times the weights of `N` queries, to the queries' sums
/// `[N, PARTIAL_SUMS, dim]`. The weights of a query are `stride` values from those of the next.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn weighted_sums<const N: usize>(
    weights: &[f32],
    stride: usize,
    pages: &[&[f32]],
    dim: usize,
    sums: &mut [f32],
) {
    assert!(dim.is_multiple_of(LANES) && sums.len() >= N * PARTIAL_SUMS * dim);
    assert!(weights.len() >= (N - 1) * stride + pages.len() * PAGE);
    assert!(pages.iter().all(|values| values.len() >= PAGE * dim));
    let (weights, sums) = (weights.as_ptr(), sums.as_mut_ptr());
    for first in (0..dim).step_by(LANES) {
        let mut partial = [[_mm512_setzero_ps(); PARTIAL_SUMS]; N];
        // SAFETY: by the assertions, weights, values and sums are within their slices.
        unsafe {
            for (n, partial) in partial.iter_mut().enumerate() {
                for (i, partial) in partial.iter_mut().enumerate() {
                    *partial = _mm512_loadu_ps(sums.add((n * PARTIAL_SUMS + i) * dim + first));
                }
            }
            for (page, values) in pages.iter().enumerate() {
                let mut value = values.as_ptr().add(first);
                let mut at: [_; N] = std::array::from_fn(|n| weights.add(n * stride + page * PAGE));
                for _ in 0..PAGE / PARTIAL_SUMS {
                    for i in 0..PARTIAL_SUMS {
                        let values = _mm512_loadu_ps(value);
                        value = value.wrapping_add(dim);
                        for (partial, at) in partial.iter_mut().zip(at) {
                            let weight = _mm512_set1_ps(*at.add(i));
                            partial[i] = _mm512_fmadd_ps(weight, values, partial[i]);
                        }
                    }
                    at = at.map(|at| at.wrapping_add(PARTIAL_SUMS));
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

/// Adds the values of some slots of a page, times a query's weights, to the query's sums. Other slots
/// may contain NaN or infinity, and 0 times these is not 0.
fn partial_page(
    weights: &[f32],
    slots: Range<usize>,
    values: &[f32],
    dim: usize,
    sums: &mut [f32],
) {
    for slot in slots {
        let values = &values[slot * dim..][..dim];
        let sums = &mut sums[slot % PARTIAL_SUMS * dim..][..dim];
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = weights[slot].mul_add(*value, *sum);
        }
    }
}
