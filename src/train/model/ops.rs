//! Differentiable pieces of the decoder.
//!
//! Invariant: nothing here goes through candle's `apply_op*_no_bwd` (its `softmax_last_dim`,
//! `rms_norm`, `rope`), which would cut the gradient without an error.

use candle_core::{D, Tensor};

use super::adapted::Frozen;
use super::{AttentionOptions, fused, kernel};

type Result<T> = candle_core::Result<T>;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, eq. 4).
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if kernel::runs_on(x) && x.is_contiguous() && weight.is_contiguous() {
        return x.apply_op2(weight, fused::RmsNorm { eps });
    }
    rms_norm_chain(x, weight, eps)
}

/// [`rms_norm`] as a chain of candle's operations.
pub(super) fn rms_norm_chain(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// `softmax` over the last dimension; the shift by the maximum carries no gradient.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Rotates the first `rotary_dim` values of every head of `x` `[batch, heads, len, head_dim]` by its
/// positions.
fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (width, rotary) = (x.dim(D::Minus1)?, cos.dim(D::Minus1)?);
    let half = rotary / 2;
    let first = x.narrow(D::Minus1, 0, half)?;
    let second = x.narrow(D::Minus1, half, half)?;
    let turned = x.narrow(D::Minus1, 0, rotary)?;
    let rotated = Tensor::cat(&[&second.neg()?, &first], D::Minus1)?;
    let turned = (turned.broadcast_mul(cos)? + rotated.broadcast_mul(sin)?)?;
    if rotary == width {
        return Ok(turned);
    }
    Tensor::cat(&[&turned, &x.narrow(D::Minus1, rotary, width - rotary)?], D::Minus1)
}

/// `x W^T + bias` for `x` `[n, in]` and `W` `[out, in]`.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let trained = weight.track_op() || bias.is_some_and(Tensor::track_op);
    if !trained && kernel::runs_on(x) {
        let op = Frozen { weight: weight.clone(), bias: bias.cloned(), scale: 0.0 };
        return x.apply_op1(op);
    }
    let y = x.matmul(&weight.t()?)?;
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

/// `x W^T + bias + scale (x A^T) B^T`, with A `[r, in]` and B `[out, r]`. `x_dropped` is what the
/// adapter sees in place of `x` where dropout is on.
pub(crate) fn adapted_linear(
    (x, x_dropped): (&Tensor, Option<&Tensor>),
    (weight, bias): (&Tensor, Option<&Tensor>),
    (a, b, scale): (&Tensor, &Tensor, f64),
) -> Result<Tensor> {
    let trained = weight.track_op() || bias.is_some_and(Tensor::track_op);
    if !trained && x_dropped.is_none() && kernel::runs_on(x) {
        let op = Frozen { weight: weight.clone(), bias: bias.cloned(), scale };
        return x.apply_op3(a, b, op);
    }
    let delta = x_dropped.unwrap_or(x).matmul(&a.t()?)?.matmul(&b.t()?)?;
    linear(x, weight, bias)? + (delta * scale)?
}

/// `silu(gate) * up`.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if kernel::runs_on(gate) && gate.is_contiguous() && up.is_contiguous() {
        return gate.apply_op2(up, fused::SwiGlu);
    }
    gate.silu()? * up
}

/// Softmax of `scale * x` over the keys that a causal query sees; `x` `[..., rows, keys]`, where row
/// i is the query at position `i % keys`.
pub fn causal_softmax(x: &Tensor, scale: f64) -> Result<Tensor> {
    if kernel::runs_on(x) && x.is_contiguous() {
        return x.apply_op1(fused::CausalSoftmax { scale });
    }
    masked_softmax(&(x * scale)?, None)
}

/// Soft cap (Gemma 2): `cap tanh(x / cap)`, within `±cap`.
pub fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    (x / cap)?.tanh()? * cap
}

/// Attention weights of unscaled scores `x` `[..., rows, keys]`, where row i is the query at
/// position `i % keys`.
pub fn attention_weights(x: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let AttentionOptions { scale, softcap: cap, window } = options;
    // A window that reaches back to the first position hides nothing.
    let window = window.filter(|window| x.dim(D::Minus1).is_ok_and(|keys| *window < keys));
    if cap.is_none() && window.is_none() {
        return causal_softmax(x, scale);
    }
    let scores = (x * scale)?;
    let scores = cap.map_or(Ok(scores.clone()), |cap| softcap(&scores, cap))?;
    masked_softmax(&scores, window)
}

/// Softmax over the keys that a causal query sees, within its window where there is one.
fn masked_softmax(x: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (rows, keys) = (x.dim(D::Minus2)?, x.dim(D::Minus1)?);
    let window = window.unwrap_or(keys);
    let seen = |query: usize, key: usize| key <= query && query < key + window;
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| {
            (0..keys).map(move |key| if seen(row % keys, key) { 0.0 } else { f32::NEG_INFINITY })
        })
        .collect();
    let mask = Tensor::from_vec(mask, (rows, keys), x.device())?.to_dtype(x.dtype())?;
    softmax(&x.broadcast_add(&mask)?)
}

/// How a matrix of rows is split into heads.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Sequences.
    pub batch: usize,
    /// Positions of each.
    pub len: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Heads {
    /// `[batch * len, heads * head_dim]` to `[batch, heads, len, head_dim]`, turned by position
    /// where `tables` (see [`rope_tables`](super::rope_tables)) are given.
    pub fn split(self, x: &Tensor, tables: Option<&(Tensor, Tensor)>) -> Result<Tensor> {
        let Self { batch, len, heads, head_dim } = self;
        if kernel::runs_on(x) && x.is_contiguous() {
            return x.apply_op1(self.fused(tables.cloned()));
        }
        let x = x.reshape((batch, len, heads, head_dim))?.transpose(1, 2)?.contiguous()?;
        tables.map_or(Ok(x.clone()), |(cos, sin)| rope(&x, cos, sin))
    }

    /// `[batch, heads, len, head_dim]` to `[batch * len, heads * head_dim]`.
    pub fn merge(self, x: &Tensor) -> Result<Tensor> {
        if kernel::runs_on(x) && x.is_contiguous() {
            return x.apply_op1(fused::MergeHeads(self.fused(None)));
        }
        x.transpose(1, 2)?.reshape((self.batch * self.len, self.heads * self.head_dim))
    }

    fn fused(self, tables: Option<(Tensor, Tensor)>) -> fused::SplitHeads {
        let Self { batch, len, heads, head_dim } = self;
        fused::SplitHeads { batch, len, heads, head_dim, tables }
    }
}
