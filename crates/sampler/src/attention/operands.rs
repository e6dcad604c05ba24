//! What attention reads and writes, the pages that a token sees, and what every kernel computes alike: the scores of a
//! page, and the softmax.

use std::ops::Range;

use hone_kernels::float::Real;
use hone_kernels::vector::exp_f32;
use hone_model::spec::AttentionOptions;

use crate::kv_cache::{CacheShape, KvView, PAGE};

/// Pages by which keys are fetched ahead of their use. To compute one takes less time than to fetch it.
pub(super) const PAGES_AHEAD: usize = 3;

/// Some heads of consecutive tokens of one sequence.
pub(crate) struct SequenceAttention<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    /// The heads of keys and values.
    pub heads: Range<usize>,
    /// What the last token sees. Each token sees one position more than the one before.
    pub kv: KvView<'a>,
    /// The rotated queries: a row of `stride` values for each token, which begins with the queries that use
    /// these heads, `[queries, dim]`.
    pub q: &'a [f32],
    pub stride: usize,
    /// `[tokens, queries * dim]`
    pub out: &'a mut [f32],
    /// `queries * dim`
    pub width: usize,
    /// What the token sees that is computed next on this thread, and its first head of keys. Its first keys
    /// are fetched ahead of their use.
    pub next: Option<(KvView<'a>, usize)>,
    /// Values that the computation overwrites, as many as [`super::scratch_len`].
    pub scratch: &'a mut [f32],
}

impl SequenceAttention<'_> {
    #[inline(always)]
    pub(super) fn tokens(&self) -> usize {
        self.out.len() / self.width
    }

    /// Queries of a token that share a head of keys.
    #[inline(always)]
    pub(super) fn group(&self) -> usize {
        self.width / self.shape.dim / self.heads.len()
    }
}

impl KvView<'_> {
    /// Starts to load the keys of head `head` that are used first: no page before them does it.
    #[inline(always)]
    pub(super) fn prefetch_first_keys(
        self,
        shape: CacheShape,
        (layer, head): (usize, usize),
        window: Option<usize>,
    ) {
        let first = window.map_or(0, |window| self.len.saturating_sub(window)) / PAGE;
        for page in self.pages[first..self.len.div_ceil(PAGE)].iter().take(PAGES_AHEAD) {
            shape.read(page, layer, head).0.prefetch();
        }
    }
}

/// Independent partial sums, which hide the latency of multiply-add.
pub(super) const PARTIAL_SUMS: usize = 4;

/// Pages whose values stay in the first-level cache while several queries use them.
pub(super) const PAGE_BLOCK: usize = 4;

#[inline(always)]
pub(super) fn scale_and_cap(row: &mut [f32; PAGE], options: AttentionOptions) {
    let scale = options.scale as f32;
    match options.softcap {
        None => row.iter_mut().for_each(|s| *s *= scale),
        Some(cap) => {
            let (cap, inverse) = (cap as f32, (1.0 / cap) as f32);
            row.iter_mut().for_each(|s| *s = cap * Real::tanh(*s * scale * inverse));
        }
    }
}

/// Replaces scores by `e^(score - maximum)`. Returns their sum.
#[inline(always)]
pub(super) fn exponentiate(weights: &mut [f32]) -> f32 {
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
