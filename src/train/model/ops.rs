//! Differentiable pieces of the decoder.
//!
//! Invariant: nothing here goes through candle's `apply_op*_no_bwd` (its `softmax_last_dim`,
//! `rms_norm`, `rope`), which would cut the gradient without an error.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Shape, Tensor};

type Result<T> = candle_core::Result<T>;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, eq. 4).
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// `ln softmax` over the last dimension; the shift by the maximum carries no gradient.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

/// `softmax` over the last dimension; the shift by the maximum carries no gradient.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Cosines and sines of the rotary embedding, each `[len, head_dim]`, halves repeated
/// (Su et al. 2021, in the half-split layout of Hugging Face). Angles are rounded to f32 as
/// transformers and mistral.rs compute them.
pub fn rope_tables(
    len: usize,
    head_dim: usize,
    theta: f64,
    dtype: DType,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let half = head_dim / 2;
    let mut cos = Vec::with_capacity(len * head_dim);
    let mut sin = Vec::with_capacity(len * head_dim);
    for position in 0..len {
        for i in 0..head_dim {
            let exponent = (2 * (i % half)) as f64 / head_dim as f64;
            let frequency = theta.powf(-exponent) as f32;
            let angle = f64::from(position as f32 * frequency);
            cos.push(angle.cos());
            sin.push(angle.sin());
        }
    }
    let shape = (len, head_dim);
    Ok((
        Tensor::from_vec(cos, shape, device)?.to_dtype(dtype)?,
        Tensor::from_vec(sin, shape, device)?.to_dtype(dtype)?,
    ))
}

/// Rotates `x` `[batch, heads, len, head_dim]` by its positions.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let first = x.narrow(D::Minus1, 0, half)?;
    let second = x.narrow(D::Minus1, half, half)?;
    let rotated = Tensor::cat(&[&second.neg()?, &first], D::Minus1)?;
    x.broadcast_mul(cos)? + rotated.broadcast_mul(sin)?
}

/// `x W^T` for `x` `[n, in]` and `W` `[out, in]`. A weight that is not trainable gets no gradient
/// computed, which candle's own product would do and throw away.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if weight.track_op() || !x.track_op() || !x.device().is_cpu() {
        return x.matmul(&weight.t()?);
    }
    x.apply_op1(FrozenProduct { weight: weight.clone() })
}

/// `x W^T` with a constant `W` `[out, in]`: the gradient of `x` is `g W`, and that is all.
struct FrozenProduct {
    weight: Tensor,
}

impl CustomOp1 for FrozenProduct {
    fn name(&self) -> &'static str {
        "frozen-product"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (n, inner) = layout.shape().dims2()?;
        let (guard, weight_layout) = self.weight.storage_and_layout();
        let candle_core::Storage::Cpu(weight) = &*guard else {
            candle_core::bail!("frozen-product: the weight is not on the CPU");
        };
        let (out, weight_inner) = weight_layout.shape().dims2()?;
        if inner != weight_inner {
            candle_core::bail!("frozen-product: {inner} columns meet {weight_inner}");
        }
        let transposed = weight_layout.transpose(0, 1)?;
        let product = storage.matmul(weight, (1, n, out, inner), layout, &transposed)?;
        Ok((product, Shape::from((n, out))))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(grad.contiguous()?.matmul(&self.weight)?))
    }
}
