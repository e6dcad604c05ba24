//! Row-wise operations of the decoder over plain slices and their gradients, each in one pass (CPU).
//! Backward functions replace values by gradients in place.

use candle_core::{Result, Tensor};

use hone_core::simd::{SimdTask, dispatch};
use hone_kernels::float::{Real, dot};
use hone_kernels::parallel;

use super::storage::with_values;
use crate::spec::{Activation, ModelSpec};

const NORM: &str = "rms-norm";

/// RMSNorm (Zhang & Sennrich 2019, eq. 4): `x s (weight + offset)` with
/// `s = 1 / sqrt(mean(x^2) + eps)`, over rows as wide as the weight.
#[derive(Clone, Copy)]
pub(crate) struct FusedRmsNorm<'a> {
    weight: &'a Tensor,
    offset: f64,
    eps: f64,
}

impl<'a> FusedRmsNorm<'a> {
    pub fn new(spec: &ModelSpec, weight: &'a Tensor) -> Self {
        Self { weight, offset: spec.norm_offset, eps: spec.rms_norm_eps }
    }

    pub fn forward<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        with_values([self.weight], NORM, |[weight]| {
            let width = weight.len();
            Ok(parallel::zeroed_rows(x.len(), width, |first, out| {
                let x = &x[first * width..];
                dispatch(RmsNormTask { norm: self, weight, x, out, backward: false });
            }))
        })
    }

    /// Replaces the output's gradient g by that of x:
    /// `s (h - x s^2 mean(h x))` with `h = g (weight + offset)`.
    pub fn backward<T: Real>(&self, x: &[T], grad: &mut [T]) -> Result<()> {
        with_values([self.weight], NORM, |[weight]| {
            let width = weight.len();
            parallel::rows(grad, width, |first, out| {
                let x = &x[first * width..];
                dispatch(RmsNormTask { norm: self, weight, x, out, backward: true });
            });
            Ok(())
        })
    }
}

struct RmsNormTask<'a, T> {
    norm: &'a FusedRmsNorm<'a>,
    weight: &'a [T],
    x: &'a [T],
    /// The output, or the gradient if `backward`.
    out: &'a mut [T],
    backward: bool,
}

impl<T: Real> SimdTask for RmsNormTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { norm, weight, x, out, backward } = self;
        let (width, offset, eps) = (weight.len(), T::of(norm.offset), T::of(norm.eps));
        for (out, row) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let scale = T::of(1.0) / (dot(row, row) / T::of(width as f64) + eps).sqrt();
            if !backward {
                for ((out, x), w) in out.iter_mut().zip(row).zip(weight) {
                    *out = *x * scale * (*w + offset);
                }
                continue;
            }
            out.iter_mut().zip(weight).for_each(|(g, w)| *g *= *w + offset);
            let shrink = dot(out, row) * scale * scale / T::of(width as f64);
            for (out, x) in out.iter_mut().zip(row) {
                *out = scale * (*out - *x * shrink);
            }
        }
    }
}

/// Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout: rotates each pair
/// (i, i + half) of the first `2 half` values of every head by its token's angle. The other values
/// are unchanged.
#[derive(Clone, Copy)]
pub(crate) struct RotaryEmbedding<'a> {
    pub head_dim: usize,
    /// Cosines and sines of every token, each `[tokens, half]`.
    pub tables: &'a (Tensor, Tensor),
}

impl RotaryEmbedding<'_> {
    /// Rotates the heads in rows of `width` values; `inverse` rotates back, which is the gradient.
    pub fn apply<T: Real>(&self, x: &mut [T], width: usize, inverse: bool) -> Result<()> {
        let (head_dim, half) = (self.head_dim, self.tables.0.dim(1)?);
        with_values([&self.tables.0, &self.tables.1], "rope", |[cos, sin]| {
            parallel::rows(x, width, |first, x| {
                let (cos, sin) = (&cos[first * half..], &sin[first * half..]);
                dispatch(RotaryTask { x, width, head_dim, half, cos, sin, inverse });
            });
            Ok(())
        })
    }
}

struct RotaryTask<'a, T> {
    x: &'a mut [T],
    width: usize,
    head_dim: usize,
    half: usize,
    cos: &'a [T],
    sin: &'a [T],
    inverse: bool,
}

impl<T: Real> SimdTask for RotaryTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let half = self.half;
        let sign = if self.inverse { T::of(-1.0) } else { T::of(1.0) };
        let tables = self.cos.chunks_exact(half).zip(self.sin.chunks_exact(half));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.width).zip(tables) {
            for head in row.chunks_exact_mut(self.head_dim) {
                let (a, rest) = head.split_at_mut(half);
                let b = &mut rest[..half];
                for j in 0..half {
                    let (x, y, s) = (a[j], b[j], sign * sin[j]);
                    a[j] = x * cos[j] - y * s;
                    b[j] = y * cos[j] + x * s;
                }
            }
        }
    }
}

/// `activation(gate) * up` over rows of `width` values (Shazeer 2020).
pub(crate) fn glu<T: Real>(activation: Activation, gate: &[T], up: &[T], width: usize) -> Vec<T> {
    parallel::zeroed_rows(gate.len(), width, |first, out| {
        let range = first * width..first * width + out.len();
        let (gate, up) = (&gate[range.clone()], &up[range]);
        dispatch(GluTask { activation, gate, up, out });
    })
}

/// Replaces gate and up by their gradients, where `grad` is the gradient of [`glu`].
pub(crate) fn glu_backward<T: Real>(
    activation: Activation,
    gate: &mut [T],
    up: &mut [T],
    grad: &[T],
    width: usize,
) {
    let mut rows: Vec<_> = gate.chunks_mut(width).zip(up.chunks_mut(width)).collect();
    parallel::rows(&mut rows, 1, |first, rows| {
        for ((gate, up), grad) in rows.iter_mut().zip(grad[first * width..].chunks(width)) {
            dispatch(GluGradTask { activation, gate, up, grad });
        }
    });
}

/// The activation's value and derivative.
#[inline(always)]
fn silu<T: Real>(x: T) -> (T, T) {
    let s = x.sigmoid();
    (x * s, s * (T::of(1.0) + x * (T::of(1.0) - s)))
}

/// As [`silu`], for [`Activation::GeluTanh`].
#[inline(always)]
fn gelu_tanh<T: Real>(x: T) -> (T, T) {
    let (one, half) = (T::of(1.0), T::of(0.5));
    let (root, cubic) = (T::of((2.0 / std::f64::consts::PI).sqrt()), T::of(0.044715));
    let t = (root * x * (one + cubic * x * x)).tanh();
    let inner = root * (one + T::of(3.0) * cubic * x * x);
    (half * x * (one + t), half * (one + t) + half * x * (one - t * t) * inner)
}

struct GluTask<'a, T> {
    activation: Activation,
    gate: &'a [T],
    up: &'a [T],
    out: &'a mut [T],
}

impl<T: Real> SimdTask for GluTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let all = self.out.iter_mut().zip(self.gate).zip(self.up);
        match self.activation {
            Activation::Silu => all.for_each(|((out, g), u)| *out = silu(*g).0 * *u),
            Activation::GeluTanh => all.for_each(|((out, g), u)| *out = gelu_tanh(*g).0 * *u),
        }
    }
}

struct GluGradTask<'a, T> {
    activation: Activation,
    gate: &'a mut [T],
    up: &'a mut [T],
    grad: &'a [T],
}

impl<T: Real> GluGradTask<'_, T> {
    #[inline(always)]
    fn with(self, activation: impl Fn(T) -> (T, T)) {
        for ((gate, up), grad) in self.gate.iter_mut().zip(self.up).zip(self.grad) {
            let (value, derivative) = activation(*gate);
            *gate = *grad * *up * derivative;
            *up = *grad * value;
        }
    }
}

impl<T: Real> SimdTask for GluGradTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.activation {
            Activation::Silu => self.with(silu),
            Activation::GeluTanh => self.with(gelu_tanh),
        }
    }
}

/// `sum += x` over rows of `width` values.
pub(crate) fn add<T: Real>(sum: &mut [T], x: &[T], width: usize) {
    parallel::rows(sum, width, |first, sum| {
        sum.iter_mut().zip(&x[first * width..]).for_each(|(sum, x)| *sum += *x);
    });
}

pub(crate) fn add_bias<T: Real>(x: &mut [T], bias: &[T]) {
    parallel::rows(x, bias.len(), |_, x| {
        for row in x.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x += *bias);
        }
    });
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use hone_core::testing::assert_same_bits;

    use super::*;
    use crate::testing::waves;

    /// Rows that fill whole vectors, and rows that do not.
    const WIDTHS: [usize; 4] = [6, 32, 48, 54];

    #[test]
    fn every_instruction_set_normalizes_to_the_same_bits() {
        let weight = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let norm = FusedRmsNorm { weight: &weight, offset: 1.0, eps: 1e-6 };
        for width in WIDTHS {
            let [x, grad, weight] = [0.2, 0.9, 1.7].map(|phase| waves(3 * width, phase));
            for backward in [false, true] {
                assert_same_bits(|instructions| {
                    let (weight, mut out) = (&weight[..width], grad.clone());
                    let (norm, x) = (&norm, &x[..]);
                    instructions.run(RmsNormTask { norm, weight, x, out: &mut out, backward });
                    out
                });
            }
        }
    }

    #[test]
    fn every_instruction_set_rotates_to_the_same_bits() {
        for width in WIDTHS {
            // Two heads; in some widths not all of their values are rotated.
            let (head_dim, half) = (width / 2, width / 4);
            let [x, cos, sin] = [0.2, 0.9, 1.7].map(|phase| waves(3 * width, phase));
            for inverse in [false, true] {
                assert_same_bits(|instructions| {
                    let mut x = x.clone();
                    let (cos, sin) = (&cos[..3 * half], &sin[..3 * half]);
                    let task = RotaryTask { x: &mut x, width, head_dim, half, cos, sin, inverse };
                    instructions.run(task);
                    x
                });
            }
        }
    }

    #[test]
    fn every_instruction_set_activates_to_the_same_bits() {
        for (n, activation) in
            WIDTHS.iter().flat_map(|n| [Activation::Silu, Activation::GeluTanh].map(|a| (*n, a)))
        {
            let [gate, up, grad] = [0.2, 0.9, 1.7].map(|phase| waves(n, phase));
            assert_same_bits(|instructions| {
                let mut out = vec![0.0; n];
                instructions.run(GluTask { activation, gate: &gate, up: &up, out: &mut out });
                let (mut gate, mut up) = (gate.clone(), up.clone());
                instructions.run(GluGradTask {
                    activation,
                    gate: &mut gate,
                    up: &mut up,
                    grad: &grad,
                });
                [out, gate, up].concat()
            });
        }
    }
}
