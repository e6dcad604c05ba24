//! The same from candle's own operations: what runs on other devices, and what tests compare with.

use candle_core::{D, Tensor};

use super::super::segments::Segments;
use super::Heads;
use crate::spec::AttentionOptions;

type Result<T> = candle_core::Result<T>;

/// [`super::Attention`] as a chain of candle's operations; differentiable.
///
/// # Errors
/// If shapes do not fit.
pub(crate) fn chain(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    segments: &Segments,
    heads: Heads,
    options: AttentionOptions,
) -> Result<Tensor> {
    let rows = |x: &Tensor, start, len, count| {
        x.narrow(0, start, len)?.reshape((len, count, heads.dim))?.transpose(0, 1)?.contiguous()
    };
    let repeated = |x: Tensor, len: usize| {
        let group = heads.queries / heads.keys;
        x.unsqueeze(1)?.broadcast_as((heads.keys, group, len, heads.dim))?.reshape((
            heads.queries,
            len,
            heads.dim,
        ))
    };
    let mut outputs = Vec::new();
    for family in segments.families() {
        let own = (family.start, family.prefix);
        for (branch, (start, len)) in std::iter::once(&own).chain(&family.branches).enumerate() {
            if *len == 0 {
                continue;
            }
            let before = if branch == 0 { 0 } else { family.prefix };
            let keys = |x: &Tensor| {
                let own = rows(x, *start, *len, heads.keys)?;
                let all = if before == 0 {
                    own
                } else {
                    Tensor::cat(&[&rows(x, family.start, before, heads.keys)?, &own], 1)?
                };
                repeated(all, before + len)
            };
            let q = rows(q, *start, *len, heads.queries)?;
            let mut scores = (q.matmul(&keys(k)?.t()?)? * options.scale)?;
            if let Some(cap) = options.softcap {
                scores = ((scores / cap)?.tanh()? * cap)?;
            }
            let hidden = |row: usize, key: usize| {
                let position = before + row;
                key > position || options.window.is_some_and(|w| key + w <= position)
            };
            let mask: Vec<f32> = (0..*len)
                .flat_map(|row| (0..before + len).map(move |key| (row, key)))
                .map(|(row, key)| if hidden(row, key) { f32::NEG_INFINITY } else { 0.0 })
                .collect();
            let mask = Tensor::from_vec(mask, (*len, before + len), q.device())?;
            let scores = scores.broadcast_add(&mask.to_dtype(q.dtype())?)?;
            let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let weights = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
            let mixed = weights.matmul(&keys(v)?)?.transpose(0, 1)?;
            outputs.push(mixed.reshape((*len, heads.queries * heads.dim))?);
        }
    }
    Tensor::cat(&outputs, 0)
}
