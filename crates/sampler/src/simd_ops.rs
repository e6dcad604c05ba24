//! Loops over activations `[feature, width]` whose lanes are tokens, and between them and rows.

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_model::kernels::exp::exp_f32;
use hone_model::spec::Activation;

use crate::matmul::LANES;

/// `x / rms(x) * weight` of every lane.
pub(super) struct RmsNorm<'a> {
    pub out: &'a mut [f32],
    pub x: &'a [f32],
    pub width: usize,
    pub weight: &'a [f32],
    pub eps: f32,
}

impl SimdTask for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { out, x, width, weight, eps } = self;
        let inverse_len = 1.0 / weight.len() as f32;
        for lane in (0..width).step_by(LANES) {
            // Four sums, so that one need not wait for the other.
            let mut parts = [[0.0_f32; LANES]; 4];
            for (k, x) in x.chunks_exact(width).enumerate() {
                let x = &x[lane..lane + LANES];
                for (sum, x) in parts[k % 4].iter_mut().zip(x) {
                    *sum = mul_add::<FUSED>(*x, *x, *sum);
                }
            }
            let [a, b, c, d] = parts;
            let mut scale = [0.0_f32; LANES];
            for i in 0..LANES {
                let mean = ((a[i] + b[i]) + (c[i] + d[i])) * inverse_len;
                scale[i] = 1.0 / (mean + eps).sqrt();
            }
            let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
            for ((out, x), w) in rows.zip(weight) {
                let pairs = out[lane..lane + LANES].iter_mut().zip(&x[lane..lane + LANES]);
                for ((out, x), scale) in pairs.zip(scale) {
                    *out = x * scale * w;
                }
            }
        }
    }
}

/// `activation(gate) * up`.
pub(super) struct Gate<'a> {
    pub out: &'a mut [f32],
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub activation: Activation,
}

/// `1 - 2 / (e^2x + 1)`
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp_f32(x + x) + 1.0)
}

impl SimdTask for Gate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let all = self.out.iter_mut().zip(self.gate).zip(self.up);
        match self.activation {
            Activation::Silu => {
                all.for_each(|((out, g), u)| *out = g / (1.0 + exp_f32(-g)) * u);
            }
            Activation::GeluTanh => {
                const ROOT: f32 = 0.797_884_6; // sqrt(2 / pi)
                all.for_each(|((out, g), u)| {
                    *out = 0.5 * g * (1.0 + tanh(ROOT * g * (1.0 + 0.044_715 * g * g))) * u;
                });
            }
        }
    }
}

/// `cap tanh(x / cap)`
pub(super) struct Softcap<'a> {
    pub x: &'a mut [f32],
    pub cap: f32,
}

impl SimdTask for Softcap<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let inverse = 1.0 / self.cap;
        self.x.iter_mut().for_each(|x| *x = self.cap * tanh(*x * inverse));
    }
}

/// `x += y`
pub(super) struct AddTo<'a>(pub &'a mut [f32], pub &'a [f32]);

impl SimdTask for AddTo<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        self.0.iter_mut().zip(self.1).for_each(|(x, y)| *x += y);
    }
}

/// Lanes to rows: `out[row, first + feature] = x[feature, row]`, for as many rows as `out` has, each
/// `stride` values long.
pub(super) fn to_rows(out: &mut [f32], (first, stride): (usize, usize), x: &[f32], width: usize) {
    dispatch(ToRows { out, first, stride, x, width });
}

struct ToRows<'a> {
    out: &'a mut [f32],
    first: usize,
    stride: usize,
    x: &'a [f32],
    width: usize,
}

impl SimdTask for ToRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { out, first, stride, x, width } = self;
        // Tiles of 16 features, so that the lines that are read are used whole.
        for (tile, x) in x.chunks(LANES * width).enumerate() {
            let features = x.len() / width;
            for (lane, row) in out.chunks_exact_mut(stride).enumerate() {
                let row = &mut row[first + tile * LANES..][..features];
                for (value, x) in row.iter_mut().zip(x[lane..].iter().step_by(width)) {
                    *value = *x;
                }
            }
        }
    }
}

/// Rows to lanes: `out[feature, row] = x[row, feature]`; lanes without a row become 0.
pub(super) fn to_lanes(out: &mut [f32], width: usize, x: &[f32], features: usize) {
    dispatch(ToLanes { out, width, x, features });
}

struct ToLanes<'a> {
    out: &'a mut [f32],
    width: usize,
    x: &'a [f32],
    features: usize,
}

impl SimdTask for ToLanes<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { out, width, x, features } = self;
        let rows = x.len() / features.max(1);
        for (tile, out) in out.chunks_mut(LANES * width).enumerate() {
            for (lane, row) in x.chunks_exact(features).enumerate() {
                let row = row[tile * LANES..].iter();
                for (out, x) in out[lane..].iter_mut().step_by(width).zip(row) {
                    *out = *x;
                }
            }
            for out in out.chunks_exact_mut(width) {
                out[rows..].fill(0.0);
            }
        }
    }
}
