//! Row-wise operations of the decoder over plain slices, each in one pass, with their gradients
//! (CPU). Gradients replace what they are computed from.

use candle_core::Tensor;

use hone_core::simd::{SimdTask, dispatch};

use super::custom_op::with_values;
use super::float::Real;
use super::parallel;
use super::simd::dot;
use crate::spec::Activation;

type Result<T> = candle_core::Result<T>;

/// RMSNorm (Zhang & Sennrich 2019, eq. 4): `x s (weight + offset)` with
/// `s = 1 / sqrt(mean(x^2) + eps)`, over rows as wide as the weight.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a Tensor,
    pub offset: f64,
    pub eps: f64,
}

impl Norm<'_> {
    pub fn forward<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        let mut out = vec![T::of(0.0); x.len()];
        with_values([self.weight], "rms-norm", |[weight]| {
            let width = weight.len();
            parallel::rows(&mut out, width, |first, out| {
                let x = &x[first * width..];
                dispatch(NormLoop { x, weight, offset: self.offset, eps: self.eps, out });
            });
            Ok(())
        })?;
        Ok(out)
    }

    /// Turns the output's gradient g into that of x:
    /// `s (h - x s^2 mean(h x))` with `h = g (weight + offset)`.
    pub fn backward<T: Real>(&self, x: &[T], grad: &mut [T]) -> Result<()> {
        with_values([self.weight], "rms-norm", |[weight]| {
            let width = weight.len();
            parallel::rows(grad, width, |first, out| {
                let x = &x[first * width..];
                dispatch(NormGrad(NormLoop { x, weight, offset: self.offset, eps: self.eps, out }));
            });
            Ok(())
        })
    }
}

struct NormLoop<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    offset: f64,
    eps: f64,
    out: &'a mut [T],
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
fn inverse_rms<T: Real>(row: &[T], eps: f64) -> T {
    T::of(1.0) / (dot(row, row) / T::of(row.len() as f64) + T::of(eps)).sqrt()
}

impl<T: Real> SimdTask for NormLoop<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (width, offset) = (self.weight.len(), T::of(self.offset));
        for (out, row) in self.out.chunks_exact_mut(width).zip(self.x.chunks_exact(width)) {
            let scale = inverse_rms(row, self.eps);
            for ((out, x), w) in out.iter_mut().zip(row).zip(self.weight) {
                *out = *x * scale * (*w + offset);
            }
        }
    }
}

struct NormGrad<'a, T>(NormLoop<'a, T>);

impl<T: Real> SimdTask for NormGrad<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let NormLoop { x, weight, offset, eps, out } = self.0;
        let (width, offset) = (weight.len(), T::of(offset));
        for (out, row) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let scale = inverse_rms(row, eps);
            out.iter_mut().zip(weight).for_each(|(g, w)| *g *= *w + offset);
            let shrink = dot(out, row) * scale * scale / T::of(width as f64);
            for (out, x) in out.iter_mut().zip(row) {
                *out = scale * (*out - *x * shrink);
            }
        }
    }
}

/// Turns each pair (i, i + half) of the first `2 half` values of every head by its token's angle
/// (Su et al. 2021, in the half-split layout of Hugging Face), or, for gradients, back; values beyond
/// stay.
#[derive(Clone, Copy)]
pub(crate) struct Rope<'a> {
    pub head_dim: usize,
    /// Cosines and sines of every token, each `[tokens, half]`.
    pub tables: &'a (Tensor, Tensor),
}

impl Rope<'_> {
    /// Turns heads in rows of `width` values.
    pub fn apply<T: Real>(&self, x: &mut [T], width: usize, back: bool) -> Result<()> {
        let (head_dim, half) = (self.head_dim, self.tables.0.dim(1)?);
        with_values([&self.tables.0, &self.tables.1], "rope", |[cos, sin]| {
            parallel::rows(x, width, |first, x| {
                let (cos, sin) = (&cos[first * half..], &sin[first * half..]);
                dispatch(TurnLoop { x, width, head_dim, half, cos, sin, back });
            });
            Ok(())
        })
    }
}

struct TurnLoop<'a, T> {
    x: &'a mut [T],
    width: usize,
    head_dim: usize,
    half: usize,
    cos: &'a [T],
    sin: &'a [T],
    back: bool,
}

impl<T: Real> SimdTask for TurnLoop<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let half = self.half;
        let sign = if self.back { T::of(-1.0) } else { T::of(1.0) };
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

/// `activation(gate) * up` over rows of `width` values.
pub(crate) fn gated<T: Real>(activation: Activation, gate: &[T], up: &[T], width: usize) -> Vec<T> {
    let mut out = vec![T::of(0.0); gate.len()];
    parallel::rows(&mut out, width, |first, out| {
        let range = first * width..first * width + out.len();
        let (gate, up) = (&gate[range.clone()], &up[range]);
        dispatch(Gated { activation, gate, up, out });
    });
    out
}

/// Turns gate and up into their gradients, where that of [`gated`] is `grad`.
pub(crate) fn gated_backward<T: Real>(
    activation: Activation,
    gate: &mut [T],
    up: &mut [T],
    grad: &[T],
    width: usize,
) {
    parallel::rows_of_two(gate, up, width, |first, gate, up| {
        let grad = &grad[first * width..][..gate.len()];
        dispatch(GatedGrad { activation, gate, up, grad });
    });
}

/// The activation's value and slope.
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
    let slope = root * (one + T::of(3.0) * cubic * x * x);
    (half * x * (one + t), half * (one + t) + half * x * (one - t * t) * slope)
}

struct Gated<'a, T> {
    activation: Activation,
    gate: &'a [T],
    up: &'a [T],
    out: &'a mut [T],
}

impl<T: Real> SimdTask for Gated<'_, T> {
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

struct GatedGrad<'a, T> {
    activation: Activation,
    gate: &'a mut [T],
    up: &'a mut [T],
    grad: &'a [T],
}

impl<T: Real> SimdTask for GatedGrad<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let all = self.gate.iter_mut().zip(self.up).zip(self.grad);
        macro_rules! sweep {
            ($activation:ident) => {
                all.for_each(|((gate, up), grad)| {
                    let (value, slope) = $activation(*gate);
                    *gate = *grad * *up * slope;
                    *up = *grad * value;
                })
            };
        }
        match self.activation {
            Activation::Silu => sweep!(silu),
            Activation::GeluTanh => sweep!(gelu_tanh),
        }
    }
}

/// `sum += x` over rows of `width` values.
pub(crate) fn add<T: Real>(sum: &mut [T], x: &[T], width: usize) {
    parallel::rows(sum, width, |first, sum| {
        sum.iter_mut().zip(&x[first * width..]).for_each(|(sum, x)| *sum += *x);
    });
}

/// Adds a bias to every row.
pub(crate) fn add_bias<T: Real>(x: &mut [T], bias: &[T]) {
    parallel::rows(x, bias.len(), |_, x| {
        for row in x.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x += *bias);
        }
    });
}
