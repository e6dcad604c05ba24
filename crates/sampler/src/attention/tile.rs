//! Attention of consecutive tokens of one sequence, with AVX-512.
//!
//! Each token of a prompt attends to all keys and values before it. Token by token and query by query, most
//! of the time is that of reading these from the caches of the processor. Here the queries of a tile of tokens
//! share each read, and so do those of a single token that share a head of keys. Every sum has the terms, the
//! order and the partial sums of [`TokenAttention`](super::TokenAttention), so the bits are the same.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use pulp::x86::V4;

use super::operands::{
    PAGE_BLOCK, PAGES_AHEAD, PARTIAL_SUMS, SequenceAttention, exponentiate, scale_and_cap,
};
use crate::kv_cache::PAGE;

/// Tokens of a tile. With more of them, their scores do not fit into the cache.
pub(super) const TILE: usize = 8;

/// Queries whose partial sums fill most of the registers.
const QUERIES: usize = 4;

/// Dimensions of a vector.
const LANES: usize = 16;

/// Whether the kernel computes heads of `dim` dimensions.
pub(super) fn is_supported(dim: usize) -> bool {
    dim.is_multiple_of(LANES)
}

impl SequenceAttention<'_> {
    /// Computes up to [`TILE`] tokens. The value proves that the processor has AVX-512.
    pub(super) fn run_tile(mut self, _: V4) {
        let (dim, width, tokens) = (self.shape.dim, self.width, self.tokens());
        assert!(is_supported(dim) && self.kv.len >= tokens && tokens <= TILE);
        assert!(width.is_multiple_of(self.heads.len() * dim) && width <= self.stride);
        assert!(self.q.len() >= (tokens - 1) * self.stride + width);
        for head in self.heads.clone() {
            // SAFETY: `V4` proves the features, and the assertions keep reads of queries in `q`.
            unsafe { self.head(head) };
        }
    }

    /// The positions that token `t` sees.
    fn visible(&self, t: usize) -> Range<usize> {
        let end = self.kv.len - (self.tokens() - 1 - t);
        self.options.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// The slots of page `page` that token `t` sees.
    fn slots(&self, page: usize, t: usize) -> Range<usize> {
        let visible = self.visible(t);
        let slot = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
        slot(visible.start)..slot(visible.end)
    }

    /// Computes the query heads that share kv head `head`. Query `n` is that of token `n / group` and of head
    /// `n % group` of the group.
    ///
    /// # Safety
    /// The processor has AVX-512, and the assertions of [`Self::run_tile`] hold.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn head(&mut self, head: usize) {
        let Self { shape, layer, options, kv, stride, width, next, .. } = *self;
        let (tokens, group, dim) = (self.tokens(), self.group(), shape.dim);
        let pages = self.visible(0).start / PAGE..kv.len.div_ceil(PAGE);
        let (count, row) = (tokens * group, pages.len() * PAGE);
        let first_query = (head - self.heads.start) * group;
        let query = |n: usize| n / group * stride + (first_query + n % group) * dim;
        let scratch = std::mem::take(&mut self.scratch);
        let (scores, rest) = scratch.split_at_mut(count * row);
        let (sums, rest) = rest.split_at_mut(count * PARTIAL_SUMS * dim);
        let (inverses, rest) = rest.split_at_mut(count);
        let buffers = &mut rest[..PAGE_BLOCK * shape.part_len()];

        for (i, page) in pages.clone().enumerate() {
            let (stored, values) = shape.read(&kv.pages[page], layer, head);
            // Pages are far apart, so the processor does not recognize the access pattern. Values are used after
            // all keys.
            values.prefetch();
            if page + PAGES_AHEAD < pages.end {
                shape.read(&kv.pages[page + PAGES_AHEAD], layer, head).0.prefetch();
            }
            let keys = stored.unscaled(&mut buffers[..shape.part_len()]);
            let mut n = 0;
            while n < count {
                let some = QUERIES.min(count - n);
                // SAFETY: `query` is within `q`, whose rows have a query of `dim` values there.
                unsafe {
                    let at = |i: usize| self.q.as_ptr().add(query(n + i));
                    let to = &mut scores[n * row + i * PAGE..];
                    match some {
                        1 => dot_products::<1>([at(0)], keys, to, row),
                        2 => dot_products::<2>([at(0), at(1)], keys, to, row),
                        3 => dot_products::<3>(std::array::from_fn(at), keys, to, row),
                        _ => dot_products::<QUERIES>(std::array::from_fn(at), keys, to, row),
                    }
                }
                n += some;
            }
            for n in 0..count {
                let Some(scores) = scores[n * row + i * PAGE..].first_chunk_mut() else { break };
                stored.scale(scores);
                scale_and_cap(scores, options);
                let visible = self.slots(page, n / group);
                scores[..visible.start].fill(f32::NEG_INFINITY);
                scores[visible.end..].fill(f32::NEG_INFINITY);
            }
        }
        let next = if head + 1 < self.heads.end { Some((kv, head + 1)) } else { next };
        if let Some((kv, head)) = next {
            kv.prefetch_first_keys(shape, (layer, head), options.window);
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
                let (_, stored) = shape.read(&kv.pages[page], layer, head);
                for scores in scores.chunks_exact_mut(row) {
                    let weights = scores[(first + i) * PAGE..].first_chunk_mut();
                    weights.into_iter().for_each(|weights| stored.scale(weights));
                }
                *values = stored.unscaled(buffer);
            }
            let used = &values[..block.len()];
            let mut n = 0;
            while n < count {
                // Only the queries of a token see the same slots of every page.
                let alike = if whole > 0 { count - n } else { group - n % group };
                let some = QUERIES.min(alike);
                let weights = &scores[n * row + first * PAGE..];
                let sums = &mut sums[n * PARTIAL_SUMS * dim..];
                let slots = if whole > 0 { 0..PAGE } else { self.slots(page, n / group) };
                match some {
                    1 => weighted_sums::<1>(weights, row, used, slots, dim, sums),
                    2 => weighted_sums::<2>(weights, row, used, slots, dim, sums),
                    3 => weighted_sums::<3>(weights, row, used, slots, dim, sums),
                    _ => weighted_sums::<QUERIES>(weights, row, used, slots, dim, sums),
                }
                n += some;
            }
            page = block.end;
        }
        for (n, inverse) in inverses.iter().enumerate() {
            let sums = &sums[n * PARTIAL_SUMS * dim..];
            let to = n / group * width + (first_query + n % group) * dim;
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

/// Adds some slots of pages of values `[PAGE, dim]`, times the weights of `N` queries, to the queries' sums
/// `[N, PARTIAL_SUMS, dim]`. The weights of a query are `stride` values from those of the next. Other slots
/// may contain NaN or infinity, and 0 times these is not 0.
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
