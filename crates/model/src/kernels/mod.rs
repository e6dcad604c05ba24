//! CPU kernels of the transformer over plain slices, and candle graphs of the same operations.

pub mod compute;
pub(crate) mod linear;
pub(crate) mod ops;
pub(crate) mod rowwise;
pub mod storage;

pub use hone_kernels::{matmul, parallel};

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
