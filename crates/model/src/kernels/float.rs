//! The two float types that our own operations run in.

use std::cell::Cell;
use std::ops::{Add, Div, Mul, Sub};
use std::thread::LocalKey;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::simd;

/// f32 for work, f64 for checking gradients.
pub trait Real:
    candle_core::WithDType
    + Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// Rounded from f64.
    fn of(x: f64) -> Self;
    /// `e^x`; in f32 within 2 units in the last place, and vectorised.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Exact values of `from` into `to`, which is as long.
    fn widen_f16(to: &mut [Self], from: &[f16]);
    /// Exact values of `from` into `to`, which is as long.
    fn widen_bf16(to: &mut [Self], from: &[bf16]);
    /// A buffer that a thread keeps for widened values.
    fn widened() -> &'static LocalKey<Cell<Vec<Self>>>;

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
    ($type:ty, $exp:expr, $widen:ident) => {
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
            fn widen_f16(to: &mut [Self], from: &[f16]) {
                from.$widen(to);
            }
            fn widen_bf16(to: &mut [Self], from: &[bf16]) {
                let wide = |from: &bf16| f32::from_bits(u32::from(from.to_bits()) << 16);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = wide(from).into());
            }
            fn widened() -> &'static LocalKey<Cell<Vec<Self>>> {
                thread_local! {
                    static WIDENED: Cell<Vec<$type>> = const { Cell::new(Vec::new()) };
                }
                &WIDENED
            }
        }
    };
}

real!(f32, simd::exp_f32, convert_to_f32_slice);
real!(f64, f64::exp, convert_to_f64_slice);
