//! Attention of one token over the KV cache of its sequence.
//!
//! Sums over positions run page by page. Pages are aligned to positions, so the order of a sum depends
//! only on the token's position.

use std::ops::Range;

use hone_core::simd::{SimdTask, mul_add};
use hone_model::kernels::exp::exp_f32;
use hone_model::spec::AttentionOptions;

use crate::kv_cache::{CacheShape, KvView, PAGE};
use crate::simd_ops::tanh;

/// Independent partial sums, which hide the latency of multiply-add.
const PARTIAL_SUMS: usize = 4;

/// All heads of one token.
pub(crate) struct TokenAttention<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    pub kv: KvView<'a>,
    /// The rotated queries, `[heads * dim]`.
    pub q: &'a [f32],
    /// `[heads * dim]`
    pub out: &'a mut [f32],
    /// [`scores_len`] values of scratch.
    pub scores: &'a mut [f32],
}

/// Scores of a token at `position`, where `group` query heads share a kv head.
pub(crate) fn scores_len(position: usize, group: usize) -> usize {
    group * (position / PAGE + 1) * PAGE
}

/// A page that the query attends to, in the slots `from..to`.
struct VisiblePage<'a> {
    page: &'a [f32],
    from: usize,
    to: usize,
}

impl<'a> KvView<'a> {
    /// The pages with a visible position, in order.
    #[inline(always)]
    fn visible(self, window: Option<usize>) -> impl Iterator<Item = VisiblePage<'a>> + Clone {
        let len = self.len;
        let first = window.map_or(0, |window| len.saturating_sub(window));
        let first_page = first / PAGE;
        let pages = &self.pages[first_page..len.div_ceil(PAGE)];
        pages.iter().enumerate().map(move |(i, page)| {
            let start = (first_page + i) * PAGE;
            VisiblePage { page, from: first.saturating_sub(start), to: (len - start).min(PAGE) }
        })
    }
}

impl SimdTask for TokenAttention<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { shape, layer, options, kv, q, out, scores } = self;
        let dim = shape.dim;
        let group = q.len() / dim / shape.heads;
        let visible = kv.visible(options.window);
        let width = visible.clone().count() * PAGE;
        let heads = q.chunks_exact(group * dim).zip(out.chunks_exact_mut(group * dim));
        for (head, (q, out)) in heads.enumerate() {
            let head = shape.head(layer, head);
            for (i, page) in visible.clone().enumerate() {
                let keys = &page.page[head.clone()][..dim * PAGE];
                for (g, q) in q.chunks_exact(dim).enumerate() {
                    let mut row = dot_products::<FUSED>(q, keys);
                    scale_and_cap(&mut row, options);
                    row[..page.from].fill(f32::NEG_INFINITY);
                    row[page.to..].fill(f32::NEG_INFINITY);
                    scores[g * width + i * PAGE..][..PAGE].copy_from_slice(&row);
                }
            }
            for (g, out) in out.chunks_exact_mut(dim).enumerate() {
                let weights = &mut scores[g * width..][..width];
                let inverse = 1.0 / exponentiate(weights);
                let mut first = 0;
                while first < dim {
                    let pages = visible.clone();
                    first += match dim - first {
                        16.. => weighted_sum::<FUSED, 16>(out, first, weights, pages, &head),
                        8.. => weighted_sum::<FUSED, 8>(out, first, weights, pages, &head),
                        _ => weighted_sum::<FUSED, 2>(out, first, weights, pages, &head),
                    };
                }
                out.iter_mut().for_each(|x| *x *= inverse);
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

/// Applies the scale and the soft cap.
#[inline(always)]
fn scale_and_cap(row: &mut [f32; PAGE], options: AttentionOptions) {
    let scale = options.scale as f32;
    match options.softcap {
        None => row.iter_mut().for_each(|s| *s *= scale),
        Some(cap) => {
            let (cap, inverse) = (cap as f32, (1.0 / cap) as f32);
            row.iter_mut().for_each(|s| *s = cap * tanh(*s * scale * inverse));
        }
    }
}

/// Replaces scores by `e^(score - maximum)`. Returns their sum.
#[inline(always)]
fn exponentiate(weights: &mut [f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; PAGE];
    for row in weights.chunks_exact(PAGE) {
        for slot in 0..PAGE {
            max[slot] = if row[slot] > max[slot] { row[slot] } else { max[slot] };
        }
    }
    let max = max.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    let mut sums = [0.0_f32; PAGE];
    for row in weights.chunks_exact_mut(PAGE) {
        for slot in 0..PAGE {
            row[slot] = exp_f32(row[slot] - max);
            sums[slot] += row[slot];
        }
    }
    sums.iter().sum()
}

/// Computes the `W` dimensions of the weighted sum of values that begin at `first`. Returns `W`.
#[inline(always)]
fn weighted_sum<'a, const FUSED: bool, const W: usize>(
    out: &mut [f32],
    first: usize,
    weights: &[f32],
    pages: impl Iterator<Item = VisiblePage<'a>>,
    head: &Range<usize>,
) -> usize {
    let dim = out.len();
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; W]; PARTIAL_SUMS];
    for (page, weights) in pages.zip(weights.chunks_exact(PAGE)) {
        let values = &page.page[head.clone()][dim * PAGE..];
        let value = |slot: usize| &values[slot * dim + first..];
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
    out[first..first + W].copy_from_slice(&total([a, b, c, d]));
    W
}

#[cfg(test)]
mod tests {
    use hone_core::testing::assert_same_bits_if_fused;
    use hone_model::testing::waves;

    use super::*;

    #[test]
    fn every_instruction_set_that_fuses_attends_to_the_same_bits() {
        // The weighted sums take 16, 8 or 2 dimensions at a time.
        for dim in [16, 26, 44] {
            let shape = CacheShape { layers: 2, heads: 2, dim };
            let pages = [0.1, 0.2, 0.3].map(|phase| waves(shape.page_len(), phase).into());
            let kv = KvView { pages: &pages, len: 39 };
            // Three query heads for each head of keys.
            let q = waves(6 * dim, 0.7);
            for (softcap, window) in [(None, None), (Some(2.0), None), (None, Some(21))] {
                let options = AttentionOptions { scale: 0.2, softcap, window };
                assert_same_bits_if_fused(|instructions| {
                    let (mut out, mut scores) = (vec![0.0; q.len()], vec![0.0; scores_len(38, 3)]);
                    instructions.run(TokenAttention {
                        shape,
                        layer: 1,
                        options,
                        kv,
                        q: &q,
                        out: &mut out,
                        scores: &mut scores,
                    });
                    out
                });
            }
        }
    }
}
