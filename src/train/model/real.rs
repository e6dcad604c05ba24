//! The two float types that our own operations run in.

use std::ops::{Add, Div, Mul, Sub};

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
    /// `e^x`
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
}

macro_rules! real {
    ($type:ty) => {
        impl Real for $type {
            fn of(x: f64) -> Self {
                x as $type
            }
            fn exp(self) -> Self {
                <$type>::exp(self)
            }
            fn ln(self) -> Self {
                <$type>::ln(self)
            }
            fn sqrt(self) -> Self {
                <$type>::sqrt(self)
            }
        }
    };
}

real!(f32);
real!(f64);
