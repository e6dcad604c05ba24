//! Attention of tokens over the KV cache of their sequence.
//!
//! Sums over positions run page by page. Pages are aligned to positions, so the order of a sum depends
//! only on the token's position.

mod scores;
#[cfg(target_arch = "x86_64")]
mod tile;

use std::ops::Range;

use pulp::Arch;

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_core::threads::pause_point;
use hone_model::spec::AttentionOptions;

use crate::kv_cache::{CacheShape, KvView, PAGE};
use crate::prefetch::prefetch;
use scores::{PARTIAL_SUMS, exponentiate, scale_and_cap};

/// Values of f32 in a cache line.
const CACHE_LINE: usize = 16;

/// Pages by which keys are fetched ahead of their use. To compute one takes less time than to fetch it.
const PAGES_AHEAD: usize = 3;

/// All heads of consecutive tokens of one sequence.
pub(crate) struct SequenceAttention<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    /// What the last token sees. Each token sees one position more than the one before.
    pub kv: KvView<'a>,
    /// The rotated queries: a row of `stride` values for each token, which begins with `[heads * dim]`.
    pub q: &'a [f32],
    pub stride: usize,
    /// `[tokens, heads * dim]`
    pub out: &'a mut [f32],
    /// `heads * dim`
    pub width: usize,
    /// [`scratch_len`] values.
    pub scratch: &'a mut [f32],
}

/// Values of scratch for tokens up to `position`, where `group` query heads of `dim` dimensions share a kv
/// head.
pub(crate) fn scratch_len(position: usize, group: usize, dim: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_tiled(dim).is_some() {
        return tile::scratch_len(position, group, dim);
    }
    let _ = dim;
    scores_len(position, group)
}

/// The proof that the processor can compute tiles of tokens, if heads of `dim` dimensions permit it.
#[cfg(target_arch = "x86_64")]
fn is_tiled(dim: usize) -> Option<pulp::x86::V4> {
    match Arch::new() {
        Arch::V4(token) if tile::is_supported(dim) => Some(token),
        _ => None,
    }
}

impl SequenceAttention<'_> {
    /// Computes all tokens.
    pub fn run(self) {
        let Self { shape, layer, options, kv, q, stride, out, width, scratch } = self;
        let tokens = out.len() / width;
        #[cfg(target_arch = "x86_64")]
        if tokens > 1
            && let Some(token) = is_tiled(shape.dim)
        {
            let tiles = q.chunks(tile::TILE * stride).zip(out.chunks_mut(tile::TILE * width));
            let mut done = 0;
            for (q, out) in tiles {
                let count = out.len() / width;
                done += count;
                let (pages, len) = (kv.pages, kv.len - (tokens - done));
                let scratch = &mut *scratch;
                let tile = tile::AttentionTile {
                    shape,
                    layer,
                    options,
                    pages,
                    len,
                    tokens: count,
                    q,
                    stride,
                    out,
                    scratch,
                };
                tile.run(token);
                pause_point();
            }
            return;
        }
        for (t, (q, out)) in q.chunks(stride).zip(out.chunks_exact_mut(width)).enumerate() {
            let kv = KvView { len: kv.len - (tokens - 1 - t), ..kv };
            let (q, scores) = (&q[..width], &mut *scratch);
            TokenAttention { shape, layer, options, kv, heads: 0..shape.heads, q, out, scores }
                .run();
        }
    }
}

/// Some heads of one token.
pub(crate) struct TokenAttention<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    pub kv: KvView<'a>,
    /// The heads of keys and values.
    pub heads: Range<usize>,
    /// The rotated queries that use these heads, `[queries, dim]`.
    pub q: &'a [f32],
    /// `[queries, dim]`
    pub out: &'a mut [f32],
    /// At least [`scores_len`] values.
    pub scores: &'a mut [f32],
}

impl TokenAttention<'_> {
    /// Computes the heads.
    pub fn run(self) {
        dispatch(self);
        pause_point();
    }
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
        let Self { shape, layer, options, kv, heads: kv_heads, q, out, scores } = self;
        let dim = shape.dim;
        let group = q.len() / dim / kv_heads.len();
        let visible = kv.visible(options.window);
        let width = visible.clone().count() * PAGE;
        let heads = q.chunks_exact(group * dim).zip(out.chunks_exact_mut(group * dim));
        for (head, (q, out)) in kv_heads.zip(heads) {
            let head = shape.head(layer, head);
            let mut ahead = visible.clone().skip(PAGES_AHEAD);
            for (i, page) in visible.clone().enumerate() {
                let (keys, values) = page.page[head.clone()].split_at(dim * PAGE);
                // Pages are far apart, so the processor does not recognize the access pattern. Values are used
                // after all keys.
                values.chunks(CACHE_LINE).for_each(|line| prefetch(line.as_ptr()));
                if let Some(next) = ahead.next() {
                    let keys = &next.page[head.clone()][..dim * PAGE];
                    keys.chunks(CACHE_LINE).for_each(|line| prefetch(line.as_ptr()));
                }
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
                        heads: 0..2,
                        q: &q,
                        out: &mut out,
                        scores: &mut scores,
                    });
                    out
                });
            }
        }
    }

    #[test]
    fn consecutive_tokens_have_the_bits_of_single_ones() {
        for (dim, heads, group) in [(16, 2, 3), (64, 1, 1), (32, 2, 5), (26, 1, 2)] {
            let shape = CacheShape { layers: 2, heads, dim };
            let (width, stride) = (heads * group * dim, heads * group * dim + 7);
            for (len, tokens) in [(1_usize, 1), (9, 9), (17, 3), (48, 30), (200, 21), (130, 8)] {
                // What no token has written must not be read.
                let pages: Vec<_> = (0..len.div_ceil(PAGE))
                    .map(|i| {
                        let mut page = waves(shape.page_len(), i as f32);
                        for slot in (0..PAGE).filter(|slot| i * PAGE + slot >= len) {
                            let unused = vec![f32::NAN; dim];
                            (0..heads).for_each(|head| {
                                shape.write(&mut page, (1, head, slot), &unused, &unused);
                            });
                        }
                        page.into()
                    })
                    .collect();
                let kv = KvView { pages: &pages, len };
                let q = waves(tokens * stride, 0.7);
                for (softcap, window) in
                    [(None, None), (Some(2.0), None), (None, Some(21)), (None, Some(1))]
                {
                    let options = AttentionOptions { scale: 0.2, softcap, window };
                    let run = |first: usize, count: usize| {
                        let mut scratch = vec![f32::NAN; scratch_len(len - 1, group, dim)];
                        let mut out = vec![0.0; count * width];
                        SequenceAttention {
                            shape,
                            layer: 1,
                            options,
                            kv: KvView { len: len - (tokens - first - count), ..kv },
                            q: &q[first * stride..][..count * stride],
                            stride,
                            out: &mut out,
                            width,
                            scratch: &mut scratch,
                        }
                        .run();
                        out
                    };
                    let single: Vec<f32> = (0..tokens).flat_map(|t| run(t, 1)).collect();
                    let last = &q[(tokens - 1) * stride..][..width];
                    let by_head = (0..heads).zip(last.chunks_exact(group * dim));
                    let by_head = by_head.flat_map(|(head, q)| {
                        let mut scores = vec![f32::NAN; scratch_len(len - 1, group, dim)];
                        let mut out = vec![0.0; q.len()];
                        let (heads, scores) = (head..head + 1, &mut scores[..]);
                        let (layer, to) = (1, &mut out[..]);
                        TokenAttention { shape, layer, options, kv, heads, q, out: to, scores }
                            .run();
                        out
                    });
                    assert_eq!(by_head.collect::<Vec<_>>(), single[(tokens - 1) * width..]);
                    assert!(single.iter().all(|x| x.is_finite()));
                    assert_eq!(run(0, tokens), single, "{dim} {len} {tokens} {window:?}");
                }
            }
        }
    }
}
