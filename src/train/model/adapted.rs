//! A frozen linear layer and its adapter as one operation (CPU).

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Shape, Storage, Tensor, WithDType};

use super::real::Real;

type Result<T> = candle_core::Result<T>;

/// `x W^T + bias` for a constant `W` `[out, in]`; with an adapter,
/// `+ scale (x A^T) B^T`. Only what is trained gets a gradient computed, which candle's own product
/// would do for `W` too and throw away.
#[derive(Clone)]
pub(super) struct Frozen {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    /// `alpha / r`
    pub scale: f64,
}

/// The storage of a CPU tensor, for the time of a call.
fn with_cpu<R>(tensor: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    let (guard, layout) = tensor.storage_and_layout();
    match &*guard {
        Storage::Cpu(storage) => f(storage, layout),
        _ => candle_core::bail!("linear: a weight is not on the CPU"),
    }
}

/// `x W^T`
fn product(
    x: (&CpuStorage, &Layout),
    weight: (&CpuStorage, &Layout),
) -> Result<(CpuStorage, usize, usize)> {
    let (n, inner) = x.1.shape().dims2()?;
    let (out, weight_inner) = weight.1.shape().dims2()?;
    if inner != weight_inner {
        candle_core::bail!("linear: {inner} columns meet {weight_inner}");
    }
    let transposed = weight.1.transpose(0, 1)?;
    Ok((x.0.matmul(weight.0, (1, n, out, inner), x.1, &transposed)?, n, out))
}

/// `y + scale * delta + bias`, row by row.
fn combine<T: Real>(
    y: CpuStorage,
    delta: Option<(&CpuStorage, f64)>,
    bias: Option<&[T]>,
    out: usize,
) -> Result<CpuStorage> {
    let mut y = T::cpu_storage_data(y)?;
    if let Some((delta, scale)) = delta {
        let scale = T::of(scale);
        for (y, d) in y.iter_mut().zip(T::cpu_storage_as_slice(delta)?) {
            *y = *y + scale * *d;
        }
    }
    if let Some(bias) = bias {
        for row in y.chunks_exact_mut(out) {
            for (y, b) in row.iter_mut().zip(bias) {
                *y = *y + *b;
            }
        }
    }
    Ok(T::to_cpu_storage_owned(y))
}

impl Frozen {
    fn finish(
        &self,
        y: CpuStorage,
        delta: Option<(&CpuStorage, f64)>,
        out: usize,
    ) -> Result<CpuStorage> {
        fn typed<T: Real + WithDType>(
            frozen: &Frozen,
            y: CpuStorage,
            delta: Option<(&CpuStorage, f64)>,
            out: usize,
        ) -> Result<CpuStorage> {
            let Some(bias) = &frozen.bias else { return combine::<T>(y, delta, None, out) };
            with_cpu(bias, |storage, layout| match layout.contiguous_offsets() {
                Some((start, end)) => {
                    let bias = &T::cpu_storage_as_slice(storage)?[start..end];
                    combine(y, delta, Some(bias), out)
                }
                None => candle_core::bail!("linear: the bias is not contiguous"),
            })
        }
        match &y {
            CpuStorage::F64(_) => typed::<f64>(self, y, delta, out),
            _ => typed::<f32>(self, y, delta, out),
        }
    }
}

impl CustomOp1 for Frozen {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (y, n, out) =
            with_cpu(&self.weight, |w, w_layout| product((storage, layout), (w, w_layout)))?;
        Ok((self.finish(y, None, out)?, Shape::from((n, out))))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(grad.contiguous()?.matmul(&self.weight)?))
    }
}

/// Inputs: x `[n, in]`, A `[r, in]`, B `[out, r]`.
impl CustomOp3 for Frozen {
    fn name(&self) -> &'static str {
        "adapted-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (y, n, out) =
            with_cpu(&self.weight, |w, w_layout| product((x, x_layout), (w, w_layout)))?;
        let (down, _, r) = product((x, x_layout), (a, a_layout))?;
        let down_layout = Layout::contiguous((n, r));
        let (delta, _, _) = product((&down, &down_layout), (b, b_layout))?;
        Ok((self.finish(y, Some((&delta, self.scale)), out)?, Shape::from((n, out))))
    }

    /// `dx = g W + s (g B) A`, `dA = s (g B)^T x`, `dB = s g^T (x A^T)`
    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (x_value, a, b) = (x.detach(), a.detach(), b.detach());
        let up = (grad.matmul(&b)? * self.scale)?;
        let da = up.t()?.matmul(&x_value)?;
        let db = (grad.t()?.matmul(&x_value.matmul(&a.t()?)?)? * self.scale)?;
        let dx =
            if x.track_op() { Some((grad.matmul(&self.weight)? + up.matmul(&a)?)?) } else { None };
        Ok((dx, Some(da), Some(db)))
    }
}
