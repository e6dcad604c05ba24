//! Differentiable pieces of the decoder, as chains of candle's operations.
//!
//! Invariant: nothing here goes through candle's `apply_op*_no_bwd` (its `softmax_last_dim`,
//! `rms_norm`, `rope`), which would cut the gradient without an error.

use candle_core::{D, Tensor};

type Result<T> = candle_core::Result<T>;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, eq. 4).
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// Turns every head of x `[tokens, heads * head_dim]` by its token's angles: `tables` are cosines and
/// sines, each `[tokens, half]` (see [`crate::transformer::rope_tables`]); pairs are (i, i + half) as in
/// Hugging Face's layout, and values from `2 half` on stay.
pub(crate) fn rope(x: &Tensor, head_dim: usize, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let ((tokens, width), half) = (x.dims2()?, cos.dim(1)?);
    let heads = x.reshape((tokens, width / head_dim, head_dim))?;
    let (a, b) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let turned_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let still = heads.narrow(2, 2 * half, head_dim - 2 * half)?;
    Tensor::cat(&[&turned_a, &turned_b, &still], 2)?.reshape((tokens, width))
}

/// `x W^T + bias` for `x` `[n, in]` and `W` `[out, in]`, which may be of less precision.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.to_dtype(x.dtype())?.t()?)?;
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

/// Soft cap (Gemma 2): `cap tanh(x / cap)`, within `±cap`.
pub(crate) fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    (x / cap)?.tanh()? * cap
}

/// GELU with tanh (Hendrycks & Gimpel 2016). Candle's own has constants of six digits in its gradient.
pub(crate) fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let cubic = ((x.sqr()? * 0.044715)? + 1.0)?;
    let tanh = ((x * cubic)? * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
    (x * (tanh + 1.0)?)? * 0.5
}
