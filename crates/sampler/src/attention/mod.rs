//! Attention of tokens over the KV cache of their sequence.
//!
//! Sums over positions run page by page. Pages are aligned to positions, so the order of a sum depends
//! only on the token's position.

mod operands;
mod scores;
#[cfg(target_arch = "x86_64")]
mod tile;
mod token;

use hone_core::simd::dispatch;
use hone_core::threads::pause_point;

pub(crate) use operands::SequenceAttention;

use crate::kv_cache::{KvView, PAGE};
use scores::{PAGE_BLOCK, PARTIAL_SUMS};
use token::TokenAttention;

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
    /// The kernel for heads of `dim` dimensions.
    fn new(dim: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let pulp::Arch::V4(proof) = pulp::Arch::new()
            && tile::is_supported(dim)
        {
            return Self::Tile(proof);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = dim;
        Self::Token
    }

    /// Tokens that it computes together.
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
            Self::Tile(proof) => operands.run_tile(proof),
            Self::Token => dispatch(TokenAttention(operands)),
        }
    }
}

impl SequenceAttention<'_> {
    /// Computes all tokens.
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
