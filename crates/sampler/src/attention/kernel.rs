//! Attention of tokens head by head, over loops that each kernel has of its own.

use std::ops::Range;

use super::operands::{
    PAGE_BLOCK, PAGES_AHEAD, PARTIAL_SUMS, SequenceAttention, exponentiate, scale_and_cap,
};
use crate::kv_cache::PAGE;

/// Queries whose partial sums fill most of the registers.
const QUERIES: usize = 4;

/// The loops of attention. All methods are inlined into a function that enables the instructions.
pub(super) trait AttentionKernel: Copy {
    /// Writes the dot products of `N` queries `[dim]` and the keys `[dim, PAGE]` of a page to `scores`, a row of
    /// `stride` values for each query.
    fn dot_products<const N: usize>(
        self,
        queries: [&[f32]; N],
        keys: &[f32],
        scores: &mut [f32],
        stride: usize,
    );

    /// Adds some slots of pages of values `[PAGE, dim]`, times the weights of `N` queries, to the queries' sums
    /// `[N, PARTIAL_SUMS, dim]`. The weights of a query are `stride` values from those of the next. Other slots
    /// may contain NaN or infinity, and 0 times these is not 0.
    fn weighted_sums<const N: usize>(
        self,
        weights: &[f32],
        stride: usize,
        pages: &[&[f32]],
        slots: Range<usize>,
        dim: usize,
        sums: &mut [f32],
    );
}

impl SequenceAttention<'_> {
    #[inline(always)]
    pub(super) fn compute<K: AttentionKernel>(mut self, kernel: K) {
        assert!(self.kv.len >= self.tokens() && self.width <= self.stride);
        for head in self.heads.clone() {
            self.head(kernel, head);
        }
    }

    fn visible(&self, t: usize) -> Range<usize> {
        let end = self.kv.len - (self.tokens() - 1 - t);
        self.options.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    fn slots(&self, page: usize, t: usize) -> Range<usize> {
        let visible = self.visible(t);
        let slot = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
        slot(visible.start)..slot(visible.end)
    }

    /// Computes the query heads that share kv head `head`. Query `n` is that of token `n / group` and of head
    /// `n % group` of the group.
    #[inline(always)]
    fn head<K: AttentionKernel>(&mut self, kernel: K, head: usize) {
        let Self { shape, layer, options, kv, stride, width, next, .. } = *self;
        let (tokens, group, dim) = (self.tokens(), self.group(), shape.dim);
        let pages = self.visible(0).start / PAGE..kv.len.div_ceil(PAGE);
        let (count, row) = (tokens * group, pages.len() * PAGE);
        let first_query = (head - self.heads.start) * group;
        let query = |n: usize| n / group * stride + (first_query + n % group) * dim;
        let (queries, scratch) = (self.q, std::mem::take(&mut self.scratch));
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
                let q = |i: usize| &queries[query(n + i)..][..dim];
                let to = &mut scores[n * row + i * PAGE..];
                match some {
                    1 => kernel.dot_products([q(0)], keys, to, row),
                    2 => kernel.dot_products([q(0), q(1)], keys, to, row),
                    3 => kernel.dot_products([q(0), q(1), q(2)], keys, to, row),
                    _ => kernel.dot_products([q(0), q(1), q(2), q(3)], keys, to, row),
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
                    1 => kernel.weighted_sums::<1>(weights, row, used, slots, dim, sums),
                    2 => kernel.weighted_sums::<2>(weights, row, used, slots, dim, sums),
                    3 => kernel.weighted_sums::<3>(weights, row, used, slots, dim, sums),
                    _ => kernel.weighted_sums::<QUERIES>(weights, row, used, slots, dim, sums),
                }
                n += some;
            }
            page = block.end;
        }
        for (n, inverse) in inverses.iter().enumerate() {
            let sums = &sums[n * PARTIAL_SUMS * dim..];
            let to = n / group * width + (first_query + n % group) * dim;
            let out = &mut self.out[to..to + dim];
            let (left, right) = sums[..PARTIAL_SUMS * dim].split_at(2 * dim);
            let pairs = |sums: &[f32], i: usize| sums[i] + sums[dim + i];
            for (i, out) in out.iter_mut().enumerate() {
                *out = (pairs(left, i) + pairs(right, i)) * inverse;
            }
        }
        self.scratch = scratch;
    }
}
