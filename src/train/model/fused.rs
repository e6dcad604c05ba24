//! Operations of the decoder in one pass each over memory, with their gradients (CPU).
//!
//! Each equals a chain of candle's operations, which [`super::ops`] uses elsewhere; the tests hold
//! both equal and check the gradients by finite differences. On small models most of a step is
//! memory traffic between such chains.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Storage, Tensor};

use super::kernel::{Kernel, Plain, launch};
use super::real::Real;
use super::simd::dot;

type Result<T> = candle_core::Result<T>;

fn same(inputs: &[&Shape]) -> Result<Shape> {
    Ok(inputs[0].clone())
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
fn inverse_rms<T: Real>(row: &[T], eps: f64) -> T {
    T::of(1.0) / (dot(row, row) / T::of(row.len() as f64) + T::of(eps)).sqrt()
}

/// `x / rms(x) * weight` over rows.
#[derive(Clone, Copy)]
pub(super) struct RmsNorm {
    pub eps: f64,
}

impl Kernel for RmsNorm {
    const NAME: &'static str = "rms-norm";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        let (x, weight) = (&inputs[0][first * width..], inputs[1]);
        for (out, row) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let scale = inverse_rms(row, self.eps);
            for ((out, x), w) in out.iter_mut().zip(row).zip(weight) {
                *out = *x * scale * *w;
            }
        }
    }
}

/// `dx = s (g w - x s^2 mean(g w x))` with `s = 1 / rms(x)`; inputs x, weight, g.
struct RmsNormGrad(RmsNorm);

impl Kernel for RmsNormGrad {
    const NAME: &'static str = "rms-norm-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        let (x, weight) = (&inputs[0][first * width..], inputs[1]);
        let rows = x.chunks_exact(width).zip(inputs[2][first * width..].chunks_exact(width));
        for (out, (row, grad)) in out.chunks_exact_mut(width).zip(rows) {
            let scale = inverse_rms(row, self.0.eps);
            for ((out, g), w) in out.iter_mut().zip(grad).zip(weight) {
                *out = *g * *w;
            }
            let shrink = dot(out, row) * scale * scale / T::of(width as f64);
            for (out, x) in out.iter_mut().zip(row) {
                *out = scale * (*out - *x * shrink);
            }
        }
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        launch(self, &[(s1, l1), (s2, l2)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (x, weight_value, grad) = (x.detach(), weight.detach(), grad.contiguous()?);
        let dx = x.apply_op3_no_bwd(&weight_value, &grad, &Plain(RmsNormGrad(*self)))?;
        let dw = if weight.track_op() {
            let normed = x.apply_op2_no_bwd(&weight_value.ones_like()?, &Plain(*self))?;
            Some((normed * grad)?.sum(0)?)
        } else {
            None
        };
        Ok((Some(dx), dw))
    }
}

/// `silu(gate) * up`.
#[derive(Clone, Copy)]
pub(super) struct SwiGlu;

impl Kernel for SwiGlu {
    const NAME: &'static str = "swiglu";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        let (gate, up) = (&inputs[0][first * width..], &inputs[1][first * width..]);
        for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
            *out = *g * g.sigmoid() * *u;
        }
    }
}

/// The gradient of the gate or of the other factor; inputs gate, up, gradient.
struct SwiGluGrad {
    gate: bool,
}

impl Kernel for SwiGluGrad {
    const NAME: &'static str = "swiglu-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        let [gate, up, grad] = [0, 1, 2].map(|i| &inputs[i][first * width..]);
        if self.gate {
            for (((out, g), u), grad) in out.iter_mut().zip(gate).zip(up).zip(grad) {
                let s = g.sigmoid();
                *out = *grad * *u * s * (T::of(1.0) + *g * (T::of(1.0) - s));
            }
        } else {
            for ((out, g), grad) in out.iter_mut().zip(gate).zip(grad) {
                *out = *grad * *g * g.sigmoid();
            }
        }
    }
}

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        launch(self, &[(s1, l1), (s2, l2)])
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (gate, up, grad) = (gate.detach(), up.detach(), grad.contiguous()?);
        let d_gate = gate.apply_op3_no_bwd(&up, &grad, &Plain(SwiGluGrad { gate: true }))?;
        let d_up = gate.apply_op3_no_bwd(&up, &grad, &Plain(SwiGluGrad { gate: false }))?;
        Ok((Some(d_gate), Some(d_up)))
    }
}

/// Turns each pair (i, i + half) of the first `2 half` values of every head by its token's angle
/// (Su et al. 2021, in the half-split layout of Hugging Face); values beyond stay. Rows hold
/// `heads` of `head_dim` values.
#[derive(Clone)]
pub(super) struct Rope {
    pub head_dim: usize,
    /// Cosines and sines of every token, each `[tokens, half]`.
    pub tables: (Tensor, Tensor),
}

/// The way there, or, for gradients, the way back. Inputs: values, cosines, sines.
struct Turn {
    head_dim: usize,
    half: usize,
    back: bool,
}

impl Kernel for Turn {
    const NAME: &'static str = "rope";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (tokens, width) = inputs[0].dims2()?;
        let fits = width.is_multiple_of(self.head_dim) && 2 * self.half <= self.head_dim;
        if !fits || inputs[1].dims() != [tokens, self.half] || inputs[2] != inputs[1] {
            candle_core::bail!("rope: {:?} does not fit {:?}", inputs[0], inputs[1]);
        }
        same(inputs)
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        let half = self.half;
        let sign = if self.back { T::of(-1.0) } else { T::of(1.0) };
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let token = first + i;
            let cos = &inputs[1][token * half..][..half];
            let sin = &inputs[2][token * half..][..half];
            let x = &inputs[0][token * width..][..width];
            let heads = x.chunks_exact(self.head_dim).zip(out.chunks_exact_mut(self.head_dim));
            for (x, y) in heads {
                let (a, rest) = x.split_at(half);
                let (b, still) = rest.split_at(half);
                let (y_a, y_rest) = y.split_at_mut(half);
                let (y_b, y_still) = y_rest.split_at_mut(half);
                for j in 0..half {
                    let s = sign * sin[j];
                    y_a[j] = a[j] * cos[j] - b[j] * s;
                    y_b[j] = b[j] * cos[j] + a[j] * s;
                }
                y_still.copy_from_slice(still);
            }
        }
    }
}

impl Rope {
    fn turn(&self, back: bool) -> Result<Turn> {
        Ok(Turn { head_dim: self.head_dim, half: self.tables.0.dim(1)?, back })
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        Turn::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (cos, cos_layout) = self.tables.0.storage_and_layout();
        let (sin, sin_layout) = self.tables.1.storage_and_layout();
        match (&*cos, &*sin) {
            (Storage::Cpu(cos), Storage::Cpu(sin)) => launch(
                &self.turn(false)?,
                &[(storage, layout), (cos, cos_layout), (sin, sin_layout)],
            ),
            _ => candle_core::bail!("rope: the tables are not on the CPU"),
        }
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.detach().contiguous()?;
        let (cos, sin) = &self.tables;
        Ok(Some(grad.apply_op3_no_bwd(cos, sin, &Plain(self.turn(true)?))?))
    }
}
