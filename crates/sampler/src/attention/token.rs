//! Attention of a token, for every processor.

use hone_core::simd::{SimdTask, mul_add};

use super::operands::{PAGES_AHEAD, SequenceAttention, VisiblePage};
use super::scores::{PAGE_BLOCK, PARTIAL_SUMS, exponentiate, scale_and_cap};
use crate::kv_cache::PAGE;

/// The attention of one token.
pub(super) struct TokenAttention<'a>(pub SequenceAttention<'a>);

impl SimdTask for TokenAttention<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self(operands) = self;
        let (group, dim) = (operands.group(), operands.shape.dim);
        let SequenceAttention { shape, layer, options, heads, kv, q, out, next, scratch, .. } =
            operands;
        let visible = kv.visible(options.window);
        let width = visible.clone().count() * PAGE;
        let (scores, rest) = scratch.split_at_mut(group * width);
        let (sums, buffers) = rest.split_at_mut(group * PARTIAL_SUMS * dim);
        let (buffers, inverses) = buffers.split_at_mut(PAGE_BLOCK * shape.part_len());
        let queries = q.chunks_exact(group * dim).zip(out.chunks_exact_mut(group * dim));
        for (head, (q, out)) in heads.clone().zip(queries) {
            let mut ahead = visible.clone().skip(PAGES_AHEAD);
            for (i, VisiblePage { page, from, to }) in visible.clone().enumerate() {
                let (keys, values) = shape.read(page, layer, head);
                // Pages are far apart, so the processor does not recognize the access pattern. Values are used
                // after all keys.
                values.prefetch();
                if let Some(next) = ahead.next() {
                    shape.read(next.page, layer, head).0.prefetch();
                }
                let unscaled = keys.unscaled(&mut buffers[..shape.part_len()]);
                for (g, q) in q.chunks_exact(dim).enumerate() {
                    let mut row = dot_products::<FUSED>(q, unscaled);
                    keys.scale(&mut row);
                    scale_and_cap(&mut row, options);
                    row[..from].fill(f32::NEG_INFINITY);
                    row[to..].fill(f32::NEG_INFINITY);
                    scores[g * width + i * PAGE..][..PAGE].copy_from_slice(&row);
                }
            }
            let next = if head + 1 < heads.end { Some((kv, head + 1)) } else { next };
            if let Some((kv, head)) = next {
                kv.prefetch_first_keys(shape, (layer, head), options.window);
            }
            for (weights, inverse) in scores.chunks_exact_mut(width).zip(inverses.iter_mut()) {
                *inverse = 1.0 / exponentiate(weights);
            }
            sums.fill(0.0);
            let mut pages = visible.clone();
            // Values stay in the first-level cache while all queries use them.
            for first in (0..width).step_by(PAGE_BLOCK * PAGE) {
                let mut block = [VisiblePage::default(); PAGE_BLOCK];
                let slots = block.iter_mut().zip(buffers.chunks_exact_mut(shape.part_len()));
                for (i, ((slot, buffer), page)) in slots.zip(pages.by_ref()).enumerate() {
                    let (_, values) = shape.read(page.page, layer, head);
                    for weights in scores.chunks_exact_mut(width) {
                        let row = weights[first + i * PAGE..].first_chunk_mut();
                        row.into_iter().for_each(|row| values.scale(row));
                    }
                    *slot = VisiblePage { page: values.unscaled(buffer), ..page };
                }
                let rows =
                    scores.chunks_exact(width).zip(sums.chunks_exact_mut(PARTIAL_SUMS * dim));
                for (weights, sums) in rows {
                    add_weighted::<FUSED>(sums, &weights[first..], &block);
                }
            }
            let sums = sums.chunks_exact(PARTIAL_SUMS * dim).zip(&*inverses);
            for (out, (sums, inverse)) in out.chunks_exact_mut(dim).zip(sums) {
                let (left, right) = sums.split_at(2 * dim);
                let pairs = |sums: &[f32], i: usize| sums[i] + sums[dim + i];
                for (i, out) in out.iter_mut().enumerate() {
                    *out = (pairs(left, i) + pairs(right, i)) * inverse;
                }
            }
        }
    }
}

/// `sums += factor * values`
#[inline(always)]
fn add<const FUSED: bool, const W: usize>(sums: &mut [f32; W], factor: f32, values: &[f32]) {
    // With a constant length, the sums stay in a register.
    let Some(values) = values.first_chunk::<W>() else { return };
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = mul_add::<FUSED>(factor, *value, *sum);
    }
}

/// The sum of the partial sums.
#[inline(always)]
fn total<const W: usize>([a, b, c, d]: [[f32; W]; PARTIAL_SUMS]) -> [f32; W] {
    std::array::from_fn(|i| (a[i] + b[i]) + (c[i] + d[i]))
}

/// The dot products of a query and the keys `[dim, PAGE]` of a page.
#[inline(always)]
fn dot_products<const FUSED: bool>(q: &[f32], keys: &[f32]) -> [f32; PAGE] {
    // Not a loop over the partial sums: those would be stored in memory.
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; PAGE]; PARTIAL_SUMS];
    let mut q = q.chunks_exact(PARTIAL_SUMS);
    let mut keys = keys.chunks_exact(PARTIAL_SUMS * PAGE);
    for (q, keys) in q.by_ref().zip(keys.by_ref()) {
        add::<FUSED, PAGE>(&mut a, q[0], keys);
        add::<FUSED, PAGE>(&mut b, q[1], &keys[PAGE..]);
        add::<FUSED, PAGE>(&mut c, q[2], &keys[2 * PAGE..]);
        add::<FUSED, PAGE>(&mut d, q[3], &keys[3 * PAGE..]);
    }
    let rest = q.remainder().iter().zip(keys.remainder().chunks_exact(PAGE));
    for (sums, (q, keys)) in [&mut a, &mut b, &mut c].into_iter().zip(rest) {
        add::<FUSED, PAGE>(sums, *q, keys);
    }
    total([a, b, c, d])
}

/// Adds the values of a block of pages, times the weights, to the partial sums `[PARTIAL_SUMS, dim]`.
#[inline(always)]
fn add_weighted<const FUSED: bool>(sums: &mut [f32], weights: &[f32], block: &[VisiblePage<'_>]) {
    let (dim, mut first) = (sums.len() / PARTIAL_SUMS, 0);
    while first < dim {
        first += match dim - first {
            16.. => add_dimensions::<FUSED, 16>(sums, first, weights, block),
            8.. => add_dimensions::<FUSED, 8>(sums, first, weights, block),
            _ => add_dimensions::<FUSED, 2>(sums, first, weights, block),
        };
    }
}

/// [`add_weighted`] for the `W` dimensions from `first` on. Returns `W`.
#[inline(always)]
fn add_dimensions<const FUSED: bool, const W: usize>(
    sums: &mut [f32],
    first: usize,
    weights: &[f32],
    block: &[VisiblePage<'_>],
) -> usize {
    let dim = sums.len() / PARTIAL_SUMS;
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; W]; PARTIAL_SUMS];
    for (i, part) in [&mut a, &mut b, &mut c, &mut d].into_iter().enumerate() {
        part.copy_from_slice(&sums[i * dim + first..][..W]);
    }
    for (page, weights) in block.iter().zip(weights.chunks_exact(PAGE)) {
        let value = |slot: usize| &page.page[slot * dim + first..];
        // Unused slots may contain NaN or infinity, and 0 times these is not 0.
        let first_slot = page.from / PARTIAL_SUMS * PARTIAL_SUMS;
        for slot in (first_slot..page.to).step_by(PARTIAL_SUMS) {
            let visible = |i: usize| slot + i >= page.from && slot + i < page.to;
            if visible(0) {
                add::<FUSED, W>(&mut a, weights[slot], value(slot));
            }
            if visible(1) {
                add::<FUSED, W>(&mut b, weights[slot + 1], value(slot + 1));
            }
            if visible(2) {
                add::<FUSED, W>(&mut c, weights[slot + 2], value(slot + 2));
            }
            if visible(3) {
                add::<FUSED, W>(&mut d, weights[slot + 3], value(slot + 3));
            }
        }
    }
    for (i, part) in [a, b, c, d].into_iter().enumerate() {
        sums[i * dim + first..][..W].copy_from_slice(&part);
    }
    W
}
