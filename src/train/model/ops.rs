//! Differentiable pieces of the decoder.
//!
//! Invariant: nothing here goes through candle's `apply_op*_no_bwd` (its `softmax_last_dim`,
//! `rms_norm`, `rope`), which would cut the gradient without an error.

use candle_core::{D, Tensor};

use super::adapted::Frozen;
use super::{fused, kernel};

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

/// Turns every head of x `[tokens, heads * head_dim]` by its token's angles: `tables` are cosines and
/// sines, each `[tokens, half]` (see [`super::rope_tables`]); pairs are (i, i + half) as in
/// Hugging Face's layout, and values from `2 half` on stay.
pub fn rope(x: &Tensor, head_dim: usize, tables: &(Tensor, Tensor)) -> Result<Tensor> {
    if kernel::runs_on(x) && x.is_contiguous() {
        return x.apply_op1(fused::Rope { head_dim, tables: tables.clone() });
    }
    rope_chain(x, head_dim, tables)
}

/// [`rope`] as a chain of candle's operations.
pub(super) fn rope_chain(
    x: &Tensor,
    head_dim: usize,
    (cos, sin): &(Tensor, Tensor),
) -> Result<Tensor> {
    let ((tokens, width), half) = (x.dims2()?, cos.dim(1)?);
    let heads = x.reshape((tokens, width / head_dim, head_dim))?;
    let (a, b) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let turned_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let still = heads.narrow(2, 2 * half, head_dim - 2 * half)?;
    Tensor::cat(&[&turned_a, &turned_b, &still], 2)?.reshape((tokens, width))
}

/// `x W^T + bias` for `x` `[n, in]` and `W` `[out, in]`.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let trained = weight.track_op() || bias.is_some_and(Tensor::track_op);
    if !trained && kernel::runs_on(x) && weight.is_contiguous() {
        return x.contiguous()?.apply_op1(Frozen::new(weight, bias, 0.0));
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
    if !trained && x_dropped.is_none() && kernel::runs_on(x) && weight.is_contiguous() {
        return x.contiguous()?.apply_op3(a, b, Frozen::new(weight, bias, scale));
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

/// Soft cap (Gemma 2): `cap tanh(x / cap)`, within `±cap`.
pub fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    (x / cap)?.tanh()? * cap
}
