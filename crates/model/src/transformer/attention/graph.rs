//! Attention as a candle graph: for devices other than the CPU, and the reference in tests.

use candle_core::{D, Result, Tensor};

use crate::kernels::ops;
use crate::spec::{AttentionOptions, HeadLayout};
use crate::transformer::{Branch, Segments};

/// [`Attention`](super::Attention) from candle's operations; differentiable.
pub(crate) fn graph_attention(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    segments: &Segments,
    heads: HeadLayout,
    options: AttentionOptions,
) -> Result<Tensor> {
    let rows = |x: &Tensor, start, len, count| {
        x.narrow(0, start, len)?.reshape((len, count, heads.dim))?.transpose(0, 1)?.contiguous()
    };
    let repeated = |x: Tensor, len: usize| {
        let shared = heads.queries / heads.keys;
        x.unsqueeze(1)?.broadcast_as((heads.keys, shared, len, heads.dim))?.reshape((
            heads.queries,
            len,
            heads.dim,
        ))
    };
    let mut outputs = Vec::new();
    for branch in segments.branches() {
        let Branch { ref prefixes, position: before, start, len } = *branch;
        if len == 0 {
            continue;
        }
        let keys = |x: &Tensor| {
            let spans = prefixes.iter().copied().chain([(start, len)]);
            let parts: Result<Vec<_>> =
                spans.map(|(start, len)| rows(x, start, len, heads.keys)).collect();
            let all = Tensor::cat(&parts?, 1)?;
            repeated(all, before + len)
        };
        let q = rows(q, start, len, heads.queries)?;
        let scores = (q.matmul(&keys(k)?.t()?)? * options.scale)?;
        let scores = ops::softcap(scores, options.softcap)?;
        let masked = |row: usize, key: usize| {
            let position = before + row;
            key > position || options.window.is_some_and(|w| key + w <= position)
        };
        let mask: Vec<f32> = (0..len)
            .flat_map(|row| (0..before + len).map(move |key| (row, key)))
            .map(|(row, key)| if masked(row, key) { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let mask = Tensor::from_vec(mask, (len, before + len), q.device())?;
        let scores = scores.broadcast_add(&mask.to_dtype(q.dtype())?)?;
        let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let weights = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
        let out = weights.matmul(&keys(v)?)?.transpose(0, 1)?;
        outputs.push(out.reshape((len, heads.queries * heads.dim))?);
    }
    Tensor::cat(&outputs, 0)
}
