//! The two float types that the kernels compute in, and their reductions.

use std::cell::Cell;
use std::convert;
use std::ops::{Add, Div, Mul, Sub};
use std::thread::LocalKey;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::blocks::QuantizedMatrix;
use crate::vector::{exp_f32, widen_bf16};

/// f32 for training, f64 for checking gradients.
pub trait Real:
    candle_core::WithDType
    + Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// `x` rounded to this type.
    fn of(x: f64) -> Self;
    /// `e^x`; in f32 by [`exp_f32`].
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Converts `from` into `to`, which has the same length. Exact.
    fn upcast_f16(to: &mut [Self], from: &[f16]);
    /// Converts `from` into `to`, which has the same length. Exact.
    fn upcast_bf16(to: &mut [Self], from: &[bf16]);
    /// Writes the values of a matrix from `first` on, which are whole blocks, to `to`. Exact.
    fn dequantize(matrix: &QuantizedMatrix, first: usize, to: &mut [Self]);
    /// This thread's buffer for values that are widened.
    fn upcast_buffer() -> &'static LocalKey<Cell<Vec<Self>>>;
    /// The same values, if this type is f32: some kernels exist for f32 alone.
    fn as_f32(values: &[Self]) -> Option<&[f32]>;
    /// As [`Self::as_f32`].
    fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]>;
    /// Converts values from f32. Exact.
    fn from_f32(values: Vec<f32>) -> Vec<Self>;

    /// `1 - 2 / (e^2x + 1)`
    #[inline(always)]
    fn tanh(self) -> Self {
        Self::of(1.0) - Self::of(2.0) / ((self + self).exp() + Self::of(1.0))
    }

    /// `1 / (1 + e^-x)`
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::of(1.0) / (Self::of(1.0) + (Self::of(0.0) - self).exp())
    }
}

macro_rules! real {
    ($type:ty, $exp:expr, $upcast:ident, $dequantize:expr, $as_f32:expr, $from_f32:expr) => {
        impl Real for $type {
            #[inline(always)]
            fn of(x: f64) -> Self {
                x as $type
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                <$type>::ln(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$type>::sqrt(self)
            }
            fn upcast_f16(to: &mut [Self], from: &[f16]) {
                from.$upcast(to);
            }
            fn upcast_bf16(to: &mut [Self], from: &[bf16]) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = widen_bf16(*from).into());
            }
            fn dequantize(matrix: &QuantizedMatrix, first: usize, to: &mut [Self]) {
                $dequantize(matrix, first, to);
            }
            fn upcast_buffer() -> &'static LocalKey<Cell<Vec<Self>>> {
                thread_local! {
                    static BUFFER: Cell<Vec<$type>> = const { Cell::new(Vec::new()) };
                }
                &BUFFER
            }
            fn as_f32(values: &[Self]) -> Option<&[f32]> {
                $as_f32(values)
            }
            fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]> {
                $as_f32(values)
            }
            fn from_f32(values: Vec<f32>) -> Vec<Self> {
                $from_f32(values)
            }
        }
    };
}

real!(f32, exp_f32, convert_to_f32_slice, QuantizedMatrix::dequantize, Some, convert::identity);
real!(f64, f64::exp, convert_to_f64_slice, dequantize_to_f64, none, to_f64);

fn dequantize_to_f64(matrix: &QuantizedMatrix, first: usize, to: &mut [f64]) {
    let mut values = vec![0.0; to.len()];
    matrix.dequantize(first, &mut values);
    to.iter_mut().zip(values).for_each(|(to, value)| *to = value.into());
}

fn none<T, U>(_: T) -> Option<U> {
    None
}

fn to_f64(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

// Reductions over a fixed number of lanes. Sums use no fused multiply-adds, so every instruction set returns the same
// bits.

/// Partial results of a reduction.
pub const LANES: usize = 16;

/// `sum a_i b_i`
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    lanes(a, b, |a, b| a * b)
}

/// `sum a_i`
#[inline(always)]
pub fn sum<T: Real>(a: &[T]) -> T {
    lanes(a, a, |a, _| a)
}

/// `sum f(a_i, b_i)`
#[inline(always)]
fn lanes<T: Real>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut sums = [T::of(0.0); LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            sums[i] += f(a[i], b[i]);
        }
    }
    let mut total = T::of(0.0);
    for (a, b) in rest {
        total += f(*a, *b);
    }
    sums.iter().fold(total, |total, sum| total + *sum)
}

/// The largest value; minus infinity if there are no values.
#[inline(always)]
pub fn max<T: Real>(a: &[T]) -> T {
    let larger = |x: T, y: T| if y > x { y } else { x };
    let mut most = [T::of(f64::NEG_INFINITY); LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder();
    for a in chunks {
        for i in 0..LANES {
            most[i] = larger(most[i], a[i]);
        }
    }
    let start = rest.iter().fold(T::of(f64::NEG_INFINITY), |m, x| larger(m, *x));
    most.iter().fold(start, |m, x| larger(m, *x))
}
