//! The two float types that the kernels compute in.

use std::cell::Cell;
use std::convert;
use std::ops::{Add, Div, Mul, Sub};
use std::thread::LocalKey;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::exp_f32;
use crate::weights::QuantizedMatrix;

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
                let f32_of = |from: &bf16| f32::from_bits(u32::from(from.to_bits()) << 16);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = f32_of(from).into());
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

/// Evaluates an expression with the float type `$T` of a `DType`: f64, or else f32.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        if $dtype == candle_core::DType::F64 {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    };
}
pub(crate) use with_float;
