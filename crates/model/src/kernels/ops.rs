//! Operations of the decoder as candle graphs: differentiable, on any device.
//!
//! Invariant: nothing here uses candle's `apply_op*_no_bwd` (its `softmax_last_dim`, `rms_norm` and
//! `rope`), which would cut the gradient without an error.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, D, Layout, Result, Shape, Storage, Tensor};

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, eq. 4).
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// Rotates every head of x `[tokens, heads * head_dim]` by its token's angles (Su et al. 2021). The
/// tables are cosines and sines, each `[tokens, half]` (see [`crate::spec::RopeTables`]); pairs are
/// (i, i + half), the layout of Hugging Face. Values from `2 half` on are unchanged.
pub(crate) fn rope(x: &Tensor, head_dim: usize, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let ((tokens, width), half) = (x.dims2()?, cos.dim(1)?);
    let heads = x.reshape((tokens, width / head_dim, head_dim))?;
    let (a, b) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let rotated_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let rotated_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let mut parts = vec![rotated_a, rotated_b];
    // The backward pass of an empty part would allocate 0 bytes, which CUDA refuses.
    if 2 * half < head_dim {
        parts.push(heads.narrow(2, 2 * half, head_dim - 2 * half)?);
    }
    Tensor::cat(&parts, 2)?.reshape((tokens, width))
}

/// `x W^T + bias` for x `[n, in]` and W `[out, in]`, which may be of lower precision. The gradient of W is
/// computed only if W is trained.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let weight = weight.to_dtype(x.dtype())?;
    let y = if weight.track_op() {
        x.matmul(&weight.t()?)?
    } else {
        x.apply_op1(FrozenProduct { weight })?
    };
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

/// `x W^T` for a constant W. The backward pass of candle's product computes the gradients of both factors
/// and keeps them.
struct FrozenProduct {
    /// `[out, in]`, of the type of x.
    weight: Tensor,
}

impl FrozenProduct {
    fn multiply<S: BackendStorage>(
        &self,
        (x, x_layout): (&S, &Layout),
        (weight, layout): (&S, &Layout),
    ) -> Result<(S, Shape)> {
        let ((n, width), (out, columns)) = (x_layout.shape().dims2()?, layout.shape().dims2()?);
        if width != columns {
            candle_core::bail!("{}: width {width} of x, {columns} of the weight", self.name());
        }
        let y = x.matmul(weight, (1, n, out, width), x_layout, &layout.transpose(0, 1)?)?;
        Ok((y, Shape::from((n, out))))
    }
}

impl CustomOp1 for FrozenProduct {
    fn name(&self) -> &'static str {
        "frozen-product"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (storage, weight_layout) = self.weight.storage_and_layout();
        let Storage::Cpu(weight) = &*storage else {
            candle_core::bail!("{}: x is on the CPU, but not the weight", self.name());
        };
        self.multiply((x, layout), (weight, weight_layout))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (storage, weight_layout) = self.weight.storage_and_layout();
        let Storage::Cuda(weight) = &*storage else {
            candle_core::bail!("{}: x is on a CUDA device, but not the weight", self.name());
        };
        self.multiply((x, layout), (weight, weight_layout))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        grad.matmul(&self.weight).map(Some)
    }
}

/// Soft cap (Gemma 2): `cap tanh(x / cap)`, or x where there is none.
pub(crate) fn softcap(x: Tensor, cap: Option<f64>) -> Result<Tensor> {
    let Some(cap) = cap else { return Ok(x) };
    (x / cap)?.tanh()? * cap
}

/// GELU with tanh (Hendrycks & Gimpel 2016). candle's gradient of it has constants of six digits.
pub(crate) fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let cubic = ((x.sqr()? * 0.044715)? + 1.0)?;
    let tanh = ((x * cubic)? * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
    (x * (tanh + 1.0)?)? * 0.5
}
