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
use scores::{PAGE_BLOCK, PARTIAL_SUMS, exponentiate, scale_and_cap};

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
    /// What the token sees that is computed next on this thread. Its first keys are fetched ahead of their use.
    pub next: Option<KvView<'a>>,
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
    token_scratch_len(position, group, dim)
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
        let Self { shape, layer, options, kv, q, stride, out, width, next, scratch } = self;
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
            let (q, heads, scratch) = (&q[..width], 0..shape.heads, &mut *scratch);
            let next = next.map(|kv| (kv, 0));
            TokenAttention { shape, layer, options, kv, heads, q, out, next, scratch }.run();
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
    /// What the token sees that is computed next on this thread, and its first head of keys.
    pub next: Option<(KvView<'a>, usize)>,
    /// At least [`token_scratch_len`] values.
    pub scratch: &'a mut [f32],
}

impl TokenAttention<'_> {
    /// Computes the heads.
    pub fn run(self) {
        dispatch(self);
        pause_point();
    }
}

/// Values of scratch for a token at `position`, where `group` query heads of `dim` dimensions share a kv head:
/// scores, partial sums, a block of pages, and the reciprocals of the weights' sums.
pub(crate) fn token_scratch_len(position: usize, group: usize, dim: usize) -> usize {
    let width = (position / PAGE + 1) * PAGE;
    group * (width + PARTIAL_SUMS * dim + 1) + PAGE_BLOCK * dim * PAGE
}

/// A page, or the values of a head in a page, that the query attends to in the slots `from..to`.
#[derive(Clone, Copy, Default)]
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
        let Self { shape, layer, options, kv, heads: kv_heads, q, out, next, scratch } = self;
        let dim = shape.dim;
        let group = q.len() / dim / kv_heads.len();
        let visible = kv.visible(options.window);
        let width = visible.clone().count() * PAGE;
        let (scores, rest) = scratch.split_at_mut(group * width);
        let (sums, buffers) = rest.split_at_mut(group * PARTIAL_SUMS * dim);
        let (buffers, inverses) = buffers.split_at_mut(PAGE_BLOCK * shape.part_len());
        let heads = q.chunks_exact(group * dim).zip(out.chunks_exact_mut(group * dim));
        let last = kv_heads.end;
        for (head, (q, out)) in kv_heads.zip(heads) {
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
            // The next head's first keys have no page before them that fetches them.
            let next = if head + 1 < last { Some((kv, head + 1)) } else { next };
            if let Some((kv, head)) = next {
                for page in kv.visible(options.window).take(PAGES_AHEAD) {
                    shape.read(page.page, layer, head).0.prefetch();
                }
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

#[cfg(test)]
mod tests {
    use hone_core::testing::assert_same_bits_if_fused;
    use hone_model::testing::waves;

    use super::*;
    use crate::kv_cache::{CacheType, Page};

    const TYPES: [CacheType; 2] = [CacheType::F32, CacheType::I16];

    /// Page `i` of a sequence, whose positions from `len` on are not written.
    fn page(shape: CacheShape, i: usize, len: usize) -> Page {
        let mut page = vec![0.0; shape.page_len()];
        for layer in 0..shape.layers {
            for head in 0..shape.heads {
                for slot in 0..PAGE {
                    let phase = (head + layer) as f32 + 0.3 * (i * PAGE + slot) as f32;
                    let (mut key, mut value) = (waves(shape.dim, phase), waves(shape.dim, -phase));
                    if i * PAGE + slot >= len {
                        // What no token has written must not be read.
                        key.fill(f32::NAN);
                        value.fill(f32::NAN);
                    }
                    shape.write(&mut page, (layer, head, slot), &key, &value);
                }
            }
        }
        page.into()
    }

    #[test]
    fn every_instruction_set_that_fuses_attends_to_the_same_bits() {
        // The weighted sums take 16, 8 or 2 dimensions at a time.
        for (dim, stored) in
            [16, 26, 44].into_iter().flat_map(|dim| TYPES.map(|stored| (dim, stored)))
        {
            let shape = CacheShape { layers: 2, heads: 2, dim, stored };
            let pages = [0, 1, 2].map(|i| page(shape, i, 39));
            let kv = KvView { pages: &pages, len: 39 };
            // Three query heads for each head of keys.
            let q = waves(6 * dim, 0.7);
            for (softcap, window) in [(None, None), (Some(2.0), None), (None, Some(21))] {
                let options = AttentionOptions { scale: 0.2, softcap, window };
                assert_same_bits_if_fused(|instructions| {
                    let mut scratch = vec![0.0; token_scratch_len(38, 3, dim)];
                    let mut out = vec![0.0; q.len()];
                    instructions.run(TokenAttention {
                        shape,
                        layer: 1,
                        options,
                        kv,
                        heads: 0..2,
                        q: &q,
                        out: &mut out,
                        next: None,
                        scratch: &mut scratch,
                    });
                    out
                });
            }
        }
    }

    /// Tokens of a sequence, with the queries of all heads.
    struct Tokens<'a> {
        shape: CacheShape,
        options: AttentionOptions,
        pages: &'a [Page],
        q: &'a [f32],
        stride: usize,
        width: usize,
    }

    impl Tokens<'_> {
        /// Computes `count` tokens, of which the first sees `len` positions.
        fn attend(&self, len: usize, count: usize) -> Vec<f32> {
            let Self { shape, options, pages, q, stride, width } = *self;
            let last = len + count - 1;
            let group = width / shape.dim / shape.heads;
            let mut scratch = vec![f32::NAN; scratch_len(last - 1, group, shape.dim)];
            let mut out = vec![0.0; count * width];
            let (scratch, to) = (&mut scratch[..], &mut out[..]);
            let kv = KvView { pages, len: last };
            let (layer, next) = (1, Some(kv));
            SequenceAttention {
                shape,
                layer,
                options,
                kv,
                q,
                stride,
                out: to,
                width,
                next,
                scratch,
            }
            .run();
            out
        }
    }

    #[test]
    fn consecutive_tokens_have_the_bits_of_single_ones() {
        let shapes = [(16, 2, 3), (64, 1, 1), (32, 2, 5), (26, 1, 2)];
        for ((dim, heads, group), stored) in
            shapes.into_iter().flat_map(|shape| TYPES.map(|stored| (shape, stored)))
        {
            let shape = CacheShape { layers: 2, heads, dim, stored };
            let (width, stride) = (heads * group * dim, heads * group * dim + 7);
            for (len, tokens) in [(1_usize, 1), (9, 9), (17, 3), (48, 30), (200, 21), (130, 8)] {
                let pages: Vec<_> = (0..len.div_ceil(PAGE)).map(|i| page(shape, i, len)).collect();
                let kv = KvView { pages: &pages, len };
                let q = waves(tokens * stride, 0.7);
                for (softcap, window) in
                    [(None, None), (Some(2.0), None), (None, Some(21)), (None, Some(1))]
                {
                    let options = AttentionOptions { scale: 0.2, softcap, window };
                    let all = Tokens { shape, options, pages: &pages, q: &q, stride, width };
                    let first = len - tokens + 1;
                    let single: Vec<f32> = (0..tokens)
                        .flat_map(|t| {
                            Tokens { q: &q[t * stride..][..stride], ..all }.attend(first + t, 1)
                        })
                        .collect();
                    let last = &q[(tokens - 1) * stride..][..width];
                    let by_head = (0..heads).zip(last.chunks_exact(group * dim));
                    let by_head = by_head.flat_map(|(head, q)| {
                        let mut scratch = vec![f32::NAN; token_scratch_len(len - 1, group, dim)];
                        let mut to = vec![0.0; q.len()];
                        let (heads, scratch) = (head..head + 1, &mut scratch[..]);
                        let (layer, out) = (1, &mut to[..]);
                        let next = (head + 1 < shape.heads).then_some((kv, head + 1));
                        TokenAttention { shape, layer, options, kv, heads, q, out, next, scratch }
                            .run();
                        to
                    });
                    assert_eq!(by_head.collect::<Vec<_>>(), single[(tokens - 1) * width..]);
                    assert!(single.iter().all(|x| x.is_finite()));
                    let all = all.attend(first, tokens);
                    assert_eq!(all, single, "{stored:?} {dim} {len} {tokens} {window:?}");
                }
            }
        }
    }

    #[test]
    fn a_cache_of_integers_changes_little() {
        let (dim, len) = (64, 200_usize);
        let q = waves(3 * dim, 0.7);
        let options = AttentionOptions { scale: 0.125, softcap: None, window: None };
        let [exact, rounded] = TYPES.map(|stored| {
            let shape = CacheShape { layers: 2, heads: 1, dim, stored };
            let pages: Vec<_> = (0..len.div_ceil(PAGE)).map(|i| page(shape, i, len)).collect();
            let (stride, width) = (3 * dim, 3 * dim);
            Tokens { shape, options, pages: &pages, q: &q, stride, width }.attend(len, 1)
        });
        let greatest = exact.iter().fold(0.0, |greatest: f32, x| greatest.max(x.abs()));
        let error = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error > 0.0 && error < 1e-4 * greatest, "{error} of {greatest}");
    }
}
