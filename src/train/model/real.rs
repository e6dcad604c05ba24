//! The two float types that our own operations run in.

use std::cell::Cell;
use std::ops::{Add, Div, Mul, Sub};

use super::simd;

/// f32 for work, f64 for checking gradients.
pub(crate) trait Real:
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
    /// Lends a thread's buffer of `len` values, whatever they are. It grows to the most that has been
    /// asked for and stays, so that no pages are cleared for it again.
    fn with_buffer<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R;

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
    ($type:ty, $exp:expr) => {
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
            fn with_buffer<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R {
                thread_local! {
                    static BUFFER: Cell<Vec<$type>> = const { Cell::new(Vec::new()) };
                }
                // Taken, as `f` may lend once more.
                let mut buffer = BUFFER.take();
                if buffer.len() < len {
                    buffer.resize(len, 0.0);
                }
                let result = f(&mut buffer[..len]);
                BUFFER.set(buffer);
                result
            }
        }
    };
}

real!(f32, simd::exp_f32);
real!(f64, f64::exp);
