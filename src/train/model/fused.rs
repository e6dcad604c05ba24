//! Operations of the decoder in one pass each over memory, with their gradients (CPU).
//!
//! Each equals a chain of candle's operations, which [`super::ops`] uses elsewhere; the tests hold
//! both equal and check the gradients by finite differences. On small models most of a step is
//! memory traffic between such chains.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Tensor};

use super::kernel::{Kernel, Plain, launch};
use super::real::Real;

type Result<T> = candle_core::Result<T>;

fn width(shape: &Shape) -> usize {
    shape.dims().last().copied().unwrap_or(1).max(1)
}

fn same(inputs: &[&Shape]) -> Result<Shape> {
    Ok(inputs[0].clone())
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
fn inverse_rms<T: Real>(row: &[T], eps: f64) -> T {
    let sum = row.iter().fold(T::of(0.0), |sum, x| sum + *x * *x);
    T::of(1.0) / (sum / T::of(row.len() as f64) + T::of(eps)).sqrt()
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

    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T> {
        let (x, weight) = (inputs[0], inputs[1]);
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(width(shapes[0])) {
            let scale = inverse_rms(row, self.eps);
            out.extend(row.iter().zip(weight).map(|(x, w)| *x * scale * *w));
        }
        out
    }
}

/// `dx = s (g w - x s^2 mean(g w x))` with `s = 1 / rms(x)`; inputs x, weight, g.
struct RmsNormGrad(RmsNorm);

impl Kernel for RmsNormGrad {
    const NAME: &'static str = "rms-norm-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T> {
        let (x, weight, grad) = (inputs[0], inputs[1], inputs[2]);
        let width = width(shapes[0]);
        let mut out = Vec::with_capacity(x.len());
        for (row, grad) in x.chunks_exact(width).zip(grad.chunks_exact(width)) {
            let scale = inverse_rms(row, self.0.eps);
            let terms = row.iter().zip(weight).zip(grad);
            let dot = terms.clone().fold(T::of(0.0), |sum, ((x, w), g)| sum + *x * *w * *g);
            let shrink = dot * scale * scale / T::of(width as f64);
            out.extend(terms.map(|((x, w), g)| scale * (*g * *w - *x * shrink)));
        }
        out
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

fn sigmoid<T: Real>(x: T) -> T {
    T::of(1.0) / (T::of(1.0) + (T::of(0.0) - x).exp())
}

/// `silu(gate) * up`.
#[derive(Clone, Copy)]
pub(super) struct SwiGlu;

impl Kernel for SwiGlu {
    const NAME: &'static str = "swiglu";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    fn run<T: Real>(&self, inputs: &[&[T]], _shapes: &[&Shape]) -> Vec<T> {
        inputs[0].iter().zip(inputs[1]).map(|(g, u)| *g * sigmoid(*g) * *u).collect()
    }
}

/// Gradients of gate and up side by side, `[2, ...]`; inputs gate, up, gradient.
struct SwiGluGrad;

impl Kernel for SwiGluGrad {
    const NAME: &'static str = "swiglu-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(Shape::from([&[2], inputs[0].dims()].concat()))
    }

    fn run<T: Real>(&self, inputs: &[&[T]], _shapes: &[&Shape]) -> Vec<T> {
        let (gate, up, grad) = (inputs[0], inputs[1], inputs[2]);
        let mut out = vec![T::of(0.0); 2 * gate.len()];
        let (d_gate, d_up) = out.split_at_mut(gate.len());
        for i in 0..gate.len() {
            let (g, s) = (gate[i], sigmoid(gate[i]));
            d_gate[i] = grad[i] * up[i] * s * (T::of(1.0) + g * (T::of(1.0) - s));
            d_up[i] = grad[i] * g * s;
        }
        out
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
        let grad = grad.contiguous()?;
        let both = gate.detach().apply_op3_no_bwd(&up.detach(), &grad, &Plain(SwiGluGrad))?;
        Ok((Some(both.get(0)?), Some(both.get(1)?)))
    }
}

/// Softmax of `scale * x` over the keys that a causal query sees: `x` `[..., rows, keys]`, where
/// row i is the query at position `i % keys`. Keys after it get 0.
#[derive(Clone, Copy)]
pub(super) struct CausalSoftmax {
    pub scale: f64,
}

impl Kernel for CausalSoftmax {
    const NAME: &'static str = "causal-softmax";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T> {
        let keys = width(shapes[0]);
        let scale = T::of(self.scale);
        let mut out = vec![T::of(0.0); inputs[0].len()];
        for (i, (row, out)) in
            inputs[0].chunks_exact(keys).zip(out.chunks_exact_mut(keys)).enumerate()
        {
            let seen = i % keys + 1;
            let (row, out) = (&row[..seen], &mut out[..seen]);
            let max = row.iter().fold(row[0], |max, x| if *x > max { *x } else { max });
            let mut sum = T::of(0.0);
            for (x, y) in row.iter().zip(out.iter_mut()) {
                *y = ((*x - max) * scale).exp();
                sum += *y;
            }
            let inverse = T::of(1.0) / sum;
            out.iter_mut().for_each(|y| *y *= inverse);
        }
        out
    }
}

/// `dx = scale p (g - sum(g p))`; inputs p, g. Where p is 0 so is the gradient.
struct CausalSoftmaxGrad(CausalSoftmax);

impl Kernel for CausalSoftmaxGrad {
    const NAME: &'static str = "causal-softmax-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        same(inputs)
    }

    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T> {
        let keys = width(shapes[0]);
        let scale = T::of(self.0.scale);
        let mut out = Vec::with_capacity(inputs[0].len());
        for (p, grad) in inputs[0].chunks_exact(keys).zip(inputs[1].chunks_exact(keys)) {
            let dot = p.iter().zip(grad).fold(T::of(0.0), |sum, (p, g)| sum + *p * *g);
            out.extend(p.iter().zip(grad).map(|(p, g)| scale * *p * (*g - dot)));
        }
        out
    }
}

impl CustomOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        launch(self, &[(storage, layout)])
    }

    fn bwd(&self, _arg: &Tensor, res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let op = Plain(CausalSoftmaxGrad(*self));
        Ok(Some(res.detach().apply_op2_no_bwd(&grad.contiguous()?, &op)?))
    }
}

/// Splits `[batch * len, heads * head_dim]` into heads, `[batch, heads, len, head_dim]`, and turns
/// each pair (i, i + rotary_dim / 2) of a head's first `rotary_dim` values by its position's angle.
#[derive(Clone)]
pub(super) struct SplitHeads {
    pub batch: usize,
    pub len: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// `[len, rotary_dim]` cosines and sines; `None` leaves values as they are.
    pub tables: Option<(Tensor, Tensor)>,
}

/// The way there, or, for gradients, the way back: the transposed map, which turns by the
/// opposite angle. Inputs: values, cosines, sines.
struct MoveHeads {
    split: SplitHeads,
    back: bool,
}

impl Kernel for MoveHeads {
    const NAME: &'static str = "split-heads";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let SplitHeads { batch, len, heads, head_dim, .. } = self.split;
        if inputs[0].elem_count() != batch * len * heads * head_dim {
            candle_core::bail!("split-heads: {:?} does not split", inputs[0]);
        }
        Ok(if self.back {
            Shape::from((batch * len, heads * head_dim))
        } else {
            Shape::from((batch, heads, len, head_dim))
        })
    }

    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T> {
        let SplitHeads { batch, len, heads, head_dim, .. } = self.split;
        let rotary = shapes.get(1).map_or(0, |tables| width(tables));
        let half = rotary / 2;
        let mut out = vec![T::of(0.0); inputs[0].len()];
        for b in 0..batch {
            for t in 0..len {
                for h in 0..heads {
                    let flat = ((b * len + t) * heads + h) * head_dim;
                    let split = ((b * heads + h) * len + t) * head_dim;
                    let (from, to) = if self.back { (split, flat) } else { (flat, split) };
                    let x = &inputs[0][from..from + head_dim];
                    let y = &mut out[to..to + head_dim];
                    if inputs.len() < 3 {
                        y.copy_from_slice(x);
                        continue;
                    }
                    let (cos, sin) = (&inputs[1][t * rotary..], &inputs[2][t * rotary..]);
                    for i in 0..half {
                        let s = if self.back { T::of(0.0) - sin[i] } else { sin[i] };
                        y[i] = x[i] * cos[i] - x[i + half] * s;
                        y[i + half] = x[i + half] * cos[i] + x[i] * s;
                    }
                    y[rotary..].copy_from_slice(&x[rotary..]);
                }
            }
        }
        out
    }
}

impl SplitHeads {
    fn moved(&self, x: &Tensor, back: bool) -> Result<Tensor> {
        let op = Plain(MoveHeads { split: self.clone(), back });
        let x = x.detach().contiguous()?;
        match &self.tables {
            Some((cos, sin)) => x.apply_op3_no_bwd(cos, sin, &op),
            None => x.apply_op1_no_bwd(&op),
        }
    }
}

impl CustomOp1 for SplitHeads {
    fn name(&self) -> &'static str {
        MoveHeads::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let kernel = MoveHeads { split: self.clone(), back: false };
        let Some((cos, sin)) = &self.tables else {
            return launch(&kernel, &[(storage, layout)]);
        };
        let ((cos, cos_layout), (sin, sin_layout)) =
            (cos.storage_and_layout(), sin.storage_and_layout());
        match (&*cos, &*sin) {
            (candle_core::Storage::Cpu(cos), candle_core::Storage::Cpu(sin)) => {
                launch(&kernel, &[(storage, layout), (cos, cos_layout), (sin, sin_layout)])
            }
            _ => candle_core::bail!("split-heads: the tables are not on the CPU"),
        }
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.moved(grad, true)?))
    }
}

/// The inverse of [`SplitHeads`] without turning.
#[derive(Clone)]
pub(super) struct MergeHeads(pub SplitHeads);

impl CustomOp1 for MergeHeads {
    fn name(&self) -> &'static str {
        "merge-heads"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let split = SplitHeads { tables: None, ..self.0.clone() };
        launch(&MoveHeads { split, back: true }, &[(storage, layout)])
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let split = SplitHeads { tables: None, ..self.0.clone() };
        Ok(Some(split.moved(grad, false)?))
    }
}
