//! Attention of tokens over the KV cache of their sequence.
//!
//! Sums over positions run page by page. Pages are aligned to positions, so the order of a sum depends
//! only on the token's position.

mod kernel;
mod operands;
#[cfg(target_arch = "x86_64")]
mod tile;

use std::ops::Range;

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_core::threads::pause_point;
#[cfg(target_arch = "x86_64")]
use hone_kernels::processor::avx512;

use crate::kv_cache::{KvView, PAGE};
use kernel::AttentionKernel;
use operands::{PAGE_BLOCK, PARTIAL_SUMS};

pub(crate) use operands::SequenceAttention;

/// Values of scratch for tokens up to `position`, where `group` query heads of `dim` dimensions share a kv
/// head: for all tokens that are computed together their scores, partial sums, and the reciprocals of the weights'
/// sums; and a block of pages.
pub(crate) fn scratch_len(position: usize, group: usize, dim: usize) -> usize {
    let width = (position / PAGE + 1) * PAGE;
    let queries = Kernel::new(dim).tokens() * group;
    queries * (width + PARTIAL_SUMS * dim + 1) + PAGE_BLOCK * dim * PAGE
}

/// How tokens are computed. Both kernels compute the same bits if the processor fuses multiply and add.
#[derive(Clone, Copy)]
enum Kernel {
    /// Consecutive tokens together, with AVX-512, which the value proves.
    #[cfg(target_arch = "x86_64")]
    Tile(pulp::x86::V4),
    /// One token at a time.
    Token,
}

impl Kernel {
    fn new(dim: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(proof) = avx512()
            && tile::is_supported(dim)
        {
            return Self::Tile(proof);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = dim;
        Self::Token
    }

    fn tokens(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tile(_) => tile::TILE,
            Self::Token => 1,
        }
    }

    fn run(self, operands: SequenceAttention<'_>) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tile(proof) => tile::run(operands, proof),
            Self::Token => dispatch(TokenAttention(operands)),
        }
    }
}

impl SequenceAttention<'_> {
    pub fn run(self) {
        let kernel = Kernel::new(self.shape.dim);
        self.run_with(kernel);
    }

    fn run_with(self, kernel: Kernel) {
        let (mut rest, count) = (self.tokens(), kernel.tokens());
        let Self { kv, q, stride, out, width, scratch, ref heads, .. } = self;
        for (q, out) in q.chunks(count * stride).zip(out.chunks_mut(count * width)) {
            rest -= out.len() / width;
            let kv = KvView { len: kv.len - rest, ..kv };
            let (heads, scratch) = (heads.clone(), &mut *scratch);
            kernel.run(SequenceAttention { kv, q, out, heads, scratch, ..self });
            pause_point();
        }
    }
}

// Attention of a token, for every processor.

struct TokenAttention<'a>(pub SequenceAttention<'a>);

impl SimdTask for TokenAttention<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        self.0.compute(PortableAttention::<FUSED>);
    }
}

/// Loops for which the compiler selects instructions.
#[derive(Clone, Copy)]
struct PortableAttention<const FUSED: bool>;

impl<const FUSED: bool> AttentionKernel for PortableAttention<FUSED> {
    #[inline(always)]
    fn dot_products<const N: usize>(
        self,
        queries: [&[f32]; N],
        keys: &[f32],
        scores: &mut [f32],
        stride: usize,
    ) {
        for (q, scores) in queries.iter().zip(scores.chunks_mut(stride)) {
            scores[..PAGE].copy_from_slice(&dot_products::<FUSED>(q, keys));
        }
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
        let queries = weights.chunks(stride).zip(sums.chunks_exact_mut(PARTIAL_SUMS * dim));
        for (weights, sums) in queries.take(N) {
            let mut first = 0;
            while first < dim {
                let operands = (weights, pages, slots.clone());
                first += match dim - first {
                    16.. => add_dimensions::<FUSED, 16>(sums, first, operands),
                    8.. => add_dimensions::<FUSED, 8>(sums, first, operands),
                    _ => add_dimensions::<FUSED, 2>(sums, first, operands),
                };
            }
        }
    }
}

#[inline(always)]
fn add<const FUSED: bool, const W: usize>(sums: &mut [f32; W], factor: f32, values: &[f32]) {
    // With a constant length, the sums stay in a register.
    let Some(values) = values.first_chunk::<W>() else { return };
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = mul_add::<FUSED>(factor, *value, *sum);
    }
}

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

/// Adds some slots of pages, times the weights, to the `W` dimensions from `first` on of the partial sums
/// `[PARTIAL_SUMS, dim]`. Returns `W`.
#[inline(always)]
fn add_dimensions<const FUSED: bool, const W: usize>(
    sums: &mut [f32],
    first: usize,
    (weights, pages, slots): (&[f32], &[&[f32]], Range<usize>),
) -> usize {
    let dim = sums.len() / PARTIAL_SUMS;
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; W]; PARTIAL_SUMS];
    for (i, part) in [&mut a, &mut b, &mut c, &mut d].into_iter().enumerate() {
        part.copy_from_slice(&sums[i * dim + first..][..W]);
    }
    for (page, weights) in pages.iter().zip(weights.chunks_exact(PAGE)) {
        let value = |slot: usize| &page[slot * dim + first..];
        let first_slot = slots.start / PARTIAL_SUMS * PARTIAL_SUMS;
        for slot in (first_slot..slots.end).step_by(PARTIAL_SUMS) {
            let visible = |i: usize| slots.contains(&(slot + i));
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
    use hone_model::spec::AttentionOptions;
    use hone_model::testing::waves;

    use super::*;
    use crate::kv_cache::{CacheShape, CacheType, Page};

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
                    let mut scratch = vec![0.0; scratch_len(38, 3, dim)];
                    let mut out = vec![0.0; q.len()];
                    instructions.run(TokenAttention(SequenceAttention {
                        shape,
                        layer: 1,
                        options,
                        heads: 0..2,
                        kv,
                        q: &q,
                        stride: q.len(),
                        out: &mut out,
                        width: q.len(),
                        next: None,
                        scratch: &mut scratch,
                    }));
                    out
                });
            }
        }
    }

    /// Consecutive tokens of a sequence, of which the last sees `len` positions.
    #[derive(Clone, Copy)]
    struct Tokens<'a> {
        shape: CacheShape,
        options: AttentionOptions,
        pages: &'a [Page],
        len: usize,
        /// A row of `stride` values for each token.
        q: &'a [f32],
        stride: usize,
        /// Values of a row that are queries of `heads`.
        width: usize,
        /// The first of the heads of keys, and the one after the last.
        heads: [usize; 2],
    }

    impl Tokens<'_> {
        fn attend(self, kernel: Kernel) -> Vec<f32> {
            let Self { shape, options, pages, len, q, stride, width, heads: [first, end] } = self;
            let group = width / shape.dim / (end - first);
            let mut scratch = vec![f32::NAN; scratch_len(len - 1, group, shape.dim)];
            let mut out = vec![0.0; q.len() / stride * width];
            let kv = KvView { pages, len };
            SequenceAttention {
                shape,
                layer: 1,
                options,
                heads: first..end,
                kv,
                q,
                stride,
                out: &mut out,
                width,
                next: Some((kv, 0)),
                scratch: &mut scratch,
            }
            .run_with(kernel);
            out
        }
    }

    #[test]
    fn both_kernels_compute_the_same_bits_in_one_run_token_by_token_and_head_by_head() {
        let shapes = [(16, 2, 3), (64, 1, 1), (32, 2, 5), (26, 1, 2)];
        for ((dim, heads, group), stored) in
            shapes.into_iter().flat_map(|shape| TYPES.map(|stored| (shape, stored)))
        {
            let shape = CacheShape { layers: 2, heads, dim, stored };
            let (width, stride) = (heads * group * dim, heads * group * dim + 7);
            for (len, tokens) in [(1_usize, 1), (9, 9), (17, 3), (48, 30), (200, 21), (130, 8)] {
                let pages: Vec<_> = (0..len.div_ceil(PAGE)).map(|i| page(shape, i, len)).collect();
                let q = waves(tokens * stride, 0.7);
                for (softcap, window) in
                    [(None, None), (Some(2.0), None), (None, Some(21)), (None, Some(1))]
                {
                    let options = AttentionOptions { scale: 0.2, softcap, window };
                    let (pages, q, heads) = (&pages[..], &q[..], [0, heads]);
                    let all = Tokens { shape, options, pages, len, q, stride, width, heads };
                    let expected = all.attend(Kernel::Token);
                    assert!(expected.iter().all(|x| x.is_finite()));
                    let case = format!("{stored:?} {dim} {len} {tokens} {softcap:?} {window:?}");
                    let kernel = Kernel::new(dim);
                    assert_eq!(all.attend(kernel), expected, "{case}");
                    for (t, expected) in expected.chunks(width).enumerate() {
                        let (len, q) = (len - (tokens - 1 - t), &q[t * stride..][..stride]);
                        let token = Tokens { len, q, ..all };
                        assert_eq!(token.attend(kernel), expected, "{case}: token {t}");
                        for head in 0..shape.heads {
                            let (width, heads) = (group * dim, [head, head + 1]);
                            let q = &q[head * width..][..width];
                            let one = Tokens { q, stride: width, width, heads, ..token };
                            for kernel in [kernel, Kernel::Token] {
                                let expected = &expected[head * width..][..width];
                                assert_eq!(one.attend(kernel), expected, "{case}: head {head}");
                            }
                        }
                    }
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
            let (pages, q, stride, width) = (&pages[..], &q[..], 3 * dim, 3 * dim);
            let heads = [0, 1];
            Tokens { shape, options, pages, len, q, stride, width, heads }.attend(Kernel::new(dim))
        });
        let greatest = exact.iter().fold(0.0, |greatest: f32, x| greatest.max(x.abs()));
        let error = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error > 0.0 && error < 1e-4 * greatest, "{error} of {greatest}");
    }
}
