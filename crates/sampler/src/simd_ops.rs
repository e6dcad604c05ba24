//! Vectorized loops over activations `[feature, width]`, whose columns are tokens.

use hone_core::simd::{SimdTask, mul_add};
use hone_kernels::columns::COLUMN_BLOCK;
use hone_kernels::float::Real;
use hone_kernels::vector::{exp_f32, magnitude_bits, nearest, scale_and_factor};
use hone_model::spec::Activation;

/// `out = x / rms(x) * weight`, for each column.
pub(crate) struct RmsNorm<'a> {
    pub out: &'a mut [f32],
    pub x: &'a [f32],
    pub width: usize,
    /// `[feature]`
    pub weight: &'a [f32],
    pub eps: f32,
}

impl SimdTask for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let mut columns = NormColumns { norm: self, column: 0 };
        while columns.column < columns.norm.width {
            match columns.norm.width - columns.column {
                COLUMN_BLOCK.. => columns.next::<FUSED, COLUMN_BLOCK>(),
                4.. => columns.next::<FUSED, 4>(),
                _ => columns.next::<FUSED, 1>(),
            }
        }
    }
}

/// [`RmsNorm`] of the columns from `column` on.
struct NormColumns<'a> {
    norm: RmsNorm<'a>,
    column: usize,
}

impl NormColumns<'_> {
    /// Computes the next `N` columns. The bits of a column do not depend on `N`.
    #[inline(always)]
    fn next<const FUSED: bool, const N: usize>(&mut self) {
        let (column, RmsNorm { out, x, width, weight, eps }) = (self.column, &mut self.norm);
        let (width, inverse_len) = (*width, 1.0 / weight.len() as f32);
        let add = |sums: &mut [f32; N], x: &[f32]| {
            for (sum, x) in sums.iter_mut().zip(&x[column..column + N]) {
                *sum = mul_add::<FUSED>(*x, *x, *sum);
            }
        };
        // Four independent chains of additions hide their latency. Four features at a time, so that the sums stay
        // in registers.
        let mut partial = [[0.0_f32; N]; 4];
        let mut all = x.chunks_exact(4 * width);
        for four in &mut all {
            let [a, b, c, d] = &mut partial;
            let (left, right) = four.split_at(2 * width);
            add(a, left);
            add(b, &left[width..]);
            add(c, right);
            add(d, &right[width..]);
        }
        let rest = all.remainder().chunks_exact(width);
        rest.zip(&mut partial).for_each(|(x, sums)| add(sums, x));
        let [a, b, c, d] = partial;
        let mut scale = [0.0_f32; N];
        for i in 0..N {
            let mean = ((a[i] + b[i]) + (c[i] + d[i])) * inverse_len;
            scale[i] = 1.0 / (mean + *eps).sqrt();
        }
        let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((out, x), w) in rows.zip(*weight) {
            let x = &x[column..column + N];
            let pairs = out[column..column + N].iter_mut().zip(x);
            for ((out, x), scale) in pairs.zip(scale) {
                *out = x * scale * w;
            }
        }
        self.column += N;
    }
}

/// `out = activation(gate) * up`
pub(crate) struct GatedActivation<'a> {
    pub out: &'a mut [f32],
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub activation: Activation,
}

impl SimdTask for GatedActivation<'_> {
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
                    *out = 0.5 * g * (1.0 + Real::tanh(ROOT * g * (1.0 + 0.044_715 * g * g))) * u;
                });
            }
        }
    }
}

/// `x = cap tanh(x / cap)`
pub(crate) struct Softcap<'a> {
    pub x: &'a mut [f32],
    pub cap: f32,
}

impl SimdTask for Softcap<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let inverse = 1.0 / self.cap;
        self.x.iter_mut().for_each(|x| *x = self.cap * Real::tanh(*x * inverse));
    }
}

/// `x += y`
pub(crate) struct AddInPlace<'a>(pub &'a mut [f32], pub &'a [f32]);

impl SimdTask for AddInPlace<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        self.0.iter_mut().zip(self.1).for_each(|(x, y)| *x += y);
    }
}

/// Rounds values to integers from -32767 to 32767 times a scale, which it returns. If a value is infinite or NaN,
/// so is the scale.
pub(crate) struct RoundToIntegers<'a> {
    pub x: &'a [f32],
    pub out: &'a mut [i16],
    /// Integers are this many places apart.
    pub step: usize,
}

impl SimdTask for RoundToIntegers<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let greatest = self.x.iter().map(|x| magnitude_bits(*x)).fold(0, u32::max);
        let (scale, factor) = scale_and_factor(greatest, 32767.0);
        let round = |x: &f32| nearest(x * factor) as i16;
        if self.step == 1 {
            self.out.iter_mut().zip(self.x).for_each(|(out, x)| *out = round(x));
        } else {
            let out = self.out.iter_mut().step_by(self.step);
            out.zip(self.x).for_each(|(out, x)| *out = round(x));
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use hone_core::simd::dispatch;
    use hone_core::testing::{assert_same_bits, assert_same_bits_if_fused};
    use hone_model::testing::waves;

    use super::*;

    const FEATURES: [usize; 3] = [3, 16, 50];
    const WIDTH: usize = 2 * COLUMN_BLOCK;

    #[test]
    fn every_instruction_set_that_fuses_normalizes_to_the_same_bits() {
        for features in FEATURES {
            let (x, weight) = (waves(features * WIDTH, 0.3), waves(features, 1.9));
            assert_same_bits_if_fused(|instructions| {
                let mut out = vec![0.0; x.len()];
                let (width, weight) = (WIDTH, &weight[..]);
                instructions.run(RmsNorm { out: &mut out, x: &x, width, weight, eps: 1e-6 });
                out
            });
        }
    }

    #[test]
    fn a_norm_does_not_depend_on_the_other_columns() {
        for features in FEATURES {
            let (x, weight) = (waves(features * WIDTH, 0.3), waves(features, 1.9));
            let norm = |width: usize| {
                let x: Vec<f32> = x.chunks(WIDTH).flat_map(|row| &row[..width]).copied().collect();
                let mut out = vec![0.0; x.len()];
                dispatch(RmsNorm { out: &mut out, x: &x, width, weight: &weight, eps: 1e-6 });
                out
            };
            let all = norm(WIDTH);
            for width in [1, 2, 3, 4, 6, 8, 16] {
                for (row, all) in norm(width).chunks(width).zip(all.chunks(WIDTH)) {
                    assert_eq!(row, &all[..width]);
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_activates_and_adds_to_the_same_bits() {
        for (n, activation) in
            FEATURES.iter().flat_map(|n| [Activation::Silu, Activation::GeluTanh].map(|a| (*n, a)))
        {
            let (gate, up) = (waves(n, 0.3), waves(n, 1.9));
            assert_same_bits(|instructions| {
                let mut out = vec![0.0; n];
                let (gate, up) = (&gate[..], &up[..]);
                instructions.run(GatedActivation { out: &mut out, gate, up, activation });
                let (mut capped, mut sum) = (gate.to_vec(), gate.to_vec());
                instructions.run(Softcap { x: &mut capped, cap: 3.0 });
                instructions.run(AddInPlace(&mut sum, up));
                [out, capped, sum].concat()
            });
        }
    }
}
